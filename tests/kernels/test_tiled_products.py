"""Products with matrices in tiles against float64, for several sets of instructions."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import native

from peagle_jax.kernels import native_code
from peagle_jax.kernels.tiled_products import (
    Norm,
    can_be_tiled,
    from_tiles,
    gated_products,
    tiled_product_of,
    tiled_products,
    to_tiles,
)
from peagle_jax.layers import gelu_tanh

BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(params=native.SETS, autouse=True)
def instructions(request, monkeypatch):
    native.use(request.param, monkeypatch)
    return request.param


def random(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def multiply(x, *ws, norm=None):
    tiles = [to_tiles(w) for w in ws]
    return jax.jit(lambda x, ws: tiled_products(x, ws, norm))(x, tiles)


def multiply_gated(gate, up, *ws, activation="silu"):
    call = jax.jit(gated_products, static_argnames="activation")
    return call(gate, up, [to_tiles(w) for w in ws], activation=activation)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 64, 67])
def test_products(dtype, rows):
    """Of each number of rows that has a function, and of more; one call with three matrices."""
    x = random(rows, 70)
    ws = [random(70, n, dtype=dtype, seed=n) for n in (352, 32, 96)]
    products = multiply(x, *ws)
    rounded = np.asarray(x.astype(dtype), np.float64)
    for y, w in zip(products, ws, strict=True):
        assert y.dtype == jnp.float32 and y.shape == (rows, w.shape[1])
        want = rounded @ np.asarray(w, np.float64)
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_is_the_same_beside_any_others(dtype):
    """To the bit, whatever the rows and the matrices."""
    x, w = random(67, 1024), random(1024, 416, dtype=dtype, seed=1)
    (all_rows,) = multiply(x, w)
    for rows in (slice(0, 1), slice(3, 5), slice(20, 33), slice(66, 67)):
        _, beside_another = multiply(x[rows], w[:, 32:64], w)
        np.testing.assert_array_equal(beside_another, all_rows[rows])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nan_and_infinity_stay_in_their_rows(dtype):
    x, w = random(7, 64), random(64, 64, dtype=dtype, seed=1)
    (clean,) = multiply(x, w)
    # whose bits are all ones: rounding must not make a number of it
    worst = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    bad = x.at[2, 5].set(worst[0]).at[4, 9].set(worst[1]).at[5, 3].set(np.inf)
    (y,) = multiply(bad, w)
    assert np.isnan(y[2]).all() and np.isnan(y[4]).all() and np.isinf(y[5]).all()
    for row in (0, 1, 3, 6):
        np.testing.assert_array_equal(y[row], clean[row])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [384, 70, 6])
def test_norms_before_products(dtype, size):
    """Of whole vectors and of others, of very different sizes; gains in the matrices' dtype."""
    x = random(5, size) * jnp.float32([1, 1e-4, 300, 1, 0])[:, None]
    gain, eps = 1 + 0.3 * random(size, dtype=dtype, seed=2), 1e-3
    w = random(size, 64, dtype=dtype, seed=1)
    y, z = multiply(x, w, w[:, :32], norm=Norm(gain, eps))
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(axis=1, keepdims=True) + eps)
    rows = (exact * np.asarray(gain, np.float64)).astype(np.float32)
    want = np.asarray(rows.astype(dtype), np.float64) @ np.asarray(w, np.float64)
    # a number that lies between two of bfloat16 may become the other one
    room = 1e-5 if dtype == jnp.float32 else 5e-3
    np.testing.assert_allclose(y, want, rtol=room, atol=room * np.abs(want).max())
    np.testing.assert_array_equal(z, y[:, :32])
    assert not y[4].any()
    alone = multiply(x[2:3], w, norm=Norm(gain, eps))[0]
    np.testing.assert_array_equal(alone[0], y[2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("activation, reference", [("silu", jax.nn.silu), ("gelu_tanh", gelu_tanh)])
@pytest.mark.parametrize("rows, size", [(1, 1024), (40, 1024), (3, 70), (2, 6)])
def test_gates_before_products(dtype, activation, reference, rows, size):
    """Of few and of many numbers, from far below 0 to far above."""
    gate, up = 4 * random(rows, size), random(rows, size, seed=3)
    gate = gate.at[0, :5].set(jnp.float32([-200, -88, 0, 60, 300]))
    w = random(size, 64, dtype=dtype, seed=1)
    (y,) = multiply_gated(gate, up, w, activation=activation)
    rows = np.asarray((reference(gate) * up).astype(dtype), np.float64)
    want = rows @ np.asarray(w, np.float64)
    room = 1e-5 if dtype == jnp.float32 else 5e-3
    np.testing.assert_allclose(y, want, rtol=room, atol=room * np.abs(want).max())
    (alone,) = multiply_gated(gate[-1:], up[-1:], w, activation=activation)
    np.testing.assert_array_equal(alone[0], y[-1])


@pytest.mark.parametrize("size", [1, 5, 9, 17])
def test_rows_of_vectors_and_one_number(size):
    """Which is prepared as the others are."""
    x, up, w = random(2, size), random(2, size, seed=1), random(size, 32, seed=2)
    normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-3)
    (y,) = multiply(x, w, norm=Norm(jnp.full(size, 0.7), 1e-3))
    np.testing.assert_allclose(y, 0.7 * normed @ w, rtol=1e-5, atol=1e-5)
    (z,) = multiply_gated(x, up, w)
    np.testing.assert_allclose(z, (jax.nn.silu(x) * up) @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation, reference", [("silu", jax.nn.silu), ("gelu_tanh", gelu_tanh)])
def test_each_activation(activation, reference):
    """By a matrix that picks each number."""
    values = np.float32([-300, -90, -86, -20, -3, -1, -1e-3, 0, 1e-6, 0.7, 2, 15, 88, 90, 1e4])
    gate = jnp.zeros((1, 32)).at[0, : len(values)].set(values)
    (y,) = multiply_gated(gate, jnp.ones((1, 32)), jnp.eye(32), activation=activation)
    with jax.enable_x64(True):
        want = reference(jnp.asarray(np.asarray(gate[0], np.float64)))
    np.testing.assert_allclose(y[0], want, rtol=2e-6, atol=1e-30)


def test_nan_and_infinity_of_gates_and_norms():
    """In their own rows, and nowhere else."""
    gate, up, w = random(5, 64), random(5, 64, seed=1), random(64, 32, seed=2)
    (clean,) = multiply_gated(gate, up, w)
    bad = gate.at[1, 3].set(np.nan).at[3, 7].set(np.inf)
    (y,) = multiply_gated(bad, up, w)
    assert np.isnan(y[1]).all() and np.isinf(y[3]).all()
    norm = Norm(jnp.ones(64), 1e-6)
    (normed,) = multiply(gate, w, norm=norm)
    (z,) = multiply(bad, w, norm=norm)
    assert np.isnan(z[1]).all() and np.isnan(z[3]).all()
    for row in (0, 2, 4):
        np.testing.assert_array_equal(y[row], clean[row])
        np.testing.assert_array_equal(z[row], normed[row])


def test_gains_and_gates_of_other_sizes_are_refused():
    w = to_tiles(random(32, 64))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a gain of another size"):
        tiled_products(jnp.zeros((3, 32)), [w], Norm(jnp.ones(31), 1e-6))
    call = native_code.function("peagle_gated_products", jax.ShapeDtypeStruct((3, 64), "float32"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a gate of another size"):
        call(jnp.zeros((3, 32)), jnp.zeros((2, 32)), w, activation=np.int32(0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="an unknown activation"):
        call(jnp.zeros((3, 32)), jnp.zeros((3, 32)), w, activation=np.int32(2))


def test_rows_are_rounded_to_the_nearest_and_halves_to_even():
    """As JAX rounds: by a matrix that picks each number."""
    exact = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7 + 2**-12, 3e38, -1e-3], np.float32)
    x = jnp.zeros((1, 32)).at[0, :6].set(exact)
    (y,) = multiply(x, jnp.eye(32, dtype=BF16))
    np.testing.assert_array_equal(y[0], x[0].astype(BF16).astype(jnp.float32))


@pytest.mark.parametrize("inputs", [2048, 4096])
def test_rows_far_apart(inputs):
    x, w = random(12, inputs), random(inputs, 64, seed=1)
    (y,) = multiply(x, w)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-3)


def test_several_threads_at_once():
    """As several engines multiply, over the same pool."""
    x, w = random(9, 512), random(512, 1024, seed=1)
    tiles, call = to_tiles(w), jax.jit(lambda x, w: tiled_products(x, [w])[0])
    want = call(x, tiles)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: call(x, tiles), range(200)):
            np.testing.assert_array_equal(y, want)


def test_under_vmap():
    x, w = random(3, 5, 64), random(64, 32, seed=1)
    found = jax.vmap(lambda x: tiled_products(x, [to_tiles(w)])[0])(x)
    for i in range(3):
        np.testing.assert_array_equal(found[i], multiply(x[i], w)[0])


@pytest.mark.parametrize("shape", [(2, 31, 32, 1), (2, 32, 16, 1), (2, 16, 32, 2), (64, 32)])
def test_other_tiles_are_refused(shape):
    with pytest.raises(jax.errors.JaxRuntimeError, match="a matrix in other tiles"):
        call_with([jnp.zeros(shape)])


@pytest.mark.parametrize(
    "shapes, dtypes, reason",
    [
        ([(2, 32, 32, 1), (2, 16, 32, 2)], [jnp.float32, BF16], "or all bfloat16"),
        ([(2, 32, 32, 1)], [jnp.int32], "or all bfloat16"),
        ([(3, 32, 32, 1)], [jnp.float32], "a product of another size"),
    ],
)
def test_other_operands_are_refused(shapes, dtypes, reason):
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        call_with([jnp.zeros(*of) for of in zip(shapes, dtypes, strict=True)])


def call_with(matrices):
    """Three rows of 32 numbers times matrices of 64 columns."""
    results = [jax.ShapeDtypeStruct((3, 64), jnp.float32)] * len(matrices)
    call = native_code.function("peagle_tiled_products", results)
    return call(jnp.zeros((3, 32)), jnp.zeros(0), *matrices, eps=np.float32(0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_with_one_of_several_matrices(dtype):
    """Also with numbers that are out of range, and inside of a loop."""
    x, w = random(5, 64), random(3, 64, 96, dtype=dtype, seed=1)
    tiles = jax.vmap(to_tiles)(w)
    want = [multiply(x, one)[0] for one in w]
    for number, which in [(0, 0), (2, 2), (1, 1), (-4, 0), (7, 2)]:
        got = jax.jit(lambda *args: tiled_product_of(*args))(x, tiles, jnp.int32(number))
        np.testing.assert_array_equal(got, want[which])

    def add(i, total):
        return total + tiled_product_of(x, tiles, i)

    total = jax.lax.fori_loop(0, 3, add, jnp.zeros((5, 96)))
    np.testing.assert_allclose(total, sum(want), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "shape, numbers, reason",
    [
        ((2, 32, 32, 1), 1, "matrices and the number of one"),
        ((0, 2, 32, 32, 1), 1, "matrices and the number of one"),
        ((3, 2, 32, 32, 1), 2, "matrices and the number of one"),
        ((3, 2, 31, 32, 1), 1, "a matrix in other tiles"),
        ((3, 3, 32, 32, 1), 1, "a product of another size"),
    ],
)
def test_other_matrices_of_several_are_refused(shape, numbers, reason):
    call = native_code.function("peagle_tiled_product_of", jax.ShapeDtypeStruct((3, 64), "float32"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        call(jnp.zeros((3, 32)), jnp.zeros(shape), jnp.zeros(numbers, jnp.int32))


def test_without_rows():
    (y,) = multiply(jnp.zeros((0, 32)), random(32, 64))
    assert y.shape == (0, 64)


@pytest.mark.parametrize("dtype, shape", [(jnp.float32, (3, 5, 32, 1)), (BF16, (3, 3, 32, 2))])
def test_tiles(dtype, shape):
    inputs = shape[1] * shape[3]
    w = random(inputs, 96, dtype=dtype)
    tiles = to_tiles(w)
    assert tiles.shape == shape
    part = shape[3]
    for k, n in [(0, 0), (inputs - 1, 95), (2, 33)]:
        assert tiles[n // 32, k // part, n % 32, k % part] == w[k, n]
    np.testing.assert_array_equal(from_tiles(tiles), w)


def test_which_matrices_have_tiles():
    sizes = {
        (5, 64): (True, False),
        (6, 64): (True, True),
        (6, 48): (False, False),
        (6, 0): (False, False),
    }
    for shape, (of_float32, of_bfloat16) in sizes.items():
        assert can_be_tiled(shape, jnp.float32) == of_float32
        assert can_be_tiled(shape, BF16) == of_bfloat16
        assert not can_be_tiled(shape, jnp.float16)
