"""Matrices in blocks of columns: the same products, and which matrices they are."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from peagle_jax.layers import Linear, column_blocks
from peagle_jax.layers.column_blocks import are_in_blocks, in_blocks, matrices, to_blocks
from peagle_jax.layers.products import block_product, product


def random(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


@pytest.fixture
def narrow(monkeypatch):
    """Blocks of 8 columns, for tiny models."""
    monkeypatch.setattr(column_blocks, "COLUMNS", 8)


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_those_of_the_plain_matrix(rows, dtype):
    x, w = random(rows, 24), random(24, 192, dtype=dtype, seed=1)
    got = block_product(x, to_blocks(w))
    assert got.dtype == jnp.float32 and to_blocks(w).shape == (3, 24, 64)
    np.testing.assert_allclose(got, product(x, w), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_takes_either_form(narrow, bias):
    linear = Linear(12, 40, dtype=jnp.float32, rngs=nnx.Rngs(3), bias=bias)
    if bias:
        linear.bias[...] = random(40)
    x = random(2, 5, 12, seed=2)
    want, ids = linear(x), linear.argmax_logits(x)
    linear.kernel = nnx.Param(to_blocks(linear.kernel[...]))
    np.testing.assert_allclose(linear(x), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(linear.argmax_logits(x), ids)


def test_large_matrices_of_a_target(narrow):
    params = tiny.target(vocab=48, head_dim=10).params
    changed = in_blocks(params)
    assert are_in_blocks(changed) and not are_in_blocks(params)
    found = set()
    pairs = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(changed), strict=True)
    for (path, before), after in pairs:
        if after is before:
            continue
        found.add(jax.tree_util.keystr(path[-2:-1], simple=True))
        np.testing.assert_array_equal(after.swapaxes(0, 1).reshape(before.shape), before)
    # k and v have 20 columns, q has 40, and o is read after attention
    assert found == {"q", "gate", "up", "down", "lm_head"}
    assert len(matrices(params)) == 4 * 4 + 1


def test_heads_have_fc_too(narrow):
    head = tiny.head(dim=24, mlp_dim=40, draft_vocab=24, vocab=41)
    changed = in_blocks(head.params)
    assert changed["fusion"]["fc"]["kernel"].shape == (3, 72, 8)
    assert changed["lm_head"]["kernel"].shape == (3, 24, 8)


@pytest.mark.parametrize("name", ["mlp.experts.up", "mlp.router", "markov.w2", "old_lm_head"])
def test_other_matrices_stay(narrow, name):
    params = {name + ".kernel": random(3, 8, 16) if "experts" in name else random(8, 16)}
    assert in_blocks(params) == params
    assert not are_in_blocks(params)


def test_arrays_of_numpy_stay(narrow):
    params = {"lm_head.kernel": np.ones((8, 16), np.float32)}
    assert in_blocks(params) == params


def test_copies_are_shared_and_leave_with_their_matrices(narrow, monkeypatch):
    monkeypatch.setattr(column_blocks, "_copies", {})
    params = {"attn": {"q": {"kernel": random(4, 16)}}}
    first = in_blocks(params)["attn"]["q"]["kernel"]
    assert in_blocks(params)["attn"]["q"]["kernel"] is first
    assert len(column_blocks._copies) == 1
    other = {"attn": {"q": {"kernel": random(4, 16, seed=1)}}}
    assert in_blocks(other)["attn"]["q"]["kernel"] is not first
    params["attn"]["q"]["kernel"] = None
    gc.collect()
    assert len(column_blocks._copies) == 1
