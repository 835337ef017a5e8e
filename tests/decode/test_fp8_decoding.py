"""FP8 end to end: speculation emits what plain decoding of the same precision does.

The float8 cache holds what it was given, to the precision of its scales.
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))
pytest.importorskip("torch")
import families  # noqa: E402
import tiny  # noqa: E402

from peagle_jax.checkpoints.head_reading import to_model  # noqa: E402
from peagle_jax.checkpoints.head_writing import from_model  # noqa: E402
from peagle_jax.checkpoints.target_io import load_target  # noqa: E402
from peagle_jax.decode import memory  # noqa: E402
from peagle_jax.decode.generate import generate  # noqa: E402
from peagle_jax.kernels import fp8_matmul  # noqa: E402
from peagle_jax.layers import CachedAttention  # noqa: E402
from peagle_jax.types import AttentionRule, CacheShape, KVCache  # noqa: E402

NEW, K = 14, 3
PROMPTS = [list(range(3, 33)), [7, 90, 2, 55, 13], [60]]
E4M3 = jnp.dtype(jnp.float8_e4m3fn)


@functools.cache
def fp8_target(case: str):
    target = load_target(families.make(case)[1], aux_hidden_state_layers=(0, 1, 4), fp8=True)
    return dataclasses.replace(target, config=dataclasses.replace(target.config, cache_dtype=E4M3))


RINGS = {"prefill_chunk": 8, "sliding_cache": True}


@pytest.mark.parametrize(
    "case, rings",
    [("qwen3", RINGS), ("gpt_oss", {}), pytest.param("gemma4", RINGS, marks=pytest.mark.long)],
)
def test_speculation_emits_what_plain_decoding_does(case, rings):
    """With a head in FP8, too; what it drafts does not matter."""
    target = fp8_target(case)
    config = dict(
        vocab=families.V,
        draft_vocab=families.V,
        target_dim=target.config.dim,
        aux_hidden_state_layers=target.config.aux_hidden_state_layers,
    )
    if case == "gpt_oss":
        config |= {"markov_rank": 8, "markov_kind": "gated"}
    head = to_model(from_model(tiny.head(**config)), fp8=True)
    assert (
        head.params["lm_head"]["values"].dtype == E4M3
        and head.params["fusion"]["fc"]["scale"].dtype == jnp.float32
    )
    plain = generate(target, None, PROMPTS, max_new_tokens=NEW, stop_ids=(), **rings)
    answers = generate(target, head, PROMPTS, k=K, max_new_tokens=NEW, stop_ids=(), **rings)
    assert [a.output_token_ids for a in answers] == [a.output_token_ids for a in plain]
    assert sum(a.num_drafts for a in answers) > 0
    exact = generate(families.ours(case), None, PROMPTS, max_new_tokens=NEW, stop_ids=(), **rings)
    assert [a.output_token_ids for a in exact] != [
        a.output_token_ids for a in plain
    ]  # it is another precision


def test_the_cache_holds_vectors_to_a_sixteenth():
    """Every vector has its own scale, so that a large one does not cost a small one its bits.

    Slots that are written again get new scales.
    """
    rng = np.random.default_rng(0)
    cache = KVCache.empty((CacheShape((0, 1), 2, 16, None),), 3, 9, E4M3)
    group = cache.groups[0]
    assert (
        group.k[1].dtype == E4M3 and group.k_scale[1].shape == (3, 2, 9) and len(group.v_scale) == 2
    )
    size = 10.0 ** rng.integers(-3, 4, (3, 4, 2, 1))
    k, v = (jnp.asarray(rng.standard_normal((3, 4, 2, 16)) * size, jnp.float32) for _ in range(2))
    q, rule = jnp.ones((3, 4, 2, 16)), AttentionRule(None, 0.1)
    for start in (2, 5, 3):
        positions = jnp.asarray(np.array([start] * 3)[:, None] + np.arange(4)[None], jnp.int32)
        _, cache = CachedAttention(positions)(1, q, k, v, cache, rule)
        k, v = v, k  # the last ones overwrite some of those before
    group = cache.groups[0]
    for cached, scale, given in (
        (group.k[1], group.k_scale[1], v),
        (group.v[1], group.v_scale[1], k),
    ):
        got = (np.asarray(cached, np.float32) * np.asarray(scale)[..., None])[:, :, 3:7]
        want = np.asarray(given.transpose(0, 2, 1, 3))
        assert (
            np.abs(got - want)
            <= np.maximum(
                np.abs(want) / 16, np.abs(want).max(-1, keepdims=True) * 2**-9 / 448 * 1.01
            )
        ).all()
    assert not np.asarray(group.k[0], np.float32).any()


def test_attention_over_a_float8_cache():
    """As over the same cache, decoded."""
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((2, 6, 2, 16)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((2, 6, 4, 16)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    attend, rule = CachedAttention(positions), AttentionRule(4, 0.3)
    got, _ = attend(0, q, k, v, KVCache.empty((CacheShape((0,), 2, 16, None),), 2, 8, E4M3), rule)
    k, v = (
        x.astype(jnp.float32) * s[..., None] for x, s in (fp8_matmul.scaled(x, -1) for x in (k, v))
    )
    want, _ = attend(
        0, q, k, v, KVCache.empty((CacheShape((0,), 2, 16, None),), 2, 8, jnp.float32), rule
    )
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-6)


def test_bytes_of_a_float8_cache_are_predicted():
    shapes = (CacheShape((0, 1), 2, 16, None), CacheShape((2,), 4, 32, 5))
    cache = KVCache.empty(shapes, 3, 40, E4M3, block=7)
    arrays = [x for g in cache.groups for x in (*g.k, *g.v, *g.k_scale, *g.v_scale)]
    assert memory.cache_bytes(shapes, 3, 40, E4M3, block=7) == sum(x.nbytes for x in arrays)
