"""Routing: the reference against float64, Triton against it, and equal logits."""

import jax.numpy as jnp
import numpy as np
import pytest
from gpu.interpreter import interpret

from peagle_jax.kernels import routing, routing_triton


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    "n, D, E, k, has_bias",
    [(1, 64, 32, 4, True), (5, 100, 128, 8, False), (17, 64, 20, 3, True), (2, 32, 130, 1, False)],
)
def test_weights_and_ids(n, D, E, k, has_bias, normalized):
    rng = np.random.default_rng(n)
    x, w = rng.standard_normal((n, D)), rng.standard_normal((D, E)) * D**-0.5
    bias = rng.standard_normal(E) if has_bias else None
    logits = x.astype(np.float32).astype(np.float64) @ w.astype(np.float32)
    if bias is not None:
        logits = logits + bias.astype(np.float32)
    ids = np.argsort(-logits, axis=1)[:, :k]
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    want = np.take_along_axis(probs, ids, 1)
    if normalized:
        want /= want.sum(axis=1, keepdims=True)
    arrays = (None if y is None else jnp.asarray(y, jnp.float32) for y in (x, w, bias))
    x, w, bias = arrays
    for weights, found in (
        routing.reference(x, w, bias, k, normalized=normalized),
        routing_triton.route(x, w, bias, k, normalized=normalized, start=interpret),
    ):
        assert np.array_equal(found, ids)
        np.testing.assert_allclose(weights, want, rtol=1e-5)


def test_a_bias_in_bfloat16():
    """It is added to logits that were rounded, and the sum is rounded, as by the layer."""
    rng = np.random.default_rng(7)
    x, w, bias = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((8, 48), (48, 6), (6,))
    )
    want, ids = routing.reference(x, w, bias, 2, normalized=True)
    got, found = routing_triton.route(x, w, bias, 2, normalized=True, start=interpret)
    assert np.array_equal(found, ids) and np.array_equal(got, want)


def test_of_equal_logits_the_first():
    """Logits in bfloat16 are often equal, and another order would choose other experts."""
    x, w = jnp.ones((3, 16), jnp.bfloat16), jnp.zeros((16, 24), jnp.bfloat16)
    w = w.at[:, 7].set(1).at[:, 19].set(1)
    want, ids = routing.reference(x, w, None, 4, normalized=True)
    assert ids[0].tolist() == [7, 19, 0, 1]
    got, found = routing_triton.route(x, w, None, 4, normalized=True, start=interpret)
    assert np.array_equal(found, ids) and np.array_equal(got, want)
    assert got.dtype == jnp.bfloat16


def test_every_expert_has_a_place_where_logits_are_nan():
    """Ids that are written twice, or not at all, would be read as places in memory."""
    x, w = jnp.ones((2, 16), jnp.float32), jnp.zeros((16, 20), jnp.float32)
    w = w.at[:, 3].set(jnp.nan).at[:, 11].set(jnp.nan).at[:, 5].set(1)
    for k in (1, 4, 20):
        weights, found = routing_triton.route(x, w, None, k, normalized=True, start=interpret)
        for ids in np.asarray(found):
            assert ids[0] == 5 and len(set(ids.tolist())) == k and 0 <= ids.min() <= ids.max() < 20
        assert np.isnan(weights).all(), "who reads the result must see that something is wrong"


@pytest.mark.parametrize("normalized", [False, True])
def test_all_experts_in_order_where_logits_are_negative(normalized):
    """Bits of negative numbers sort the other way round."""
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 16), (16, 20)))
    bias = jnp.full(20, -5, jnp.float32)
    want, ids = routing.reference(x, w, bias, 20, normalized=normalized)
    got, found = routing_triton.route(x, w, bias, 20, normalized=normalized, start=interpret)
    assert np.array_equal(found, ids) and len(set(np.asarray(ids[0]).tolist())) == 20
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_zero_is_zero_whatever_its_sign():
    """The first of equal logits: 4, whose -2^-30 is -0 in float16, before 9, which is 0."""
    x = jnp.full((1, 16), 2**-7, jnp.float16)
    w = jnp.full((16, 20), -1, jnp.float16).at[:, 9].set(0).at[:, 4].set(0).at[3, 4].set(-(2**-23))
    weights, ids = routing.reference(x, w, None, 3, normalized=True)
    got, found = routing_triton.route(x, w, None, 3, normalized=True, start=interpret)
    assert np.array_equal(found, ids) and np.asarray(found)[0, :2].tolist() == [4, 9]
    np.testing.assert_allclose(got, weights, rtol=1e-3)


def test_experts_of_minus_infinity_come_last_and_weigh_nothing():
    rng = np.random.default_rng(4)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 16), (16, 20)))
    bias = jnp.full(20, -jnp.inf).at[7].set(0).at[15].set(0)
    want, ids = routing.reference(x, w, bias, 4, normalized=True)
    got, found = routing_triton.route(x, w, bias, 4, normalized=True, start=interpret)
    assert np.array_equal(found, ids) and np.asarray(found)[:, 2:].tolist() == [[0, 1]] * 2
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_where_it_does_not_run():
    """Without a GPU; the caller's own products then have the same result."""
    assert routing.route(jnp.ones((1, 16)), jnp.ones((16, 4)), None, 2, normalized=True) is None
