"""Cached attention in Triton against the reference, and the reference against float64 loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.interpreter import Sparse, interpret, interpret_sparse

from peagle_jax.kernels import attention, attention_triton
from peagle_jax.kernels.fp8_matmul import E4M3, scaled
from peagle_jax.kernels.launch import H200


def case(B=3, T=4, N=6, G=2, S=150, H=24, *, lengths=(1, 70, 146), seed=0, kv=np.float32):
    """Queries at the last T positions of rows of these lengths; what lies past them is not zero."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in ((B, T, N, H), (B, G, S, H), (B, G, S, H)))
    positions = jnp.asarray(np.array(lengths)[:, None] - 1 + np.arange(T)[None], jnp.int32)
    return jnp.asarray(q, jnp.float32), jnp.asarray(k, kv), jnp.asarray(v, kv), positions


def slow(q, k, v, positions, kv_positions, window, scale, sinks):
    """One query, one head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, H = q.shape
    G, S = k.shape[1:3]
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(B, T, N):
        p = int(positions[b, t])
        at = np.arange(S) if kv_positions is None else np.asarray(kv_positions[b])
        slots = [s for s in range(S) if 0 <= at[s] <= p and (window is None or at[s] > p - window)]
        x = k[b, n // (N // G), slots] @ q[b, t, n] * scale
        x = np.append(x, -np.inf if sinks is None else float(sinks[n]))
        w = np.exp(x - x.max())
        out[b, t, n] = (w / w.sum())[:-1] @ v[b, n // (N // G), slots]
    return out


def ring(S=40, B=3, T=4, lengths=(1, 70, 146)):
    """The position that each slot of a ring holds."""
    latest = np.array(lengths)[:, None] - 2 + T
    return jnp.asarray(latest - (latest - np.arange(S)[None]) % S, jnp.int32)


RULES = {
    "plain": dict(window=None, scale=0.3, sinks=None),
    "window": dict(window=13, scale=0.2, sinks=None),
    "sinks": dict(window=None, scale=0.3, sinks=jnp.asarray([0.5, -1, 2, 0, 3, 1.5])),
    "window, sinks": dict(window=50, scale=0.25, sinks=jnp.asarray([0.5, -1, 2, 0, 3, 1.5])),
}


# in three splits, and in one
SPLIT = dict(min_span=64, max_span=64, shares=3, max_unsplit=0)
WHOLE = dict(max_unsplit=1000)


@pytest.mark.parametrize("splits", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_all_agree(rule, splits):
    args = case()
    want = slow(*args, None, **rule)
    got = attention_triton.attend(*args, None, **rule, start=interpret, **splits)
    for y in (attention.reference(*args, None, **rule), got):
        assert np.abs(np.asarray(y) - want).max() < 1e-5


@pytest.mark.parametrize("num_heads", [2, 6, 8, 16])
def test_one_token(num_heads):
    """With few heads for a key a CPU has another order of the product."""
    args = case(T=1, N=num_heads, lengths=(1, 77, 150))
    rule = RULES["plain"] | {"window": 60}
    got = attention.reference(*args, None, **rule)
    assert np.abs(np.asarray(got) - slow(*args, None, **rule)).max() < 1e-5
    lowered = jax.jit(functools.partial(attention.reference, **rule)).lower(*args, None)
    assert ("optimization_barrier" in lowered.as_text()) == (num_heads in (6, 8))


@pytest.mark.parametrize("splits", [SPLIT, WHOLE], ids=["split", "whole"])
def test_sinks_far_above_and_below_all_scores(splits):
    """No exponential overflows: one head gives nothing, another what it gives without a sink."""
    args = case()
    rule = RULES["plain"] | {"sinks": jnp.asarray([300.0, -300, 0, 0, 300, 1])}
    got = attention_triton.attend(*args, None, **rule, start=interpret, **splits)
    assert np.abs(np.asarray(got) - slow(*args, None, **rule)).max() < 1e-5
    assert not np.asarray(got)[:, :, 0].any()


@pytest.mark.parametrize(
    "tiles", [{}, SPLIT | {"bs": 16, "min_span": 16}], ids=["one split", "two"]
)
@pytest.mark.parametrize(
    "rule",
    [RULES["window"] | {"window": 30}, RULES["sinks"] | {"window": 9}],
    ids=["window", "sinks"],
)
def test_rings_agree(rule, tiles):
    q, k, v, positions = case(S=40)
    want = slow(q, k, v, positions, ring(), **rule)
    got = attention_triton.attend(q, k, v, positions, ring(), **rule, start=interpret, **tiles)
    for y in (attention.reference(q, k, v, positions, ring(), **rule), got):
        assert np.abs(np.asarray(y) - want).max() < 1e-5


@pytest.mark.parametrize(
    "shape",
    [
        dict(T=1, N=2, G=2, H=16),
        dict(T=9, N=16, G=1, H=64, S=200),
        dict(T=17, N=16, G=2, H=16, S=170),
    ],
    ids=str,
)
def test_shapes_agree(shape):
    """One query, and 144 and 136 a KV head: more than a tile."""
    q, k, v, positions = case(**shape)
    rule = RULES["plain"]
    got = attention_triton.attend(q, k, v, positions, None, **rule, start=interpret)
    assert np.abs(np.asarray(got) - slow(q, k, v, positions, None, **rule)).max() < 1e-5


def test_float8_with_scales():
    q, k, v, positions = case()
    rng = np.random.default_rng(5)
    k_scale, v_scale = (
        jnp.asarray(rng.uniform(0.2, 3, k.shape[:3]), jnp.float32) for _ in range(2)
    )
    k8, v8 = k.astype(E4M3), v.astype(E4M3)
    rule = RULES["window, sinks"]
    want = slow(
        q,
        k8.astype(jnp.float32) * k_scale[..., None],
        v8.astype(jnp.float32) * v_scale[..., None],
        positions,
        None,
        **rule,
    )
    scales = dict(k_scale=k_scale, v_scale=v_scale)
    args = q, k8, v8, positions, None
    got = attention_triton.attend(*args, **rule, **scales, start=interpret, **SPLIT)
    for y in (attention.reference(*args, **rule, **scales), got):
        assert np.abs(np.asarray(y) - want).max() < 1e-5


@pytest.mark.parametrize("splits", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("kv", [np.float32, E4M3], ids=["float32", "float8"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_reaches_those_who_see_it(which, kv, splits):
    """The second row's keys or values of slot 100 have a NaN."""
    q, k, v, positions = case(B=2, lengths=(70, 146))
    slot = (1, slice(None), 100)
    k, v = (x.at[*slot, 3].set(jnp.nan) if name == which else x for name, x in (("k", k), ("v", v)))
    scales = {}
    if kv == E4M3:
        (k, k_scale), (v, v_scale) = scaled(k, axis=-1), scaled(v, axis=-1)
        scales = dict(k_scale=k_scale, v_scale=v_scale)
    rule = RULES["plain"] | scales
    got = attention_triton.attend(q, k, v, positions, None, **rule, start=interpret, **splits)
    for y in (attention.reference(q, k, v, positions, None, **rule), got):
        assert np.isfinite(y[0]).all() and np.isnan(y[1]).any(axis=-1).all()


