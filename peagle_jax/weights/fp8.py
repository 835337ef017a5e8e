"""FP8 checkpoints: float8 matrices beside their scales, as vLLM, compressed-tensors and DeepSeek store them.

A matrix `NAME` [out, in] of float8 has `NAME_scale` (one number, or one a row) or `NAME_scale_inv` (one a block of 128 x 128,
or as the config's `weight_block_size` says; in spite of its name it multiplies). The value is their product in float32.
"""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from peagle_jax.types import InputError
from peagle_jax.weights.fields import Fields
from peagle_jax.weights.tensors import Tensor, apply

FLOAT8 = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))
SCALES = ("_scale", "_scale_inv")
RUNTIME = (".input_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale")  # of activations and caches, not of the weights
BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class Dequantised:
    tensors: dict[str, Tensor]  # float8 as float32, lazily; scales gone
    quantised: tuple[str, ...]  # what was float8
    left_out: tuple[str, ...]  # scales of activations and caches


def dequantise(tensors: Mapping[str, Tensor], config: Mapping, where) -> Dequantised:
    """The tensors of a checkpoint with every float8 matrix in float32: exactly what was stored.

    Args:
      config: config.json, for `quantization_config.weight_block_size`.

    Raises:
      InputError: a float8 matrix has no scale, or one of a shape that does not fit it.
    """
    quantised = tuple(name for name, t in tensors.items() if t.dtype in FLOAT8)
    if not quantised:
        return Dequantised(dict(tensors), (), ())
    block = Fields(config, where).inner("quantization_config").wholes("weight_block_size", BLOCK)
    if len(block) != 2 or 0 in block:
        raise InputError(where, "weight_block_size must be two whole numbers of 1 or more", block, "mend the config")
    scales = {name + s for name in quantised for s in SCALES}
    left_out = tuple(name for name in tensors if name.endswith(RUNTIME) and name not in scales)
    result = {name: t for name, t in tensors.items() if name not in left_out}
    for name in quantised:
        scale = next((name + s for s in SCALES if name + s in tensors), None)
        if scale is None:
            raise InputError(where, f"{name} is float8 and needs {name}_scale or {name}_scale_inv", "neither", "fetch the folder again")
        result[name] = _product(name, tensors[name], result.pop(scale), tuple(block), where)
    return Dequantised(result, quantised, left_out)


def _product(name: str, matrix: Tensor, scale: Tensor, block: tuple[int, int], where) -> Tensor:
    rows, *more = matrix.shape or (1,)
    grid = tuple(-(-size // b) for size, b in zip(matrix.shape, block, strict=False))
    by_row, by_block = scale.shape in ((rows,), (rows, 1)) and bool(more), len(matrix.shape) == 2 and scale.shape == grid
    if not (scale.size == 1 or by_row or by_block) or scale.dtype.kind not in "fV":  # V: ml_dtypes' floats
        rule = f"the scale of {name} {list(matrix.shape)} must hold 1, {rows} or {list(grid)} numbers"
        raise InputError(where, rule, f"{scale.dtype.name} {list(scale.shape)}", "fetch the folder again")

    def product(array: np.ndarray) -> np.ndarray:
        out, s = array.astype(np.float32), np.asarray(scale).astype(np.float32)
        if scale.size == 1:
            out *= s.reshape(())
        elif by_row:
            out *= s.reshape(rows, *(1 for _ in more))
        else:
            for i, line in enumerate(s):  # rows of blocks: the spread-out scale is never whole
                out[i * block[0] : (i + 1) * block[0]] *= np.repeat(line, block[1])[None, : more[0]]
        return out

    return apply(product, matrix, matrix.shape, np.float32)
