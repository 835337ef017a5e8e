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
from peagle_jax.weights.param_table import IDENTITY, TRANSPOSE, TRANSPOSE_EXPERTS, ParamTable
from peagle_jax.weights.tensors import LazyTensor, Tensor, apply

FLOAT8 = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))
SCALES = ("_scale", "_scale_inv")
RUNTIME = (
    ".input_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".output_scale",
)  # of activations and caches, not of the weights
BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class Dequantized:
    tensors: dict[str, Tensor]  # float8 as float32, lazily; scales gone
    quantized: tuple[str, ...]  # what was float8
    left_out: tuple[str, ...]  # scales of activations and caches


def dequantize(tensors: Mapping[str, Tensor], config: Mapping, where) -> Dequantized:
    """The tensors of a checkpoint with every float8 matrix in float32: exactly what was stored.

    Args:
      config: config.json, for `quantization_config.weight_block_size`.

    Raises:
      InputError: a float8 matrix has no scale, or one of a shape that does not fit it.
    """
    quantized = tuple(name for name, t in tensors.items() if t.dtype in FLOAT8)
    if not quantized:
        return Dequantized(dict(tensors), (), ())
    block = Fields(config, where).child("quantization_config").get_ints("weight_block_size", BLOCK)
    if len(block) != 2 or 0 in block:
        raise InputError(
            where,
            "weight_block_size must be two whole numbers of 1 or more",
            block,
            "mend the config",
        )
    scales = {name + s for name in quantized for s in SCALES}
    left_out = tuple(name for name in tensors if name.endswith(RUNTIME) and name not in scales)
    result = {name: t for name, t in tensors.items() if name not in left_out}
    for name in quantized:
        scale = next((name + s for s in SCALES if name + s in tensors), None)
        if scale is None:
            raise InputError(
                where,
                f"{name} is float8 and needs {name}_scale or {name}_scale_inv",
                "neither",
                "fetch the folder again",
            )
        result[name] = _product(name, tensors[name], result.pop(scale), tuple(block), where)
    return Dequantized(result, quantized, left_out)