def test_bfloat16():
    """Within bfloat16's half step of the result, and of the weights rounded before the product."""
    q, k, v, positions = case(kv=jnp.bfloat16)
    q = q.astype(jnp.bfloat16)
    for rule in (RULES["plain"], RULES["window, sinks"]):
        want = slow(q, k, v, positions, None, **rule)
        for splits in (SPLIT, WHOLE):
            got = attention_triton.attend(
                q, k, v, positions, None, **rule, start=interpret, **splits
            )
            off = np.abs(np.asarray(got, np.float64) - want).max()
            assert got.dtype == jnp.bfloat16 and off < 2**-7 * np.abs(want).max()


def test_caches_of_more_than_2_31_numbers():
    """The second head's keys begin at number 2^31, where 32 bits wrap around."""
    H, S = 128, 2**24
    q, k, v, positions = case(B=1, T=2, N=2, G=2, S=3, H=H, lengths=(1,))
    rule, huge = RULES["plain"], Sparse((1, 2, S, H), np.float32)
    huge.array[:, :, :3] = k  # the values are the keys: one array of 17 GB is enough

    def attend(*args, start):
        return attention_triton.attend(*args, None, **rule, start=start, max_unsplit=S)

    got, _ = interpret_sparse(attend, q, huge, huge, positions)
    assert np.abs(np.asarray(got) - slow(q, k, k, positions, None, **rule)).max() < 1e-5


