"""Placeholders that are the same are multiplied once: which are, and that nothing changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.draft import placeholders
from peagle_jax.draft.placeholders import HIDDEN_DESIGNS, TOKEN_DESIGNS, PlaceholderRow
from peagle_jax.draft.repeated_rows import RepeatedRows, are_alike_by_depth, rows_by_depth


def head_of(hidden: str, token: str, **changes):
    return tiny.head(placeholder_hidden=hidden, placeholder_token=token, **changes)


@pytest.mark.parametrize("design", [*HIDDEN_DESIGNS, *TOKEN_DESIGNS])
def test_which_designs_read_nothing_of_the_anchor(design):
    """Rows of one depth are the same where a design says so, and only there."""
    is_hidden = design in HIDDEN_DESIGNS and design != "zero"
    hidden, token = (design, "mask") if is_hidden else ("shared", design)
    model = head_of(hidden, token)
    head = model.bind(model.params)
    rng = np.random.default_rng(0)
    depth = jnp.asarray([[1, 2, 1, 2]])
    token_rows, fused = (
        jnp.asarray(rng.normal(size=(1, 4, model.config.dim)), jnp.float32) for _ in range(2)
    )
    of_tokens, of_hidden = placeholders.rows(head, PlaceholderRow(depth, token_rows, fused))
    side = of_hidden if is_hidden else of_tokens
    designs = HIDDEN_DESIGNS if is_hidden else TOKEN_DESIGNS
    assert np.array_equal(side[:, :2], side[:, 2:]) == designs[design].by_depth_alone
    if designs[design].by_depth_alone:
        by_depth = rows_by_depth(head, 3, *[jnp.zeros((1, 7, model.config.dim))] * 2)
        assert np.array_equal(by_depth[is_hidden], side[:, :2])


def test_the_designs_without_a_hidden_side_of_their_own():
    model = head_of("zero", "zero")
    of_tokens, of_hidden = rows_by_depth(
        model.bind(model.params), 4, *[jnp.ones((2, 1, model.config.dim))] * 2
    )
    assert of_tokens.shape == of_hidden.shape == (2, 3, model.config.dim)
    assert not of_tokens.any() and not of_hidden.any()


@pytest.mark.parametrize(
    ("hidden", "token", "context", "alike"),
    [
        ("shared", "mask", "layers", True),
        ("per_depth", "zero", "layers", True),
        ("gated", "mask", "layers", False),
        ("shared", "last_token", "layers", False),
        ("shared", "mask", "injected", False),
    ],
)
def test_when_rows_are_alike(hidden, token, context, alike):
    config = head_of(hidden, token, placeholder_context=context).config
    assert are_alike_by_depth(config) == alike


def test_rows_and_their_gradient():
    which = jnp.asarray([[2, 0, 0, 1], [1, 1, 2, 2]])
    repeated = RepeatedRows(which, 2)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 3)), jnp.float32)
    rows = np.concatenate([np.tile([0, 1], (2, 1)), which + 2], axis=1)
    want = np.take_along_axis(np.asarray(x), rows[..., None], axis=1)
    np.testing.assert_array_equal(repeated(x), want)
    weight = jnp.asarray(np.random.default_rng(2).normal(size=want.shape), jnp.float32)
    (dx,) = jax.vjp(repeated, x)[1](weight)
    sums = np.zeros(x.shape, np.float32)
    for b in range(2):
        np.add.at(sums[b], rows[b], np.asarray(weight)[b])
    np.testing.assert_allclose(dx, sums, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}], ids=str)
def test_a_head_computes_the_same(changes):
    """With each row of its own, and with those that are the same given once."""
    model = tiny.head(**changes)
    head = model.bind(model.params)
    rng = np.random.default_rng(3)
    embeddings, fused = (
        jnp.asarray(rng.normal(size=(2, 5, model.config.dim)), jnp.float32) for _ in range(2)
    )
    repeated = RepeatedRows(jnp.asarray([[1, 0, 1, 0], [0, 0, 1, 1]]), 3)
    positions = jnp.asarray(rng.integers(0, 9, (2, 7)))

    def attend(layer, q, k, v, state, rule):
        weights = jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, jnp.repeat(k, 2, axis=2)))
        return jnp.einsum("BNTS,BSNH->BTNH", weights, jnp.repeat(v, 2, axis=2)), state

    run = functools.partial(head, positions=positions, attend=attend, state=None)
    got, _ = run(embeddings, fused, repeated=repeated)
    want, _ = run(repeated(embeddings), repeated(fused))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
