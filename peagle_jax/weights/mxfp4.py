"""MXFP4 checkpoints: 4-bit floats beside one exponent for every 32 of them, as GPT-OSS stores its experts.

`NAME_blocks` uint8 [E, out, in/32, 16], low nibble first, and `NAME_scales` uint8 [E, out, in/32], a power of two biased by 127
(OCP Microscaling formats 1.0; transformers 5.23, integrations/mxfp4.py). The matrix itself is [E, in, out].
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from peagle_jax.types import InputError
from peagle_jax.weights.tensors import Tensor, apply

BLOCKS, SCALES = "_blocks", "_scales"


def packed_names(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the matrices that are stored so."""
    return tuple(name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS))


def unpack(tensors: Mapping[str, Tensor], where) -> dict[str, Tensor]:
    """The tensors of a checkpoint with every MXFP4 matrix in float32: exactly what was stored.

    Raises:
      InputError: blocks without scales, or of a shape that does not fit them.
    """
    result = dict(tensors)
    for name in packed_names(tensors):
        blocks, scales = result.pop(name + BLOCKS), result.pop(name + SCALES, None)
        if scales is None:
            raise InputError(
                where, f"{name}{BLOCKS} needs {name}{SCALES}", "none", "fetch the folder again"
            )
        if (
            len(blocks.shape) != 4
            or blocks.shape[3] != 16
            or tuple(scales.shape) != tuple(blocks.shape[:3])
        ):
            rule, got = (
                f"{name}{BLOCKS} must be [E, out, in/32, 16] and its scales [E, out, in/32]",
                f"{blocks.shape} and {scales.shape}",
            )
            raise InputError(where, rule, got, "fetch the folder again")
        if {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
            got = f"{blocks.dtype.name} and {scales.dtype.name}"
            raise InputError(
                where, f"{name}{BLOCKS} and its scales must be uint8", got, "fetch the folder again"
            )
        E, out, parts, half = blocks.shape
        result[name] = apply(
            lambda b, scales=scales: _decode(b, np.asarray(scales)),
            blocks,
            (E, 2 * half * parts, out),
            np.float32,
        )
    return result


def _decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], -1)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    values *= scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
