"""COD training attention: the reference against a dense mask, Triton against both, in float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.interpreter import interpret

from peagle_jax.kernels import packed_attention, packed_attention_triton
from peagle_jax.kernels.packed_attention import AttentionIntervals


def case(n=150, chains=60, num_depths=4, B=2, N=4, G=2, H=24, window=None, pad=0, seed=0):
    """Two documents of n depth-0 rows, then chains of random length behind random anchors.

    Anchors ascend, and there is padding at the end.
    """
    rng = np.random.default_rng(seed)
    M = chains * (num_depths - 1)
    first, last, chain_len = (np.zeros((B, n + M), np.int32) for _ in range(3))
    for b in range(B):
        cut = n // 3 + 11 * b
        start = np.where(np.arange(n) < cut, 0, cut)
        first[b, :n], last[b, :n] = start, np.arange(n)
        if window:
            first[b, :n] = np.maximum(start, np.arange(n) - window + 1)
        first[b, n - pad : n], last[b, n - pad : n] = 1, 0  # of no document
        row = n
        for a in np.sort(rng.choice(n, chains - 7, replace=False)) if num_depths > 1 else ():
            for d in range(1, 1 + rng.integers(1, num_depths)):
                first[b, row], last[b, row], chain_len[b, row] = start[a], a, d
                if window:
                    first[b, row], chain_len[b, row] = (
                        max(start[a], a + d - window + 1),
                        min(d, window),
                    )
                row += 1
        first[b, row:], last[b, row:] = 1, 0
    intervals = AttentionIntervals(
        jnp.asarray(first), jnp.asarray(last), jnp.asarray(chain_len), n, num_depths - 1
    )
    q, k, v = (
        jnp.asarray(rng.standard_normal((B, n + M, heads, H)), jnp.float32) for heads in (N, G, G)
    )
    return q, k, v, intervals


def dense(q, k, v, intervals, scale):
    """One mask [P P], one softmax; zeros where nothing is intervals."""
    P, n, R = q.shape[1], intervals.depth0, q.shape[2] // k.shape[2]
    key, row = jnp.arange(P)[None, None], jnp.arange(P)[None, :, None]
    mask = (key < n) & (key >= intervals.first[..., None]) & (key <= intervals.last[..., None])
    mask |= (key >= n) & (key <= row) & (key > row - intervals.chain_len[..., None])
    if intervals.chain_ahead is not None:
        mask |= (key > row) & (key <= row + intervals.chain_ahead[..., None])
    x = jnp.einsum("bpnh,bknh->bnpk", q, jnp.repeat(k, R, axis=2)) * scale
    x = jnp.where(mask[:, None], x, -1e30)
    lse = jax.nn.logsumexp(x, axis=-1)
    p = jnp.where(mask[:, None], jnp.exp(x - lse[..., None]), 0)
    return (
        jnp.einsum("bnpk,bknh->bpnh", p, jnp.repeat(v, R, axis=2)),
        lse.transpose(0, 2, 1),
        mask.any(axis=-1),
    )


CASES = {
    "two documents": dict(),
    "a window": dict(window=9),
    "a window shorter than chains": dict(window=2),
    "one chain step": dict(num_depths=2),
    "no chains, and padding": dict(num_depths=1, pad=20),
    "wide": dict(n=70, chains=30, H=40, N=2, G=2, B=1),
}


def in_blocks(q, k, v, intervals, scale):
    """The reference, in several blocks of queries and of keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "block_sizes", lambda *shape: (64, 48))
        return packed_attention.reference(q, k, v, intervals, scale)


FORMS = {
    "reference": packed_attention.reference,
    "in blocks": in_blocks,
    "triton": functools.partial(
        packed_attention_triton.attend, start=interpret, bq=32, kq=32, bk=16
    ),  # several tiles of each kind
}


@pytest.mark.parametrize("run", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", CASES.values(), ids=CASES)
def test_forward_and_backward(kind, run):
    """With weights on outputs and log-sum-exps; rows that see nothing count for nothing."""
    q, k, v, intervals = case(**kind)
    rng = np.random.default_rng(8)
    weight, lse_weight = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (q.shape, q.shape[:3])
    )
    sees = jax.jit(dense)(q, k, v, intervals, 0.4)[2]
    assert not sees.all()

    def total(q, k, v, attend):
        y, lse, *_ = attend(q, k, v, intervals, 0.4)
        return (jnp.where(sees[..., None, None], y * weight, 0)).sum() + jnp.where(
            sees[..., None], lse * lse_weight, 0
        ).sum()

    want = jax.jit(dense)(q, k, v, intervals, 0.4)
    got = run(q, k, v, intervals, 0.4)
    for a, b in zip(got, want, strict=False):
        assert (
            jnp.abs(jnp.where(sees.reshape(sees.shape + (1,) * (a.ndim - 2)), a - b, 0)).max()
            < 1e-5
        )

    def grads_of(attend):
        grads = jax.grad(functools.partial(total, attend=attend), argnums=(0, 1, 2))
        is_kernel = attend is FORMS["triton"]
        return grads if is_kernel else jax.jit(grads)

    grads = [grads_of(attend)(q, k, v) for attend in (dense, run)]
    for a, b in zip(*grads, strict=True):
        assert jnp.abs(a - b).max() / jnp.abs(a).max() < 1e-5


