"""Matrices in other layouts: the same products, and which matrices they are."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from peagle_jax.layers import Linear, matrix_layouts
from peagle_jax.layers.matrix_layouts import (
    LAYOUTS,
    PLAIN,
    in_layout,
    layout_of,
    layout_of_matrix,
    matrices,
    to_plain,
)
from peagle_jax.layers.products import product, product_of_layout


def random(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


@pytest.fixture
def narrow(monkeypatch):
    """Blocks of 8 columns, for tiny models."""
    monkeypatch.setattr(matrix_layouts, "COLUMNS", 8)


@pytest.mark.parametrize("layout, shape", [("blocks", (3, 24, 64)), ("transposed", (192, 24, 1))])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_those_of_the_plain_matrix(rows, dtype, layout, shape):
    x, w = random(rows, 24), random(24, 192, dtype=dtype, seed=1)
    other = LAYOUTS[layout](w)
    assert other.shape == shape and layout_of_matrix(other) == layout
    got = product_of_layout(x, other)
    assert got.dtype == jnp.float32 and got.shape == (rows, 192)
    np.testing.assert_allclose(got, product(x, w), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(to_plain(other), w)


def test_plain_matrices_are_multiplied_as_ever():
    x, w = random(5, 24), random(24, 192, seed=1)
    assert layout_of_matrix(w) == PLAIN
    np.testing.assert_array_equal(product_of_layout(x, w), product(x, w))
    assert to_plain(w) is w


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_takes_each_layout(narrow, bias, layout):
    linear = Linear(12, 40, dtype=jnp.float32, rngs=nnx.Rngs(3), bias=bias)
    if bias:
        linear.bias[...] = random(40)
    x = random(2, 5, 12, seed=2)
    want, ids = linear(x), linear.argmax_logits(x)
    linear.kernel = nnx.Param(LAYOUTS[layout](linear.kernel[...]))
    np.testing.assert_allclose(linear(x), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(linear.argmax_logits(x), ids)


@pytest.mark.parametrize(
    "layout, names, count",
    [
        # k and v have 20 columns, q has 40, and o is read after attention
        ("blocks", {"q", "gate", "up", "down", "lm_head"}, 4 * 4 + 1),
        ("transposed", {"q", "k", "v", "o", "gate", "up", "down", "lm_head"}, 4 * 7 + 1),
    ],
)
def test_large_matrices_of_a_target(narrow, layout, names, count):
    params = tiny.target(vocab=48, head_dim=10).params
    changed = in_layout(params, layout)
    assert layout_of(changed) == layout and layout_of(params) == PLAIN
    found = set()
    pairs = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(changed), strict=True)
    for (path, before), after in pairs:
        if after is before:
            continue
        found.add(jax.tree_util.keystr(path[-2:-1], simple=True))
        back = after[..., 0].T if layout == "transposed" else after.swapaxes(0, 1)
        np.testing.assert_array_equal(back.reshape(before.shape), before)
    assert found == names
    assert len(matrices(params, layout)) == count
    changed_target = tiny.target(vocab=48, head_dim=10).bind(changed)
    np.testing.assert_array_equal(changed_target.lm_head_weight(), params["lm_head"]["kernel"])
    assert in_layout(params, PLAIN) is params


def test_heads_have_fc_too(narrow):
    head = tiny.head(dim=24, mlp_dim=40, draft_vocab=24, vocab=41)
    changed = in_layout(head.params, "blocks")
    assert changed["fusion"]["fc"]["kernel"].shape == (3, 72, 8)
    assert changed["lm_head"]["kernel"].shape == (3, 24, 8)
    assert in_layout(head.params, "transposed")["fusion"]["fc"]["kernel"].shape == (24, 72, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mlp.experts.up", "mlp.router", "markov.w2", "old_lm_head"])
def test_other_matrices_stay(narrow, name, layout):
    params = {name + ".kernel": random(3, 8, 16) if "experts" in name else random(8, 16)}
    assert in_layout(params, layout) == params
    assert layout_of(params) == PLAIN


def test_arrays_of_numpy_stay(narrow):
    params = {"lm_head.kernel": np.ones((8, 16), np.float32)}
    assert in_layout(params, "blocks") == params


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_are_shared_and_leave_with_their_matrices(narrow, monkeypatch, layout):
    monkeypatch.setattr(matrix_layouts, "_copies", {})
    params = {"attn": {"q": {"kernel": random(4, 16)}}}
    first = in_layout(params, layout)["attn"]["q"]["kernel"]
    assert in_layout(params, layout)["attn"]["q"]["kernel"] is first
    assert len(matrix_layouts._copies) == 1
    other = {"attn": {"q": {"kernel": random(4, 16, seed=1)}}}
    assert in_layout(other, layout)["attn"]["q"]["kernel"] is not first
    params["attn"]["q"]["kernel"] = None
    gc.collect()
    assert len(matrix_layouts._copies) == 1


def test_each_layout_has_a_copy_of_its_own(narrow):
    params = {"attn": {"q": {"kernel": random(4, 16)}}}
    shapes = [in_layout(params, name)["attn"]["q"]["kernel"].shape for name in LAYOUTS]
    assert shapes == [(2, 4, 8), (16, 4, 1)]
