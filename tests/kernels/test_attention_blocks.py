"""Cached attention in blocks of keys against float64 loops, and what it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.kernels import attention, attention_blocks, processor
from peagle_jax.kernels.attention_blocks import attend_in_blocks
from peagle_jax.kernels.fp8_matmul import E4M3
from peagle_jax.layers import CachedAttention, attention_operands
from peagle_jax.types import AttentionRule, KVCache
from tests import tiny
from tests.kernels.test_cached_attention import RULES, case, ring, slow

BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """150 slots are five blocks, of which the last reaches back into the one before."""
    monkeypatch.setattr(attention_blocks, "block_keys", lambda num_queries: 32)


def test_keys_of_a_block(monkeypatch):
    """A chunk of 512 tokens and 6 heads has 512, eight such chunks 128."""
    monkeypatch.undo()
    sizes = {n: attention_blocks.block_keys(n) for n in (1, 3072, 4096, 4097, 8192, 8193, 10**6)}
    wanted = {1: 512, 3072: 512, 4096: 512, 4097: 256, 8192: 256, 8193: 128, 10**6: 128}
    assert sizes == wanted


@pytest.mark.parametrize("lengths", [(1, 70, 146), (96, 129, 128), (97, 124, 125)], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_blocks_agree(rule, lengths):
    """Rows that begin at once; then blocks before all queries, which begin and end at their edges.

    A row of length n has its queries at positions n - 1 to n + 2.
    """
    args = case(lengths=lengths)
    y = jax.jit(lambda *args: attend_in_blocks(*args, None, **rule))(*args)
    assert np.abs(np.asarray(y) - slow(*args, None, **rule)).max() < 1e-5


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rings_agree(rule):
    q, k, v, positions = case(S=40)
    rule = rule | {"window": rule["window"] or 30}
    y = attend_in_blocks(q, k, v, positions, ring(), **rule)
    assert np.abs(np.asarray(y) - slow(q, k, v, positions, ring(), **rule)).max() < 1e-5


def test_fewer_slots_than_a_block():
    q, k, v, positions = case(S=20, lengths=(1, 7, 17))
    y = attend_in_blocks(q, k, v, positions, None, **RULES["window"])
    want = slow(q, k, v, positions, None, **RULES["window"])
    assert np.abs(np.asarray(y) - want).max() < 1e-5


@pytest.mark.parametrize("shift", [-1000, 1000])
def test_queries_that_see_nothing_give_numbers(shift):
    """As padding before and behind the cache."""
    q, k, v, positions = case()
    assert np.isfinite(attend_in_blocks(q, k, v, positions + shift, None, **RULES["window"])).all()


def test_sinks_far_above_and_below_all_scores():
    args = case()
    rule = RULES["plain"] | {"sinks": jnp.asarray([300.0, -300, 0, 0, 300, 1])}
    y = np.asarray(attend_in_blocks(*args, None, **rule))
    assert np.abs(y - slow(*args, None, **rule)).max() < 1e-5
    assert not y[:, :, 0].any()


def test_large_scores_do_not_overflow():
    q, k, v, positions = case()
    y = attend_in_blocks(100 * q, k, v, positions, None, **RULES["plain"])
    want = slow(100 * q, k, v, positions, None, **RULES["plain"])
    assert np.abs(np.asarray(y) - want).max() < 1e-4


@pytest.mark.parametrize("operands", [jnp.bfloat16, None])
def test_operands_and_scales_are_those_of_the_reference(operands):
    """Of a float8 cache, and of one that was rounded when it was written."""
    q, k, v, positions = case(T=9, lengths=(1, 70, 142))
    if operands is not None:
        k, v = (attention.round_to(operands, x) for x in (k, v))
    rule = RULES["sinks"] | {"operands": operands}
    y = attend_in_blocks(q, k, v, positions, None, **rule)
    want = attention.reference(q, k, v, positions, None, **rule)
    # both round their weights to eight bits, before and after they divide by their sum
    tolerance = 1e-5 if operands is None else 2**-7
    assert np.abs(np.asarray(y) - want).max() < tolerance
    if operands is not None:
        exact = slow(attention.round_to(operands, q), k, v, positions, None, **RULES["sinks"])
        assert np.abs(np.asarray(y) - exact).max() < 2**-8
    rng = np.random.default_rng(1)
    scales = {
        name: jnp.asarray(rng.uniform(0.5, 2, k.shape[:3]), jnp.float32)
        for name in ("k_scale", "v_scale")
    }
    args = q, k.astype(E4M3), v.astype(E4M3), positions, None
    y = attend_in_blocks(*args, **rule, **scales)
    want = attention.reference(*args, **rule, **scales)
    assert np.abs(np.asarray(y) - want).max() < 2 * tolerance


@pytest.mark.parametrize("window", [None, 40])
def test_slots_that_nobody_sees_are_not_read(window):
    """NaN in them would be seen: a product of 0 and NaN is NaN."""
    q, k, v, positions = case(lengths=(100, 101, 110))
    rule = RULES["plain"] | {"window": window}
    k, v = (x.at[:, :, 128:].set(jnp.nan) for x in (k, v))
    if window is not None:
        k, v = (x.at[:, :, :32].set(jnp.nan) for x in (k, v))
    y = np.asarray(attend_in_blocks(q, k, v, positions, None, **rule))
    assert np.abs(y - slow(q, k, v, positions, None, **rule)).max() < 1e-5


def test_who_attends_in_blocks(monkeypatch):
    """On one CPU so many queries with more scores than so many, unless a mask says who sees."""
    calls = []
    monkeypatch.setattr(
        attention_blocks, "attend_in_blocks", lambda *a, **r: calls.append(a) or attend(*a, **r)
    )
    attend = attend_in_blocks
    args, rule = (*case(), None), RULES["plain"]
    want = slow(*args, **rule)
    num_scores = 3 * 6 * 4 * 150
    monkeypatch.setattr(attention, "MAX_SCORES", num_scores)
    monkeypatch.setattr(attention, "LEAST_QUERIES", 4)
    attention.attend(*args, form="auto", **rule)
    assert not calls
    monkeypatch.setattr(attention, "MAX_SCORES", num_scores - 1)
    y = attention.attend(*args, form="auto", **rule)
    assert len(calls) == 1 and np.abs(np.asarray(y) - want).max() < 1e-5
    monkeypatch.setattr(attention, "LEAST_QUERIES", 5)
    attention.attend(*args, form="auto", **rule)
    monkeypatch.setattr(attention, "LEAST_QUERIES", 4)
    seen = jnp.ones((3, 4, 150), bool)
    attention.attend(*args, form="auto", visible=seen, **rule)
    monkeypatch.setattr(attention, "multi_device_reason", lambda: "of eight devices")
    attention.attend(*args, form="auto", **rule)
    monkeypatch.setattr(attention, "multi_device_reason", lambda: None)
    monkeypatch.setattr(attention, "platform", lambda: "gpu")
    attention.attend(*args, form="auto", **rule)
    attention.attend(*args, form="reference", **rule)
    assert len(calls) == 1


def test_narrowed_is_rounded_to_the_nearest_and_even():
    """As XLA converts, ties, the smallest and the largest numbers included."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 100_000, np.uint32)
    halves = (bits & 0xFFFF0000) | 0x8000  # as near to one neighbour as to the other
    some = [0.0, -0.0, np.inf, -np.inf, 1e-45, 3.4e38, -3.4e38, 1.0, 1 + 2**-8, 1 + 3 * 2**-8]
    x = np.concatenate([bits.view(np.float32), halves.view(np.float32), np.float32(some)])
    x = x[~np.isnan(x)]
    got = np.asarray(attention.narrowed(jnp.asarray(x), jnp.bfloat16))
    with np.errstate(over="ignore"):
        want = x.astype(got.dtype)
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    assert np.isnan(attention.narrowed(jnp.float32(np.nan), jnp.bfloat16))
    ones = np.float32([0.1, 0.7, 1.0])
    half = attention.narrowed(jnp.asarray(ones), jnp.float16)
    np.testing.assert_array_equal(half, ones.astype(np.float16))


