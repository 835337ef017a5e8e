"""Attention of COD training in C++, for several sets of instructions, against a dense mask."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import native
from kernels.test_packed_attention import CASES, case, dense, seeing_ahead

from peagle_jax.kernels import native_code, packed_attention, packed_attention_native
from peagle_jax.kernels.packed_attention import AttentionIntervals

SCALE = 0.4


@pytest.fixture(autouse=True)
def library(monkeypatch):
    native.use("native", monkeypatch)


def results_of(form, q, k, v, intervals, scale=SCALE):
    """Outputs, log-sum-exps and all gradients of rows that see something."""
    sees = dense(q, k, v, intervals, scale)[2]
    rng = np.random.default_rng(8)
    weight, lse_weight = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (q.shape, q.shape[:3])
    )

    def total(q, k, v):
        y, lse = form(q, k, v, intervals, scale)[:2]
        y = jnp.where(sees[..., None, None], y, 0)
        lse = jnp.where(sees[..., None], lse, 0)
        return (y * weight).sum() + (lse * lse_weight).sum(), (y, lse)

    grads, results = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return dict(zip(("y", "lse", "dq", "dk", "dv"), (*results, *grads), strict=True))


def assert_same(got, want, bound=1e-5):
    for name, x in want.items():
        off = jnp.abs(got[name] - x).max() / jnp.maximum(1, jnp.abs(x).max())
        assert off < bound, name


MORE = {
    # heads of several vectors, and each of its own; gradients of these are one piece
    "one kv head": dict(B=1, N=3, G=1, H=16),
    "one row of two kv heads": dict(B=1, N=6, G=2, H=48),
    "many kv heads": dict(B=3, N=4, G=4, H=16, n=90, chains=30),
    # several sets of keys of one block, and blocks of one token, whose gradient has 4 pieces
    "many keys": dict(B=1, n=400, chains=90, num_depths=8, H=16),
    "many heads": dict(B=2, n=40, chains=20, N=100, G=2, H=16),
}
ALL = {name: {**kind, "H": 32} for name, kind in CASES.items()} | MORE


@functools.cache
def wanted(name):
    """The operands of a case, and what a dense mask makes of them."""
    args = case(**ALL[name])
    return args, results_of(dense, *args)


@pytest.mark.parametrize("name", ALL)
def test_forward_and_backward(name):
    args, want = wanted(name)
    assert_same(results_of(packed_attention.native, *args), want)


@pytest.mark.parametrize("instructions", native.SETS[1:])
@pytest.mark.parametrize("name", ["two documents", "one row of two kv heads", "many keys"])
def test_with_other_instructions(name, instructions, monkeypatch):
    native.use(instructions, monkeypatch)
    args, want = wanted(name)
    assert_same(results_of(packed_attention.native, *args), want)


def test_placeholders_that_see_those_behind_them():
    args = seeing_ahead(*case(n=90, chains=40, seed=3, H=16))
    assert_same(results_of(packed_attention.native, *args), results_of(dense, *args))


@pytest.mark.parametrize("scale", [1e-3, 4.0])
def test_weights_of_all_sizes(scale):
    """Later keys have larger scores, so that sums are scaled anew with each set of keys."""
    q, k, v, intervals = case(B=1, n=400, chains=60, H=16)
    q, k = jnp.abs(q), jnp.abs(k) * jnp.linspace(0, 2, k.shape[1])[None, :, None, None]
    args = q, k, v, intervals, scale
    assert_same(results_of(packed_attention.native, *args), results_of(dense, *args), 3e-5)


def test_rows_that_see_nothing():
    q, k, v, intervals = case(num_depths=1, pad=20, H=16)
    y, lse = packed_attention.native(q, k, v, intervals, SCALE)
    assert not y[:, -20:].any() and (lse[:, -20:] == -1e30).all() and y[:, :-20].any()
    grads = jax.grad(lambda *x: sum(map(jnp.sum, packed_attention.native(*x, intervals, SCALE))))
    assert not grads(q, k, v)[:, -20:].any()


def test_keys_that_no_row_of_a_block_sees_are_not_read():
    """The blocks of 48 tokens from row 144 on are of the second document."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 192, h, 16)), jnp.float32) for h in (4, 2, 2))
    here = np.arange(192)[None]
    first = jnp.asarray(np.where(here < 130, 0, 130))
    intervals = AttentionIntervals(first, jnp.asarray(here), jnp.zeros_like(first), 192, 0)
    hidden = [x.at[:, :130].set(jnp.nan) for x in (k, v)]
    want, back = jax.vjp(lambda q: packed_attention.native(q, k, v, intervals, SCALE)[0], q)
    got, back_hidden = jax.vjp(
        lambda q: packed_attention.native(q, *hidden, intervals, SCALE)[0], q
    )
    weight = jnp.zeros(q.shape).at[:, 144:].set(1)
    for a, b in ((want, got), (back(weight)[0], back_hidden(weight)[0])):
        np.testing.assert_array_equal(a[:, 144:], b[:, 144:])
    assert jnp.isnan(got[:, :96]).all()  # as everywhere: what is no number is not hidden


