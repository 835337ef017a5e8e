"""MXFP4 checkpoints: 4-bit floats and one exponent for every 32 of them, as GPT-OSS stores experts.

A matrix NAME [E, in, out] is stored as `NAME_blocks` uint8 [E, out, in/32, 16], the low four bits
of a byte first, and `NAME_scales` uint8 [E, out, in/32], a power of two biased by 127 (OCP
Microscaling formats 1.0; transformers 5.23, integrations/mxfp4.py).
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from peagle_jax.types import InputError
from peagle_jax.weights.reading import DOWNLOAD_AGAIN
from peagle_jax.weights.tensors import Tensor, apply, stack

BLOCKS, SCALES = "_blocks", "_scales"


def packed_names(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the matrices that are stored in MXFP4, without their suffix."""
    return tuple(name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS))


def unpack(tensors: Mapping[str, Tensor], where: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint with every MXFP4 matrix lazily in float32, without rounding.

    Args:
      where: the folder, for errors.

    Raises:
      InputError: blocks have no scales, or either has another shape or dtype than the format's.
    """
    result = dict(tensors)
    for name in packed_names(tensors):
        blocks, scales = result.pop(name + BLOCKS), result.pop(name + SCALES, None)
        if scales is None:
            rule = f"{name}{BLOCKS} needs {name}{SCALES}"
            raise InputError(where, rule, "none", DOWNLOAD_AGAIN)
        _check_pair(name, blocks, scales, where)
        _, outputs, groups, group_bytes = blocks.shape
        shape = (groups * group_bytes * 2, outputs)
        # one by one: all experts of a layer of GPT-OSS 120B take 8.5 GB in float32
        of_experts = [
            apply(functools.partial(_decode, scales=expert_scales), expert, shape, np.float32)
            for expert, expert_scales in zip(np.asarray(blocks), np.asarray(scales), strict=True)
        ]
        result[name] = stack(of_experts)
    return result


def _check_pair(name: str, blocks: Tensor, scales: Tensor, where: str | Path) -> None:
    """Raises an InputError unless blocks and scales fit each other and the format."""
    shape = tuple(blocks.shape)
    is_right = len(shape) == 4 and shape[3] == 16 and 0 not in shape
    if not is_right or tuple(scales.shape) != shape[:3]:
        rule = f"{name}{BLOCKS} must be [E, out, in/32, 16] and its scales [E, out, in/32]"
        got = f"{blocks.shape} and {scales.shape}"
        raise InputError(where, rule, got, DOWNLOAD_AGAIN)
    if {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
        rule = f"{name}{BLOCKS} and its scales must be uint8"
        got = f"{blocks.dtype.name} and {scales.dtype.name}"
        raise InputError(where, rule, got, DOWNLOAD_AGAIN)


def _decode(blocks: np.ndarray, *, scales: np.ndarray) -> np.ndarray:
    """[out, in/32, 16] and [out, in/32] of one expert -> float32 [in, out]."""
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:2], -1)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    values *= scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    return values.reshape(len(blocks), -1).T
