"""Whole models as a GPU would run them, every Triton kernel in its interpreter: that models hand kernels what these expect."""

import dataclasses
import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.interpreter import interpret_later

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))
pytest.importorskip("torch")
import families  # noqa: E402
import tiny  # noqa: E402

from peagle_jax.checkpoints.head_io import of_model, to_model  # noqa: E402
from peagle_jax.checkpoints.target_io import load_target  # noqa: E402
from peagle_jax.decode.generate import generate  # noqa: E402
from peagle_jax.kernels.launch import disable_kernels, interpret_kernels  # noqa: E402
from peagle_jax.layers import CachedAttention  # noqa: E402

PROMPTS = [[7, 90, 2, 55, 13, 31], [60]]
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
COMMON = {
    "attention_triton.kernel",
    "attention_triton.merge_kernel",
    "cache_write_triton.kernel",
    "vocab_triton.peaks_kernel",
}
EXPERTS = {"experts_triton.kernel", "experts_triton.sort_kernel"}
FP8 = {"fp8_matmul_triton.kernel", "fp8_matmul_triton.quantise_kernel"}
CASES = {  # family, how it is loaded, rings, the head's form, kernels beside the common ones
    "mixture in FP8": ("qwen3_moe_raw", {"fp8": True}, False, {"fc_norm": True}, EXPERTS | FP8),
    "mixture of biases and sinks, rings": (
        "gpt_oss",
        {},
        True,
        {"norm_before_fc": True},
        EXPERTS | {"fusion_triton.kernel"},
    ),
}


@pytest.fixture
def started():
    """Names of all kernels that were started."""
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
    family, how, *_ = CASES[case]
    target = load_target(
        families.make(family)[1], aux_hidden_state_layers=(0, 1, 4), dtype=jnp.bfloat16, **how
    )
    return (
        dataclasses.replace(target, config=dataclasses.replace(target.config, cache_dtype=E4M3))
        if how
        else target
    )


def forward(target, rings: bool):
    """Logits [2 10 V] and argmaxes of two rows, read in blocks of four, four and two; rings have nine slots."""
    module, cache = (
        target.bind(target.params),
        target.config.empty_cache(2, 12, block=4 if rings else None),
    )
    tokens, found = jnp.asarray(np.random.default_rng(0).integers(0, families.V, (2, 10))), []
    for here in (slice(0, 4), slice(4, 8), slice(8, 10)):
        positions = jnp.broadcast_to(jnp.arange(10)[None, here], tokens[:, here].shape)
        out, cache = module(tokens[:, here], positions, CachedAttention(positions), cache)
        cache = dataclasses.replace(cache, length=cache.length + positions.shape[1])
        found.append(
            (
                np.asarray(module.compute_logits(out.hidden), np.float32),
                np.asarray(module.argmax_logits(out.hidden)),
            )
        )
    return [np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "case, most", [("mixture in FP8", 0.15), ("mixture of biases and sinks, rings", 0.05)]
)
def test_logits_are_the_references(case, most, started):
    """Every token's, up to bfloat16 and to FP8, whose steps are 1/16 and fall otherwise where a sum does; a wrong slot is off by 1."""
    _, _, rings, _, kernels = CASES[case]
    target = loaded(case)
    logits, argmax_logits = forward(target, rings)
    assert started == COMMON - {"attention_triton.merge_kernel"} | kernels - {
        "fusion_triton.kernel"
    }
    with disable_kernels():
        want, _ = forward(target, rings)
    apart = np.linalg.norm(logits - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert (
        0 < np.median(apart) < most / 2
        and apart.max() < most
        and (argmax_logits == logits.argmax(axis=-1)).all()
    ), apart


@pytest.mark.parametrize(
    "case",
    [pytest.param("mixture in FP8", marks=pytest.mark.long), "mixture of biases and sinks, rings"],
)
def test_speculation_emits_what_plain_decoding_does(case, started):
    _, how, rings, form, kernels = CASES[case]
    target = loaded(case)
    head = tiny.head(
        vocab=families.V,
        draft_vocab=families.V,
        target_dim=target.config.dim,
        aux_hidden_state_layers=target.config.aux_hidden_state_layers,
        **form,
    )
    head = to_model(of_model(head), dtype=jnp.bfloat16, fp8=bool(how))
    options = dict(
        max_new_tokens=4,
        stop_ids=(),
        **({"prefill_chunk": 4, "sliding_cache": True} if rings else {}),
    )
    plain = generate(target, None, PROMPTS, **options)
    answers = generate(target, head, PROMPTS, k=2, **options)
    assert [a.output_token_ids for a in answers] == [a.output_token_ids for a in plain]
    assert started == COMMON | kernels