def test_intervals_beyond_the_rows_end_where_these_do():
    q, k, v, intervals = case(H=16)
    n, P = intervals.depth0, q.shape[1]
    wide = dataclasses.replace(
        intervals,
        first=jnp.where(intervals.first == 0, -7, intervals.first),
        last=jnp.where(intervals.last == n - 1, n + 9, intervals.last),
        chain_len=jnp.where(jnp.arange(P)[None] == n, 50, intervals.chain_len),
        chain_ahead=jnp.where(jnp.arange(P)[None] == P - 1, 50, jnp.zeros_like(intervals.last)),
    )
    results = [packed_attention.native(q, k, v, x, SCALE) for x in (intervals, wide)]
    assert intervals.chain_len[0, n] == 1 and (intervals.last == n - 1).any()
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_packed_rows_alone():
    """Queries of the last rows, forward and backward, as `attend_packed` has them."""
    q, k, v, intervals = case(H=32)
    n = intervals.depth0
    sees = (intervals.last >= intervals.first)[:, n:, None, None]
    weight = jnp.asarray(np.random.default_rng(9).standard_normal(q[:, n:].shape), jnp.float32)

    def total(q, k, v, attend):
        return jnp.where(sees, attend(q[:, n:], k, v, intervals, SCALE) * weight, 0).sum()

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(total, attend=attend), argnums=(0, 1, 2)))(
            q, k, v
        )
        for attend in (packed_attention.attend_packed, packed_attention.packed_reference)
    )
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert jnp.abs(a - b).max() < 1e-5 * max(1.0, jnp.abs(b).max())


def count_of_calls(q, k, v, intervals):
    attend = functools.partial(packed_attention.attend, form="auto")
    text = str(jax.make_jaxpr(lambda *x: attend(*x, intervals, SCALE))(q, k, v))
    return text.count("peagle_packed_attention")


def test_when_it_runs(monkeypatch):
    q, k, v, intervals = case(H=16, B=1, n=40, chains=20)
    assert count_of_calls(q, k, v, intervals) == 1
    narrow = (x.astype(jnp.bfloat16) for x in (q, k, v))
    assert count_of_calls(*narrow, intervals) == 0
    cut = (x[..., :-1] for x in (q, k, v))
    assert count_of_calls(*cut, intervals) == 0
    with monkeypatch.context() as patch:
        patch.setattr(native_code, "multi_device_reason", lambda: "a mesh")
        assert count_of_calls(q, k, v, intervals) == 0
    monkeypatch.setattr(native_code, "load", lambda: None)
    assert count_of_calls(q, k, v, intervals) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, rows: (q[..., :-1], k[..., :-1], v[..., :-1], rows),
        lambda q, k, v, rows: (q, k, v[:, 1:], rows),
        lambda q, k, v, rows: (q[:, :, :3], k, v, rows),
        lambda q, k, v, rows: (q, k[:, 1:], v[:, 1:], rows),
        lambda q, k, v, rows: (q, k, v, (rows[0][:, 1:], *rows[1:])),
        lambda q, k, v, rows: (q, k, v, (*rows[:2], rows[2][:, 1:], rows[3])),
        lambda q, k, v, rows: (q, k, v, (*rows[:3], rows[0][:, 1:])),
    ],
    ids=["lanes", "values", "heads", "queries", "first", "chain_len", "ahead"],
)
def test_arrays_that_do_not_fit_are_refused(change):
    q, k, v, intervals = case(H=16, B=1, n=40, chains=20)
    rows = intervals.first, intervals.last, intervals.chain_len, jnp.zeros(0, jnp.int32)
    q, k, v, rows = change(q, k, v, rows)
    with pytest.raises(Exception, match="sizes do not fit|no whole number of vectors"):
        jax.block_until_ready(packed_attention_native._attend(40, SCALE, q, k, v, rows))
