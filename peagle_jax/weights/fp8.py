"""FP8 checkpoints: float8 matrices and their scales.

The formats of vLLM, compressed-tensors and DeepSeek are read. Beside a float8 matrix NAME
[out, in] lies `NAME_scale`, one number or one for each row, or `NAME_scale_inv`, one for each block
of 128 x 128 or of the size that `weight_block_size` in the config says. In spite of its name,
`_scale_inv` multiplies, too. The value of the matrix is the product of both in float32.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from peagle_jax.types import InputError
from peagle_jax.weights.fields import Fields
from peagle_jax.weights.param_table import (
    IDENTITY,
    TRANSPOSE,
    TRANSPOSE_EXPERTS,
    ParamTable,
    ParamTransform,
)
from peagle_jax.weights.reading import DOWNLOAD_AGAIN
from peagle_jax.weights.tensors import LazyTensor, Tensor, apply

FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
E4M3 = FLOAT8[0]
SCALE_SUFFIXES = ("_scale", "_scale_inv")
# scales of activations and of the KV cache, which are not used here
ACTIVATION_SCALES = (".input_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class Dequantized:
    """A checkpoint without FP8.

    Attributes:
      tensors: every tensor, float8 ones lazily in float32; their scales are not among them.
      quantized: names of the tensors that were float8.
      left_out: names of scales of activations and of the KV cache.
    """

    tensors: dict[str, Tensor]
    quantized: tuple[str, ...]
    left_out: tuple[str, ...]


def dequantize(tensors: Mapping[str, Tensor], config: Mapping, where: str | Path) -> Dequantized:
    """The tensors of a checkpoint with every float8 matrix lazily in float32, rounded once.

    Args:
      config: config.json, for `quantization_config.weight_block_size`.
      where: the folder, for errors.

    Raises:
      InputError: a float8 matrix has no scale, or one of a shape that does not fit it.
    """
    quantized = tuple(name for name, t in tensors.items() if t.dtype in FLOAT8)
    if not quantized:
        return Dequantized(dict(tensors), (), ())
    file = Path(where) / "config.json"
    block = Fields(config, file).child("quantization_config").get_ints("weight_block_size", BLOCK)
    if len(block) != 2 or 0 in block:
        raise InputError(
            file,
            rule="weight_block_size must be two whole numbers of 1 or more",
            got=block,
            next_step="set weight_block_size to the shape of the blocks, for example [128, 128]",
        )
    scales = {name + suffix for name in quantized for suffix in SCALE_SUFFIXES}
    left_out = tuple(
        name for name in tensors if name.endswith(ACTIVATION_SCALES) and name not in scales
    )
    result = {name: t for name, t in tensors.items() if name not in left_out}
    for name in quantized:
        scale_name = next((name + s for s in SCALE_SUFFIXES if name + s in tensors), None)
        if scale_name is None:
            rule = f"{name} is float8 and needs {name}_scale or {name}_scale_inv"
            raise InputError(where, rule, "neither", DOWNLOAD_AGAIN)
        scale = result.pop(scale_name)
        result[name] = _product(name, tensors[name], scale, (block[0], block[1]), where)
    return Dequantized(result, quantized, left_out)


def _product(
    name: str, matrix: Tensor, scale: Tensor, block: tuple[int, int], where: str | Path
) -> Tensor:
    """The matrix times its scale, lazily; an InputError where the scale does not fit."""
    rows, *other_axes = matrix.shape or (1,)
    grid = tuple(-(-size // b) for size, b in zip(matrix.shape, block, strict=False))
    is_by_row = scale.shape in ((rows,), (rows, 1)) and bool(other_axes)
    is_by_block = len(matrix.shape) == 2 and scale.shape == grid
    fits = scale.size == 1 or is_by_row or is_by_block
    # NumPy's kind of ml_dtypes' floats is "V"
    if not fits or scale.dtype.kind not in "fV":
        numbers = f"1, {rows} or {list(grid)} numbers"
        rule = f"the scale of {name} {list(matrix.shape)} must hold {numbers}"
        got = f"{scale.dtype.name} {list(scale.shape)}"
        raise InputError(where, rule, got, DOWNLOAD_AGAIN)

    def multiply(values: np.ndarray) -> np.ndarray:
        product, factors = values.astype(np.float32), np.asarray(scale).astype(np.float32)
        if scale.size == 1:
            product *= factors.reshape(())
        elif is_by_row:
            product *= factors.reshape(rows, *(1 for _ in other_axes))
        else:
            # One row of blocks at a time, so that the repeated scales take little memory.
            height, width = block
            for i, block_row in enumerate(factors):
                columns = np.repeat(block_row, width)[None, : other_axes[0]]
                product[i * height : (i + 1) * height] *= columns
        return product

    return apply(multiply, matrix, matrix.shape, np.float32)


def has_block_scales(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint's float8 matrices have a scale for each block, not row or matrix."""
    return any(
        name.endswith(SCALE_SUFFIXES) and t.size > 1 and len(t.shape) == 2 and t.shape[1] > 1
        for name, t in tensors.items()
    )