def _product(name: str, matrix: Tensor, scale: Tensor, block: tuple[int, int], where) -> Tensor:
    rows, *more = matrix.shape or (1,)
    grid = tuple(-(-size // b) for size, b in zip(matrix.shape, block, strict=False))
    by_row, by_block = (
        scale.shape in ((rows,), (rows, 1)) and bool(more),
        len(matrix.shape) == 2 and scale.shape == grid,
    )
    if (
        not (scale.size == 1 or by_row or by_block) or scale.dtype.kind not in "fV"
    ):  # V: ml_dtypes' floats
        rule = (
            f"the scale of {name} {list(matrix.shape)} must hold 1, {rows} or {list(grid)} numbers"
        )
        raise InputError(
            where, rule, f"{scale.dtype.name} {list(scale.shape)}", "fetch the folder again"
        )

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


def has_block_scales(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint's float8 matrices have a scale a block, rather than a row or one number."""
    return any(
        name.endswith("_scale_inv") and t.size > 1 and len(t.shape) == 2 and t.shape[1] > 1
        for name, t in tensors.items()
    )


def map_fp8_params(
    stored: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    table: ParamTable,
    paths: set[str],
    *,
    blocks: bool,
):
    """What fills a model whose matrices at `paths` are FP8: (tensors, table).

    Float8 matrices with scales of the right kind are taken as they are stored; all others are quantised when they are read,
    so that the largest value of a row or block becomes 448.

    Args:
      stored: of the checkpoint, with its scales.
      plain: the same without them, as `dequantise` gives them, under the names that `table` knows.
      paths: of the modules, `values` and `scale` being their parameters.
    """
    tensors, entries = dict(plain), {}
    for name, (path, layout) in table.items():
        module = path.removesuffix(".kernel")
        if module not in paths or module == path:
            entries[name] = (path, layout)
            continue
        turned = layout.name in (
            TRANSPOSE.name,
            TRANSPOSE_EXPERTS.name,
        )  # torch's [out, in], or one that every expert has
        if blocks and any(
            s not in (None, 0) and s % BLOCK[0]
            for part in (layout.place or ())
            if isinstance(part, slice)
            for s in (part.start, part.stop)
        ):
            rule = f"{name} must end at a block of {BLOCK[0]} to share a matrix of block scales"
            raise InputError("fp8", rule, str(layout.place[1:]), "load the target in bfloat16")
        values, scale = _pair(name, stored, plain, turned, blocks)
        tensors[name], tensors[name + "_scale"] = values, scale
        place = layout.place
        entries[name] = (
            f"{module}.values",
            IDENTITY if place is None else IDENTITY.at(place[0], *reversed(place[1:])),
        )
        entries[name + "_scale"] = (
            f"{module}.scale",
            IDENTITY if place is None else IDENTITY.at(*_scale_place(place, blocks)),
        )
    return {name: t for name, t in tensors.items() if name in entries or name not in table}, entries


def _scale_place(place: tuple, blocks: bool) -> tuple:
    """Where the scales of a part of an expert lie: along [out], or [out, in] in blocks."""
    expert, *rest = place
    if not rest:
        return place
    inputs, outputs = rest

    def part(s):
        return slice(*(None if x is None else -(-x // BLOCK[0]) for x in (s.start, s.stop)))

    return (expert, part(outputs), part(inputs)) if blocks else (expert, outputs)


def _pair(name: str, stored, plain, turned: bool, blocks: bool) -> tuple[Tensor, Tensor]:
    matrix = plain[name]
    *stack, rows, columns = (
        matrix.shape if turned else (*matrix.shape[:-2], matrix.shape[-1], matrix.shape[-2])
    )
    grid = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) if blocks else (rows,)
    shape = (*stack, *grid)
    raw = stored.get(name)
    scale = next((stored[name + s] for s in SCALES if name + s in stored), None)
    if raw is not None and raw.dtype == FLOAT8[0] and scale is not None and turned:
        fits = scale.shape == shape if blocks else scale.size in (1, rows) and not stack
        if fits:

            def spread(s):
                return np.broadcast_to(
                    s.astype(np.float32).reshape(shape if s.size > 1 else (1,) * len(shape)), shape
                )

            return raw, apply(spread, scale, shape, np.float32)
    held: dict[
        str, np.ndarray
    ] = {}  # values and scale are read one after the other: quantised once for both

    def half(mine: str) -> np.ndarray:
        if mine not in held:
            array = np.asarray(matrix).astype(np.float32)
            held["values"], held["scale"] = quantize(
                array if turned else array.swapaxes(-1, -2), blocks=blocks
            )
        return held.pop(mine)

    return LazyTensor((*stack, rows, columns), FLOAT8[0], lambda: half("values")), LazyTensor(
        shape, np.dtype(np.float32), lambda: half("scale")
    )


def quantize(matrix: np.ndarray, *, blocks: bool) -> tuple[np.ndarray, np.ndarray]:
    """(e4m3 values, float32 scales) of matrices [.., N, K]: by row, or by block of 128 x 128."""
    *stack, N, K = matrix.shape
    n, k = (-(-N // BLOCK[0]), -(-K // BLOCK[1])) if blocks else (N, 1)
    height, width = BLOCK if blocks else (1, K)
    grid = np.pad(
        matrix, [*[(0, 0)] * len(stack), (0, n * height - N), (0, k * width - K)]
    ).reshape(*stack, n, height, k, width)
    top = np.abs(grid).max(axis=(-3, -1), keepdims=True)
    scale = np.where(top > 1e-30, top / np.float32(ml_dtypes.finfo(FLOAT8[0]).max), np.float32(1))
    values = (grid / scale).astype(FLOAT8[0]).reshape(*stack, n * height, k * width)[..., :N, :K]
    scale = scale[..., 0, :, 0]
    return values, scale if blocks else scale[..., 0]
