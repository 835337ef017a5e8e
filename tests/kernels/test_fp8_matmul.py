"""The FP8 product: quantization by hand, the reference against float64, Triton against both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.interpreter import interpret

from peagle_jax.kernels import fp8_matmul, fp8_matmul_triton, gemv_triton
from peagle_jax.kernels.fp8_matmul import E4M3, Fp8Matrix
from peagle_jax.kernels.launch import (
    B200,
    H200,
    RTX_PRO_6000,
    interpret_kernels,
    target_gpu,
)
from peagle_jax.types import InputError

KINDS = {
    "rows": (False, False),
    "blocks": (True, True),
    "groups and rows": (True, False),
}  # scales of activations, of weights


def operands(M, N, K, kind, seed=3):
    groups, blocks = KINDS[kind]
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((M, K)) * rng.uniform(0.1, 10, (M, 1))
    w = rng.standard_normal((N, K)) * rng.uniform(0.1, 10, (N, 1))
    matrix = fp8_matmul.quantize(jnp.asarray(w, jnp.float32), blocks=blocks)
    return (
        *fp8_matmul.quantize_rows(jnp.asarray(x, jnp.float32), blocks=groups),
        matrix.values,
        matrix.scale,
    )


def exact(x, x_scale, w, w_scale):
    """In float64, scale by scale."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    x_scale, w_scale = np.asarray(x_scale, np.float64), np.asarray(w_scale, np.float64)

    def expand(a, axis, size):
        """One scale for 128 numbers -> one scale a number."""
        return np.repeat(a, 128, axis=axis).take(range(size), axis=axis)

    x = x * (x_scale if x_scale.shape[1] == 1 else expand(x_scale, 1, x.shape[1]))
    w = w * (
        w_scale[:, None]
        if w_scale.ndim == 1
        else expand(expand(w_scale, 0, w.shape[0]), 1, w.shape[1])
    )
    return x @ w.T