def map_fp8_params(
    stored: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    table: ParamTable,
    paths: set[str],
    *,
    blocks: bool,
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ParamTransform]]]:
    """The tensors and the table that fill a model whose matrices at `paths` are FP8.

    Float8 matrices with scales of the right kind are taken as they are stored. All others are
    quantized when they are read, so that the largest value of a row or block becomes 448, the
    largest number of e4m3.

    Args:
      stored: the checkpoint's tensors with their scales, under the names that `table` knows.
      plain: the same without FP8, as `dequantize` gives them.
      table: of the model without FP8.
      paths: dotted paths of the modules that hold FP8; their parameters are `values` and `scale`.
      blocks: one scale for a block of 128 x 128, or one for a row.

    Raises:
      InputError: a tensor is a part of a matrix, and the part ends inside a block.
    """
    tensors = dict(plain)
    entries: dict[str, tuple[str, ParamTransform]] = {}
    for name, (path, transform) in table.items():
        module = path.removesuffix(".kernel")
        if module not in paths or module == path:
            entries[name] = (path, transform)
            continue
        if blocks:
            _check_block_ends(name, transform.slices)
        # torch's [out, in], for one matrix or for every expert's
        is_transposed = transform.name in (TRANSPOSE.name, TRANSPOSE_EXPERTS.name)
        values, scale = _values_and_scale(name, stored, plain, is_transposed, blocks)
        tensors[name], tensors[name + "_scale"] = values, scale
        values_part = scale_part = IDENTITY
        if transform.expert is not None:
            values_part = IDENTITY.at(transform.expert, *reversed(transform.slices))
            scale_part = IDENTITY.at(transform.expert, *_scale_slices(transform.slices, blocks))
        entries[name] = (f"{module}.values", values_part)
        entries[name + "_scale"] = (f"{module}.scale", scale_part)
    used = {name: t for name, t in tensors.items() if name in entries or name not in table}
    return used, entries


def _check_block_ends(name: str, slices: tuple[slice, ...]) -> None:
    """A block has one scale, so two tensors cannot share it."""
    ends = [end for part in slices for end in (part.start, part.stop)]
    if any(end is not None and end % BLOCK[0] for end in ends):
        rule = f"{name} must end at a block of {BLOCK[0]} to share a matrix of block scales"
        raise InputError("fp8", rule, str(slices), "load the target in bfloat16")


def _scale_slices(slices: tuple[slice, ...], blocks: bool) -> tuple[slice, ...]:
    """Where the scales of a part of an expert's matrix lie.

    Args:
      slices: of the part on the axes [in, out]; () is all of both.

    Returns:
      Slices on [out], or with `blocks` on [out, in] in units of blocks.
    """
    if not slices:
        return ()
    inputs, outputs = slices
    return (_in_blocks(outputs), _in_blocks(inputs)) if blocks else (outputs,)