def test_slots_that_nobody_sees_are_not_read():
    """NaN in whole tiles past a row's length and before its window is not even multiplied by 0."""
    q, k, v, positions = case()
    rule = RULES["window"]

    def attend(k, v):
        return attention_triton.attend(q, k, v, positions, None, **rule, start=interpret, **SPLIT)

    slot, at = np.arange(k.shape[2])[None] // 64, np.asarray(positions)
    unseen = (slot > at[:, -1:] // 64) | (
        slot < np.maximum(at[:, :1] - rule["window"] + 1, 0) // 64
    )
    assert unseen[0, 64:].all() and unseen[2, :128].all()
    nan = [jnp.where(unseen[:, None, :, None], jnp.nan, x) for x in (k, v)]
    np.testing.assert_array_equal(np.asarray(attend(*nan)), np.asarray(attend(k, v)))


def parts_of(*args, **options):
    """The log-sum-exps of all parts, [splits B T N]; -1e30 where nothing is seen."""
    found = []

    def start(launch):
        results = interpret(launch)
        if launch.kernel is attention_triton.attention_kernel:
            found.append(results[1])
        return results

    attention_triton.attend(*args, start=start, **options)
    return np.asarray(found[0])


@pytest.mark.parametrize("window", [None, 21])
def test_every_length_is_read_whole(window):
    """Rows of 1 to 130 tokens in 130 slots, in splits of 16 and 32: none has too few."""
    S = 130
    lengths = np.arange(1, S + 1)
    q, k, v, positions = case(B=S, T=1, N=1, G=1, S=S, H=16, lengths=lengths)
    rule = RULES["plain"] | {"window": window}
    tiles = dict(bs=16, min_span=16, max_span=32, shares=3, max_unsplit=0)
    got = attention_triton.attend(q, k, v, positions, None, **rule, start=interpret, **tiles)
    want = attention.reference(q, k, v, positions, None, **rule)
    assert np.abs(np.asarray(got - want)).max() < 1e-5


def test_tokens_that_are_far_apart_see_all_of_their_windows():
    """Splits for a window's slots are few, and a block of any positions must fit into them."""
    q, k, v, _ = case(B=3, T=2, N=2, G=1, S=2000, H=16)
    # the last begins late within a split of 256 slots, and four of these would not reach its end
    positions = jnp.asarray([[3, 1990], [700, 1500], [300, 1190]], jnp.int32)
    rule = RULES["plain"] | {"window": 100}
    tiles = dict(max_unsplit=0, shares=3)
    parts = parts_of(q, k, v, positions, None, **rule, **tiles)
    assert len(parts) == 4  # and not the 32 spans of 64 slots that the cache has
    got = attention_triton.attend(q, k, v, positions, None, **rule, start=interpret, **tiles)
    assert np.abs(np.asarray(got) - slow(q, k, v, positions, None, **rule)).max() < 1e-5


@pytest.mark.parametrize("length, at_least, at_most", [(1000, 60, 66), (4096, 99, 198)])
def test_programs_follow_the_live_length_and_not_the_slots(length, at_least, at_most):
    """At batch 1 about one program a multiprocessor (132) reads, though there are 32k slots.

    Spans of 64 slots are not cut further, so 1,000 tokens of 4 heads make 64 programs.
    """
    args = case(B=1, T=1, N=4, G=4, S=32_768, H=16, lengths=(length,))
    parts = parts_of(*args, None, **RULES["plain"])
    assert at_least <= (parts > -1e29).sum() <= at_most
    assert len(parts) <= 50  # the grid has no more than 200 programs
    got = attention_triton.attend(*args, None, **RULES["plain"], start=interpret)
    assert np.abs(np.asarray(got) - slow(*args, None, **RULES["plain"])).max() < 1e-5


