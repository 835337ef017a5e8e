"""Whole models as a GPU would run them, with every Triton kernel in its interpreter.

So models hand kernels what these expect.
"""

import dataclasses
import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.interpreter import interpret_later

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))
pytest.importorskip("torch")
import families  # noqa: E402
import tiny  # noqa: E402

from peagle_jax.checkpoints.head_reading import to_model  # noqa: E402
from peagle_jax.checkpoints.head_writing import from_model  # noqa: E402
from peagle_jax.checkpoints.target_io import load_target  # noqa: E402
from peagle_jax.decode.generate import generate  # noqa: E402
from peagle_jax.kernels.launch import disable_kernels, interpret_kernels  # noqa: E402
from peagle_jax.layers import CachedAttention  # noqa: E402

PROMPTS = [[7, 90, 2, 55, 13, 31], [60]]
SLOTS = 272  # more than the 256 that one program reads, so that parts of attention are merged
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
COMMON = {
    "attention_triton.attention_kernel",
    "cache_write_triton.write_kernel",
    "vocab_triton.topk_kernel",
}
EXPERTS = {
    "experts_triton.expert_kernel",
    "experts_triton.sort_kernel",
    "routing_triton.product_kernel",
    "routing_triton.choice_kernel",
}
NORMS = {"norm_rotate_triton.rotate_kernel"}  # of queries and keys
JOINT = {"fp8_matmul_triton.joint_kernel"}  # of queries, keys and values
FP8 = {"fp8_matmul_triton.fp8_kernel", "fp8_matmul_triton.quantize_kernel"}
CASES = {  # family, load options, ring caches, options of the head, kernels beside COMMON
    "mixture in FP8": (
        "qwen3_moe_raw",
        {"fp8": True},
        False,
        {"fc_norm": True},
        EXPERTS | FP8 | NORMS | JOINT | {"experts_gemv_triton.expert_gemv_kernel"},
    ),
    "mixture of biases and sinks, rings": (
        "gpt_oss",
        {},
        True,
        {"norm_before_fc": True},
        EXPERTS | {"fusion_triton.fusion_kernel"},
    ),
}


@pytest.fixture
def started():
    """Names of all kernels that were launched."""
    names = set()

    def start(launch):
        module = inspect.unwrap(launch.kernel.fn).__module__.rsplit(".", 1)[-1]
        names.add(f"{module}.{launch.kernel.__name__}")
        return interpret_later(launch)

    jax.clear_caches()  # what was traced without kernels, and afterwards with them
    with interpret_kernels(start):
        yield names
    jax.clear_caches()


def loaded(case):
    """The target of a case; with an FP8 cache where it is FP8 itself."""
    family, load_options, *_ = CASES[case]
    target = load_target(
        families.make(family)[1],
        aux_hidden_state_layers=(0, 1, 4),
        dtype=jnp.bfloat16,
        **load_options,
    )
    if not load_options:
        return target
    return dataclasses.replace(target, config=dataclasses.replace(target.config, cache_dtype=E4M3))


def forward(target, rings: bool):
    """Logits [2 10 V] and argmaxes of two rows, read in blocks of six and four.

    Rings have nine slots, and blocks of four, four and two. Eight tokens and fewer have other
    kernels than twelve.
    """
    module = target.bind(target.params)
    cache = target.config.empty_cache(2, SLOTS, block=4 if rings else None)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, families.V, (2, 10)))
    blocks = []
    size = 4 if rings else 6
    for here in (slice(i, min(i + size, 10)) for i in range(0, 10, size)):
        positions = jnp.broadcast_to(jnp.arange(10)[None, here], tokens[:, here].shape)
        out, cache = module(tokens[:, here], positions, CachedAttention(positions), cache)
        cache = dataclasses.replace(cache, length=cache.length + positions.shape[1])
        blocks.append(
            (
                np.asarray(module.compute_logits(out.hidden), np.float32),
                np.asarray(module.argmax_logits(out.hidden)),
            )
        )
    return [np.concatenate(parts, axis=1) for parts in zip(*blocks, strict=True)]


@pytest.mark.parametrize(
    "case, most", [("mixture in FP8", 0.15), ("mixture of biases and sinks, rings", 0.05)]
)
def test_logits_are_the_references(case, most, started):
    """Every token's logits, up to the rounding of bfloat16 and FP8.

    FP8's steps are 1/16, and fall otherwise where a sum does; a wrong slot is off by 1.
    """
    _, _, rings, _, kernels = CASES[case]
    target = loaded(case)
    logits, ids = forward(target, rings)
    head_kernels = {"fusion_triton.fusion_kernel", *JOINT}
    # the first case has windows alone, whose few slots one program reads
    merged = {"attention_triton.merge_kernel"} if rings else set()
    assert started == COMMON | merged | kernels - head_kernels
    with disable_kernels():
        want, _ = forward(target, rings)
    apart = np.linalg.norm(logits - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert 0 < np.median(apart) < most / 2 and apart.max() < most, apart
    assert (ids == logits.argmax(axis=-1)).all()


@pytest.mark.parametrize(
    "case",
    [pytest.param("mixture in FP8", marks=pytest.mark.long), "mixture of biases and sinks, rings"],
)
def test_speculation_emits_what_plain_decoding_does(case, started):
    _, load_options, rings, head_options, kernels = CASES[case]
    target = loaded(case)
    head = tiny.head(
        vocab=families.V,
        draft_vocab=families.V,
        target_dim=target.config.dim,
        aux_hidden_state_layers=target.config.aux_hidden_state_layers,
        **head_options,
    )
    head = to_model(from_model(head), dtype=jnp.bfloat16, fp8=bool(load_options))
    options = dict(
        max_new_tokens=4,
        stop_ids=(),
        **({"prefill_chunk": 4, "sliding_cache": True} if rings else {}),
    )
    plain = generate(target, None, PROMPTS, **options)
    answers = generate(target, head, PROMPTS, k=2, **options)
    assert [a.output_token_ids for a in answers] == [a.output_token_ids for a in plain]
    # plain decoding has a row a prompt, fewer than a tensor core is asked for
    gemv = {"gemv_triton.gemv_kernel"} if load_options else set()
    assert started == COMMON | kernels | gemv
