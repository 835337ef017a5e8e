"""Rows of an embedding in C++ against JAX's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels import native

from peagle_jax.kernels import embedding_rows, native_code
from peagle_jax.kernels.tiled_products import to_tiles
from peagle_jax.layers import Embedding


@pytest.fixture(params=native.SETS, autouse=True)
def instructions(request, monkeypatch):
    native.use(request.param, monkeypatch)


def table(dtype, vocab=96, width=70) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((vocab, width)), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_rows(dtype, is_tiled):
    """Also of tokens that are out of range, and from the end, as JAX reads them."""
    plain = table(dtype)
    stored = to_tiles(plain.T) if is_tiled else plain
    tokens = jnp.array([[0, 95, 33], [31, 96, 300], [-1, -96, -97]])
    rows = jax.jit(embedding_rows.read)(stored, tokens)
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(rows, plain[tokens].astype(jnp.float32))


def test_many_rows():
    """So many that threads share them."""
    plain = table(jnp.bfloat16, 1000, 256)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 1000, 3000))
    rows = embedding_rows.read(plain, tokens)
    np.testing.assert_array_equal(rows, plain[tokens].astype(jnp.float32))


def embedding(table):
    """`layer(table, tokens)` of an embedding with this table."""
    layer = Embedding(*table.shape, dtype=table.dtype, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    params["table"] = params["table"].replace(table)
    return lambda params, tokens: nnx.merge(graph, params)(tokens), params


def test_the_table_is_not_copied():
    """A program with a bfloat16 embedding reads it where it lies."""
    read, params = embedding(table(jnp.bfloat16, 512, 64))
    program = jax.jit(read).lower(params, jnp.array([3, 500])).compile().as_text()
    made = [line for line in program.splitlines() if re.search(r"= \w+\[512,64\]", line)]
    assert made and all(" parameter(" in line for line in made)


def test_gradients_of_an_embedding():
    """The kernel has none, and is not asked for one."""
    plain, tokens = table(jnp.bfloat16), jnp.array([3, 3, 95])
    read, params = embedding(plain)
    weights = jnp.arange(3.0)[:, None]
    grad = jax.grad(lambda params: (read(params, tokens) * weights).sum())(params)
    want = np.zeros(plain.shape)
    want[3], want[95] = 1, 2
    np.testing.assert_array_equal(np.asarray(grad["table"][...], np.float32), want)


@pytest.mark.parametrize(
    "shape, dtype, can",
    [
        ((8, 6), jnp.bfloat16, True),
        ((8, 5), jnp.bfloat16, False),
        ((8, 5), jnp.float32, True),
        ((8, 6), jnp.float16, False),
        ((0, 6), jnp.float32, False),
    ],
)
def test_which_tables(shape, dtype, can):
    assert embedding_rows.can_read(jnp.zeros(shape, dtype)) == can


@pytest.mark.parametrize("stored", [jnp.zeros((8, 6), jnp.bfloat16), jnp.zeros((2, 6, 32, 1))])
def test_where(stored, monkeypatch):
    assert embedding_rows.can_read(stored)
    monkeypatch.setattr(native_code, "multi_device_reason", lambda: "a mesh")
    assert not embedding_rows.can_read(stored)
    monkeypatch.undo()
    monkeypatch.setattr(native_code, "load", lambda: None)
    assert not embedding_rows.can_read(stored)


def test_others_are_refused():
    result = jax.ShapeDtypeStruct((2, 6), jnp.float32)
    call = native_code.function("peagle_embedding_rows", result)
    tokens = jnp.zeros(2, jnp.int32)
    for shape in [(8, 5), (2, 4, 32, 2), (2, 3, 16, 2), (2, 6, 32), (0, 6)]:
        with pytest.raises(jax.errors.JaxRuntimeError, match="sizes do not fit"):
            call(jnp.zeros(shape, jnp.bfloat16), tokens)
    with pytest.raises(jax.errors.JaxRuntimeError, match="sizes do not fit"):
        call(jnp.zeros((8, 6)), tokens[:1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="must be float32 or bfloat16"):
        call(jnp.zeros((8, 6), jnp.int32), tokens)