SHAPES = [
    (1, 64, 128),
    (3, 70, 200),
    (16, 64, 1024),
    (17, 130, 384),
    (70, 200, 256),
    (129, 140, 130),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_product(shape, kind):
    args = operands(*shape, kind)
    want = exact(*args)
    got = np.asarray(fp8_matmul.reference(*args, jnp.float32), np.float64)
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_is_the_product(shape, kind):
    args = operands(*shape, kind)
    want = exact(*args)
    got = np.asarray(fp8_matmul_triton.product(*args, jnp.float32, start=interpret), np.float64)
    assert got.shape == want.shape and np.abs(got - want).max() / np.abs(want).max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiles", [{"splits": 2}, {"splits": 4}, {"bm": 32, "bn": 128}], ids=str)
def test_triton_splits_and_tiles(tiles, kind):
    """K = 640 is five tiles: splits get different shares, the last of four gets one... and none."""
    args = operands(9, 100, 640, kind)
    want = exact(*args)
    got = np.asarray(
        fp8_matmul_triton.product(*args, jnp.float32, start=interpret, **tiles), np.float64
    )
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-6


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("Ns", [(70,), (130, 64, 40)], ids=str)
@pytest.mark.parametrize("M, K", [(1, 128), (2, 300), (5, 1000)])
def test_few_rows_are_quantized_inside(M, K, Ns, blocks):
    """As `quantize_rows` does, with one matrix and with three; a row of zeros stays zeros."""
    rng = np.random.default_rng(K)
    x = rng.standard_normal((M, K)) * 10.0 ** rng.integers(-3, 4, (M, K))
    x[M // 2] *= M == 1
    x = jnp.asarray(x, jnp.float32)
    ws = [
        fp8_matmul.quantize(jnp.asarray(rng.standard_normal((N, K)), jnp.float32), blocks=blocks)
        for N in Ns
    ]
    launches = []

    def start(launch):
        launches.append(launch)
        return interpret(launch)

    got = gemv_triton.product(x, ws, jnp.float32, start=start)
    assert len(launches) == 1
    rows = fp8_matmul_triton.quantize_rows(x, blocks=blocks, start=interpret)
    for y, w in zip(got, ws, strict=True):
        want = exact(*rows, w.values, w.scale)
        y = np.asarray(y, np.float64)
        assert y.shape == want.shape and np.abs(y - want).max() / np.abs(want).max() < 1e-6
        assert M == 1 or not y[M // 2].any()


@pytest.mark.parametrize(
    "rows, alone, joint",
    [
        (2, ["gemv_kernel"], ["joint_gemv_kernel"]),
        (3, ["quantize_kernel", "fp8_kernel"], ["quantize_kernel", "joint_kernel"]),
    ],
)
def test_few_rows_go_without_tensor_cores(rows, alone, joint):
    names = []

    def start(launch):
        names.append(launch.kernel.__name__)
        return interpret(launch)

    ws = [fp8_matmul.quantize(jnp.ones((N, 256)), blocks=True) for N in (64, 32, 32)]
    x = jnp.ones((1, rows, 256), jnp.bfloat16)
    with interpret_kernels(start):
        y = fp8_matmul.matmul(x, ws[0])
        assert names == alone
        ys = fp8_matmul.joint_matmul(x, ws)
        assert names[len(alone) :] == joint
    assert ys is not None and y.shape == ys[0].shape == (1, rows, 64) and ys[2].shape[-1] == 32
    np.testing.assert_array_equal(np.asarray(y, np.float32), 256)


def test_a_tile_of_few_rows_crosses_no_block():
    x, w = jnp.ones((1, 128)), fp8_matmul.quantize(jnp.ones((130, 128)), blocks=True)
    with pytest.raises(ValueError, match="within a block of 128 outputs; got 12"):
        gemv_triton.product(x, [w], jnp.float32, bn=12)


def test_a_row_has_the_same_product_whatever_stands_beside_it():
    """Plain decoding and a verification of two tokens, bit for bit."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((2, 700)), jnp.bfloat16)
    w = fp8_matmul.quantize(jnp.asarray(rng.standard_normal((130, 700)), jnp.float32), blocks=True)
    (both,) = gemv_triton.product(x, [w], jnp.float32, start=interpret)
    for i in (0, 1):
        (alone,) = gemv_triton.product(x[i : i + 1], [w], jnp.float32, start=interpret)
        assert np.array_equal(both[i], alone[0])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("M, K", [(1, 128), (5, 300), (3, 1000)])
def test_triton_quantizes_rows(M, K, blocks):
    """Bit for bit; rows of very different sizes, one of zeros, one whose largest number is last."""
    x = np.random.default_rng(K).standard_normal((M, K)) * np.logspace(-6, 5, M)[:, None]
    x[0, -1] = 9 * np.abs(x[0]).max()
    x[M // 2] *= M == 1
    x = jnp.asarray(x, jnp.bfloat16)
    values, scale = fp8_matmul_triton.quantize_rows(x, blocks=blocks, start=interpret)
    width = 128 if blocks else K
    for m, g in np.ndindex(scale.shape):
        group = np.asarray(x[m, g * width : (g + 1) * width], np.float32)
        top = np.abs(group).max()
        assert scale[m, g] == (top / np.float32(448) if top else 1)
        assert np.array_equal(
            values[m, g * width : (g + 1) * width], (group / np.float32(scale[m, g])).astype(E4M3)
        )
    np.testing.assert_allclose(
        scale, fp8_matmul.quantize_rows(x, blocks=blocks)[1], rtol=2e-7
    )  # XLA divides a little otherwise


@pytest.mark.parametrize("blocks", [False, True])
def test_quantized_again_is_the_same(blocks):
    """The largest values become 448; what e4m3 holds comes back, the rest within 1/16 of itself."""
    w = np.random.default_rng(1).standard_normal((130, 140))
    w[128] = 0
    matrix = fp8_matmul.quantize(jnp.asarray(w, jnp.float32), blocks=blocks)
    assert matrix.scale.shape == ((2, 2) if blocks else (130,)) and matrix.blocks is blocks
    back = np.asarray(matrix.dequantized())
    scale = np.abs(w).max() if blocks else np.abs(w).max(1, keepdims=True)
    assert (
        np.abs(back - w) <= np.maximum(np.abs(w) / 16, scale * 2.0**-9 / 448 * 1.01)
    ).all() and not back[128].any()
    again = fp8_matmul.quantize(matrix.dequantized(), blocks=blocks)
    np.testing.assert_allclose(np.asarray(again.dequantized()), back, rtol=1e-6)


@pytest.mark.parametrize("blocks", [False, True])
def test_gradient_is_straight_through(blocks):
    """Of the dequantized matrix; none for the matrix itself."""
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 3, 140), (2, 3, 70)))
    w = fp8_matmul.quantize(jnp.asarray(rng.standard_normal((70, 140)), jnp.float32), blocks=blocks)
    y, back = jax.vjp(lambda x: fp8_matmul.matmul(x, w, "reference"), x)
    np.testing.assert_allclose(
        np.asarray(y), np.asarray(x @ w.dequantized().T), atol=0.08 * float(jnp.abs(y).max())
    )
    np.testing.assert_allclose(
        np.asarray(back(dy)[0]), np.asarray(dy @ w.dequantized()), rtol=1e-5, atol=1e-5
    )


def test_a_form_that_cannot_serve_is_refused():
    x, w = jnp.ones((2, 128)), fp8_matmul.quantize(jnp.ones((4, 128)))
    with pytest.raises(InputError, match="triton kernels cannot run: they need a GPU"):
        fp8_matmul.matmul(x, w, "triton")
    with pytest.raises(InputError, match="must be auto or one of reference, triton"):
        fp8_matmul.matmul(x, w, "cutlass")
    np.testing.assert_array_equal(fp8_matmul.matmul(x, w), fp8_matmul.matmul(x, w, "reference"))


@pytest.mark.parametrize("blocks", [False, True])
def test_three_products_in_one_launch(blocks):
    """Outputs that divide no tile; each is what its own launch makes."""
    rng = np.random.default_rng(6)
    ws = [
        fp8_matmul.quantize(jnp.asarray(rng.standard_normal((N, 200)), jnp.float32), blocks=blocks)
        for N in (130, 64, 40)
    ]
    x = jnp.asarray(rng.standard_normal((5, 200)), jnp.float32)
    values, scale = fp8_matmul.quantize_rows(x, blocks=blocks)
    launches = []

    def start(launch):
        launches.append(launch)
        return interpret(launch)

    got = fp8_matmul_triton.joint_product(values, scale, ws, jnp.float32, start=start)
    assert len(launches) == 1
    for y, w in zip(got, ws, strict=True):
        alone = fp8_matmul_triton.product(
            values, scale, w.values, w.scale, jnp.float32, start=interpret
        )
        assert y.shape == alone.shape and np.array_equal(y, alone)


@pytest.mark.parametrize(
    "device", [H200, B200, RTX_PRO_6000], ids=lambda device: f"sm_{device.capability}"
)
def test_the_pipeline_fits_shared_memory(device):
    """Every stage holds a tile of weights and one of activations, one byte a number."""
    for M in (1, 16, 32, 64):
        for N in (256, 4096):
            tiles = fp8_matmul_triton.tile_config(M, N, 4096, device)
            stage = tiles["bk"] * (tiles["bn"] + tiles["bm"])
            assert 3 <= tiles["stages"] and tiles["stages"] * stage <= device.shared_memory


def test_few_tiles_are_split_along_the_inputs():
    """A quarter as many as multiprocessors, of 1,024 inputs at least; parts have 512 and more."""
    for shape, splits in (
        ((8, 2048, 4096), 4),  # 32 tiles for 132 multiprocessors
        ((8, 2112, 4096), 4),  # 33
        ((8, 2176, 4096), 1),  # 34
        ((8, 4096, 4096), 1),
        ((8, 2048, 1024), 2),
        ((8, 2048, 1000), 1),
    ):
        assert fp8_matmul_triton.tile_config(*shape, H200)["splits"] == splits, shape


def test_three_matrices_in_one_launch_are_not_split():
    """Nobody would add their parts; the pipeline is as long as that of whole sums."""
    started = []

    def start(launch):
        started.append(launch)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.outputs)

    ws = [Fp8Matrix(jnp.zeros((N, 2048), E4M3), jnp.ones(N)) for N in (1024, 512, 512)]
    values, scale = jnp.zeros((8, 2048), E4M3), jnp.ones((8, 1))
    with target_gpu(H200):
        fp8_matmul_triton.joint_product(values, scale, ws, jnp.bfloat16, start)
    assert started[0].stages == 12 and started[0].grid == (32, 1)