def test_keys_that_nobody_sees_are_not_read():
    """NaN in whole tiles of the first document does not reach queries of tiles behind it.

    Nor does it reach their gradients.
    """
    q, k, v, intervals = case(n=160, B=1, chains=40)
    bound = (
        int(intervals.first[0, 159]) // 16 * 16
    )  # keys before it lie in tiles of the first document alone

    def attend(q, k, v):
        return FORMS["triton"](q, k, v, intervals, 0.4)[0]

    tiles = [
        range(at, min(at + 32, end))
        for begin, end in ((0, 160), (160, q.shape[1]))
        for at in range(begin, end, 32)
    ]
    sees = np.asarray(intervals.last >= intervals.first)[0]
    rows = [
        i
        for tile in tiles
        for i in tile
        if min((int(intervals.first[0, j]) for j in tile if sees[j]), default=0) >= bound
        and sees[i]
    ]
    assert bound >= 48 and len(rows) > 60
    keys = np.arange(q.shape[1]) < bound
    hidden = [jnp.where(keys[None, :, None, None], jnp.nan, x) for x in (k, v)]
    want, back = jax.vjp(lambda q: attend(q, k, v), q)
    got, back_hidden = jax.vjp(lambda q: attend(q, *hidden), q)
    weight = jnp.zeros(q.shape).at[:, jnp.asarray(rows)].set(1)
    for a, b in ((want, got), (back(weight)[0], back_hidden(weight)[0])):
        np.testing.assert_array_equal(np.asarray(a)[:, rows], np.asarray(b)[:, rows])


def seeing_ahead(q, k, v, intervals):
    """A case whose placeholders see as many rows behind them as are left of their own chains."""
    n, M = intervals.depth0, q.shape[1] - intervals.depth0
    chain_len = np.asarray(intervals.chain_len)[:, n:]
    ahead = np.zeros_like(chain_len)
    for row in range(M - 1):
        for distance in range(1, min(intervals.max_chain_len, M - row)):
            ahead[:, row] += (chain_len[:, row] > 0) & (
                chain_len[:, row + distance] == chain_len[:, row] + distance
            )
    assert ahead.max() == intervals.max_chain_len - 1
    whole = jnp.asarray(np.pad(ahead, [(0, 0), (n, 0)]))
    return q, k, v, dataclasses.replace(intervals, chain_ahead=whole)


def test_placeholders_that_see_those_behind_them():
    """In both forms as with a dense mask, forward and backward."""
    q, k, v, intervals = seeing_ahead(*case(n=90, chains=40, seed=3))
    weight = jnp.asarray(np.random.default_rng(9).standard_normal(q.shape), jnp.float32)
    sees = (intervals.last >= intervals.first)[..., None, None]

    def total(q, k, v, form):
        return jnp.where(sees, form(q, k, v, intervals, 0.4)[0] * weight, 0).sum()

    results = [
        jax.jit(jax.value_and_grad(functools.partial(total, form=form), argnums=(0, 1, 2)))(q, k, v)
        for form in (dense, FORMS["reference"], FORMS["in blocks"])
    ]
    for want, *others in zip(*map(jax.tree.leaves, results), strict=True):
        for got in others:
            assert jnp.abs(got - want).max() < 1e-5 * max(1.0, jnp.abs(want).max())


def test_blocks_of_keys_that_nobody_sees_are_not_visited():
    """Rows 128 to 159 are a block of queries of the second document, which begins at row 96."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 160, h, 8)), jnp.float32) for h in (4, 2, 2))
    here = np.arange(160)[None]
    first = jnp.asarray(np.where(here < 96, 0, 96))
    intervals = AttentionIntervals(first, jnp.asarray(here), jnp.zeros_like(first), 160, 0)
    hidden = [x.at[:, :96].set(jnp.nan) for x in (k, v)]  # two blocks of 48
    want, back = jax.vjp(lambda q: FORMS["in blocks"](q, k, v, intervals, 0.4)[0], q)
    got, back_hidden = jax.vjp(lambda q: FORMS["in blocks"](q, *hidden, intervals, 0.4)[0], q)
    weight = jnp.zeros(q.shape).at[:, 128:].set(1)
    for a, b in ((want, got), (back(weight)[0], back_hidden(weight)[0])):
        np.testing.assert_array_equal(a[:, 128:], b[:, 128:])
    assert jnp.isnan(got[:, :96]).all()


def test_many_scores_are_computed_in_blocks():
    """The form follows from their number, and memory does not grow with it."""
    assert packed_attention.block_sizes(6, 800, 256) is None
    assert packed_attention.block_sizes(6, 3200, 1024) is not None

    def peak(n: int) -> int:
        shape = jax.ShapeDtypeStruct
        q, k = shape((1, n, 8, 16), jnp.float32), shape((1, n, 2, 16), jnp.float32)
        of_rows = shape((1, n), jnp.int32)

        def total(q, k, v, *of_rows):
            intervals = AttentionIntervals(*of_rows, n, 0)
            return packed_attention.reference(q, k, v, intervals, 0.4)[0].sum()

        lowered = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, k, *[of_rows] * 3)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert peak(8192) < 2.3 * peak(4096)


def test_bfloat16_in_blocks():
    q, k, v, intervals = case(n=100, chains=30)
    want, _, sees = dense(q, k, v, intervals, 0.4)
    got, _ = in_blocks(*(x.astype(jnp.bfloat16) for x in (q, k, v)), intervals, 0.4)
    off = jnp.where(sees[..., None, None], got.astype(jnp.float32) - want, 0)
    assert got.dtype == jnp.bfloat16 and jnp.linalg.norm(off) < 0.02 * jnp.linalg.norm(want)


def test_bfloat16():
    q, k, v, intervals = case(B=1, n=70, chains=20)
    want, _, sees = dense(q, k, v, intervals, 0.4)
    got, _ = FORMS["triton"](*(x.astype(jnp.bfloat16) for x in (q, k, v)), intervals, 0.4)
    off = jnp.where(sees[..., None, None], got.astype(jnp.float32) - want, 0)
    assert got.dtype == jnp.bfloat16 and jnp.linalg.norm(off) < 0.02 * jnp.linalg.norm(want)