def test_a_long_row_of_a_batch_is_read_by_many_programs():
    """Spans have 1,024 slots at most: rows that are short leave their multiprocessors to it."""
    lengths = (8000, *[100] * 7)
    args = case(B=8, T=1, N=4, G=4, S=8192, H=16, lengths=lengths)
    read = (parts_of(*args, None, **RULES["plain"]) > -1e29).sum(axis=(0, 2, 3))
    assert read.tolist() == [4 * 8] + 7 * [4 * 2]


@pytest.mark.parametrize(
    "T, length, window, span",
    [(2, 900, None, 256), (2, 3000, None, 512), (2, 2967, 600, 128), (64, 3039, 703, 256)],
)
def test_splits_begin_where_they_began_for_one_query(T, length, window, span):
    """So that verifying groups its sums as plain decoding does: every part has the same sum.

    The window of the last token begins in another tile of slots, but in the same split.
    """
    rule = RULES["plain"] | {"window": window}
    q, k, v, positions = case(B=1, T=T, N=2, G=1, S=4096, H=16, lengths=(length,))
    of_block = parts_of(q, k, v, positions, None, **rule, shares=6)
    for t in (0, T - 1):
        one = slice(t, t + 1)
        alone = parts_of(q[:, one], k, v, positions[:, one], None, **rule, shares=6)
        np.testing.assert_allclose(of_block[:, :, t], alone[:, :, 0], rtol=1e-5)
        seen = length + t if window is None else window
        assert abs((alone > -1e29).sum() / 2 - seen / span) < 2  # of two heads


@pytest.mark.parametrize(
    "tokens, heads, slots", [(65, 4, 512), (512, 8, 4096), (20_000, 32, 20_480)]
)
def test_a_prompt_is_not_cut_into_many_parts(tokens, heads, slots):
    """Parts are float32: of 20,000 tokens and splits of 1,024 slots they would take 6.5 GB."""
    tiles = attention_triton.tile_config(tokens, tokens * heads // 4, 4, slots, 128, H200)
    splits = attention_triton.max_splits(slots, tiles, windowed=False)
    assert splits == 1 or splits * tokens * heads * 128 * 4 < 2 * 132 * tiles["bq"] * 128 * 4
    assert splits * -(-tokens * heads // 4 // tiles["bq"]) * 4 >= 60 or splits == slots // 64


@pytest.mark.parametrize("window", [None, 1024])
def test_a_prompt_that_fills_the_gpu_has_nothing_to_merge(window):
    """With a window, too, whose slots would begin and end within splits."""
    launched = []

    def start(launch):
        launched.append(launch.kernel)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.outputs)

    q, k, v, positions = case(B=1, T=512, N=32, G=4, S=4096, H=16, lengths=(2000,))
    attention_triton.attend(
        q, k, v, positions, None, **RULES["plain"] | {"window": window}, start=start
    )
    assert launched == [attention_triton.attention_kernel]


@pytest.mark.parametrize("T", [1, 4])
def test_narrow_operands(T):
    """The numbers of a bfloat16 cache, from float32 arrays whose values have been rounded."""
    q, k, v, positions = case(T=T)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    wide = [attention.round_to(jnp.bfloat16, x.astype(jnp.float32) * 1.0001) for x in (k, v)]
    assert all(np.array_equal(x, y) for x, y in zip(wide, (k, v), strict=True))
    q = q.astype(jnp.float32) + 1e-4  # to be rounded again
    for rule in (RULES["plain"], RULES["window, sinks"]):
        want = attention.reference(q, k, v, positions, None, **rule)
        got = attention.reference(q, *wide, positions, None, **rule, operands=jnp.bfloat16)
        not_rounded = attention.reference(q, *wide, positions, None, **rule)
        assert want.dtype == got.dtype == jnp.float32
        assert np.abs(np.asarray(got - want)).max() < 1e-5
        assert np.abs(np.asarray(not_rounded - want)).max() > 1e-4