@pytest.mark.parametrize(
    "flags, prompts, steps",
    [("fpu sse2", None, None), ("avx512_bf16", BF16, None), ("avx512_bf16 amx_bf16", BF16, BF16)],
)
def test_what_is_multiplied_in_16_bits(flags, prompts, steps, monkeypatch):
    """By AVX-512 only prompts: a step would convert the cache for it."""
    monkeypatch.setattr(processor, "instructions", lambda: flags)
    assert attention_operands(jnp.float32) is attention_operands(jnp.float16) is None
    operands = attention_operands(jnp.bfloat16)
    assert operands == prompts and attention.step_operands(operands) == steps
    seen = []

    def note(q, *_, operands, **rest):
        seen.append(operands)
        return q

    monkeypatch.setattr(attention_blocks, "attend_in_blocks", note)
    monkeypatch.setattr(attention, "FORMS", {"reference": note})
    monkeypatch.setattr(attention, "MAX_SCORES", 1000)
    rule = {"window": None, "scale": 1.0, "sinks": None, "operands": operands, "form": "auto"}
    k = jnp.zeros((1, 1, 128, 8))
    for tokens in (64, 8):
        positions = jnp.arange(tokens)[None]
        attention.attend(jnp.zeros((1, tokens, 2, 8)), k, k, positions, None, **rule)
    assert seen == [prompts, steps]


@pytest.mark.parametrize("flags, is_rounded", [("avx512_bf16", False), ("amx_bf16", True)])
def test_what_a_step_multiplies_in_16_bits_was_rounded_when_written(flags, is_rounded, monkeypatch):
    monkeypatch.setattr(processor, "instructions", lambda: flags)
    cache = KVCache.empty(tiny.target().config.cache_shapes(), 1, 16, jnp.float32)
    _, heads, _, width = cache.groups[0].k[0].shape
    new = jnp.full((1, 1, heads, width), 1 + 2**-10, jnp.float32)
    rule = AttentionRule(None, 1.0, None, attention_operands(jnp.bfloat16))
    attend = CachedAttention(jnp.zeros((1, 1), jnp.int32))
    _, after = attend(0, jnp.zeros((1, 1, 2 * heads, width)), new, new, cache, rule)
    assert float(after.groups[0].k[0].max()) == (1 if is_rounded else 1 + 2**-10)
