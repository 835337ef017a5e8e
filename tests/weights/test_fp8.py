"""FP8 checkpoints: every way of storing scales against the same product in float64, and misfits."""

import ml_dtypes
import numpy as np
import pytest

from peagle_jax import weights
from peagle_jax.types import InputError

F8 = ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(7)
MATRIX = RNG.normal(0, 90, (5, 7)).astype(F8)


def scales(*shape, dtype=np.float32):
    return RNG.uniform(0.001, 0.1, shape).astype(dtype)


@pytest.mark.parametrize(
    "suffix, scale, spread",
    [
        ("_scale", scales(), lambda s: s),
        ("_scale", scales(1), lambda s: s),
        ("_scale", scales(5), lambda s: s[:, None]),
        ("_scale", scales(5, 1, dtype=ml_dtypes.bfloat16), lambda s: s),
        ("_scale_inv", scales(2, 4), lambda s: np.kron(s, np.ones((3, 2)))[:5, :7]),
    ],
)
def test_scales(suffix, scale, spread):
    tensors = {
        "m": MATRIX,
        f"m{suffix}": scale,
        "norm": np.ones(3, ml_dtypes.bfloat16),
        "layer.input_scale": scales(1),
    }
    out = weights.dequantize(tensors, {"quantization_config": {"weight_block_size": [3, 2]}}, "x")
    assert out.quantized == ("m",) and out.left_out == ("layer.input_scale",)
    assert out.tensors.keys() == {"m", "norm"}
    want = MATRIX.astype(np.float64) * spread(scale.astype(np.float64))
    got = np.asarray(out.tensors["m"])
    assert got.dtype == np.float32 and np.array_equal(got, want.astype(np.float32))


def test_blocks_of_128_unless_the_config_says_otherwise():
    matrix = RNG.normal(0, 90, (130, 257)).astype(F8)
    scale = scales(2, 3)
    out = np.asarray(weights.dequantize({"m": matrix, "m_scale_inv": scale}, {}, "x").tensors["m"])
    for row, column in ((0, 0), (127, 128), (128, 127), (129, 256)):
        value, factor = matrix[row, column].astype(np.float32), scale[row // 128, column // 128]
        assert out[row, column] == value * factor


def test_what_is_not_fp8_passes():
    tensors = {"w": np.ones(2, np.float32), "w.input_scale": np.ones(1, np.float32)}
    assert weights.dequantize(tensors, {}, "x") == weights.Dequantized(tensors, (), ())


@pytest.mark.parametrize(
    "tensors, config, words",
    [
        ({"m": MATRIX}, {}, "m is float8 and needs m_scale or m_scale_inv"),
        (
            {"m": MATRIX, "m_scale": scales(7)},
            {},
            r"must hold 1, 5 or \[1, 1\] numbers; got float32 \[7\]",
        ),
        (
            {"m": MATRIX, "m_scale_inv": scales(2, 2)},
            {"quantization_config": {"weight_block_size": [3, 3]}},
            r"\[2, 3\] numbers; got float32 \[2, 2\]",
        ),
        (
            {"m": MATRIX, "m_scale": scales()},
            {"quantization_config": {"weight_block_size": [0, 3]}},
            "weight_block_size",
        ),
        (
            {"m": MATRIX, "m_scale": scales()},
            {"quantization_config": {"weight_block_size": "128"}},
            "weight_block_size",
        ),
        (
            {"m": MATRIX, "m_scale": scales()},
            {"quantization_config": 8},
            "quantization_config must be an object",
        ),
    ],
)
def test_scales_that_do_not_fit(tensors, config, words):
    with pytest.raises(InputError, match=words):
        weights.dequantize(tensors, config, "x")