def _in_blocks(part: slice) -> slice:
    start, stop = (None if end is None else -(-end // BLOCK[0]) for end in (part.start, part.stop))
    return slice(start, stop)


def _values_and_scale(
    name: str,
    stored: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    is_transposed: bool,
    blocks: bool,
) -> tuple[Tensor, Tensor]:
    """e4m3 [.., out, in] and its float32 scales: those of the checkpoint, or quantized lazily.

    Args:
      is_transposed: the stored matrix is [.., out, in]; otherwise [.., in, out].
    """
    matrix = plain[name]
    *experts, rows, columns = matrix.shape
    if not is_transposed:
        rows, columns = columns, rows
    grid = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) if blocks else (rows,)
    scale_shape = (*experts, *grid)
    values = stored.get(name)
    scale = next((stored[name + s] for s in SCALE_SUFFIXES if name + s in stored), None)
    if values is not None and values.dtype == E4M3 and scale is not None and is_transposed:
        one_or_rows = scale.size in (1, rows) and not experts
        if scale.shape == scale_shape if blocks else one_or_rows:

            def spread(factors: np.ndarray) -> np.ndarray:
                shape = scale_shape if factors.size > 1 else (1,) * len(scale_shape)
                return np.broadcast_to(factors.astype(np.float32).reshape(shape), scale_shape)

            return values, apply(spread, scale, scale_shape, np.float32)
    quantizer = _LazyQuantizer(matrix, is_transposed, blocks)
    return (
        LazyTensor((*experts, rows, columns), E4M3, quantizer.read_values),
        LazyTensor(scale_shape, np.dtype(np.float32), quantizer.read_scale),
    )


class _LazyQuantizer:
    """Quantizes a matrix when its values or its scales are read.

    Both are read one after the other, so the other result is remembered until it is read, and the
    matrix is quantized once.
    """

    def __init__(self, matrix: Tensor, is_transposed: bool, blocks: bool):
        self.matrix, self.is_transposed, self.blocks = matrix, is_transposed, blocks
        self.unread: dict[str, np.ndarray] = {}

    def read_values(self) -> np.ndarray:
        return self._read("values")

    def read_scale(self) -> np.ndarray:
        return self._read("scale")

    def _read(self, result: str) -> np.ndarray:
        if result not in self.unread:
            array = np.asarray(self.matrix).astype(np.float32)
            rows_first = array if self.is_transposed else array.swapaxes(-1, -2)
            values, scale = quantize(rows_first, blocks=self.blocks)
            self.unread = {"values": values, "scale": scale}
        return self.unread.pop(result)


def quantize(matrix: np.ndarray, *, blocks: bool) -> tuple[np.ndarray, np.ndarray]:
    """(e4m3 values, float32 scales) of matrices [.., N, K].

    Args:
      blocks: one scale for a block of 128 x 128, [.., ceil(N/128), ceil(K/128)]; otherwise one for
        a row, [.., N].
    """
    *stack, N, K = matrix.shape
    n, k = (-(-N // BLOCK[0]), -(-K // BLOCK[1])) if blocks else (N, 1)
    height, width = BLOCK if blocks else (1, K)
    padding = [*[(0, 0)] * len(stack), (0, n * height - N), (0, k * width - K)]
    grid = np.pad(matrix, padding).reshape(*stack, n, height, k, width)
    largest = np.abs(grid).max(axis=(-3, -1), keepdims=True)
    limit = np.float32(ml_dtypes.finfo(E4M3).max)
    scale = np.where(largest > 1e-30, largest / limit, np.float32(1))
    values = (grid / scale).astype(E4M3).reshape(*stack, n * height, k * width)[..., :N, :K]
    scale = scale[..., 0, :, 0]
    return values, scale if blocks else scale[..., 0]
