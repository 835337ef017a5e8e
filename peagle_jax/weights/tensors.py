"""Tensors that stay in their file until they are asked for.

The reader returns them, the converters pass them on, and the writer takes them: no step holds more
than one tensor in memory.
"""

import dataclasses
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from peagle_jax.types import WeightsWarning

DTYPES = {  # by their names in safetensors
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
FLOATING = tuple(
    np.dtype(DTYPES[name]) for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
)
# Bytes copied at a time. Of 4, 16 and 64 MB this is the fastest for the kernel's copy (LOG.md).
BLOCK = 16 << 20
BUFFERS = 4
# Elements checked for NaN at a time: so many fit into the processor's cache.
FINITE_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed anew each time it is asked for, and is not stored.

    Examples are a tensor in another dtype, and an FP8 matrix times its scales.

    Attributes:
      shape: the shape of what `read` returns.
      dtype: the dtype of what `read` returns.
      read: computes the tensor.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor once it is read."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """What `np.asarray(tensor)` calls. `np.array` asks for a copy, and makes none itself."""
        array = self.read()
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))


Tensor = np.ndarray | jax.Array | LazyTensor


@dataclasses.dataclass(frozen=True)
class CastTensor(LazyTensor):
    """A tensor in another dtype, which the writer converts block by block (`byte_blocks`).

    Attributes:
      source: the tensor in its first dtype.
    """

    source: Tensor = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class StackedTensor(LazyTensor):
    """Tensors of one shape along a new first axis, which the writer reads one after the other.

    Attributes:
      parts: the tensors.
    """

    parts: Sequence[Tensor] = dataclasses.field(kw_only=True)


def stack(parts: Sequence[Tensor]) -> StackedTensor:
    """Tensors of one shape and dtype along a new first axis. Nothing is read yet."""
    shape, dtype = (len(parts), *parts[0].shape), np.dtype(parts[0].dtype)

    def read() -> np.ndarray:
        whole = np.empty(shape, dtype)
        for place, part in zip(whole, parts, strict=True):
            place[...] = np.asarray(part)
        return whole

    return StackedTensor(shape, dtype, read, parts=tuple(parts))


def _convert_into(array: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Writes `array` in the dtype of `out` to the beginning of `out`; returns what was written."""
    # The writer says which tensor became infinite; NumPy need not.
    with np.errstate(over="ignore", invalid="ignore"):
        out[: len(array)] = array
    return out[: len(array)]


def apply(
    function: Callable[[np.ndarray], np.ndarray],
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: DTypeLike,
) -> LazyTensor:
    """`function(tensor)`, computed once it is asked for.

    Args:
      shape: the shape of the result.
      dtype: the dtype of the result.
    """

    def read() -> np.ndarray:
        result = function(np.asarray(tensor))
        release(tensor)
        return result

    return LazyTensor(tuple(shape), np.dtype(dtype), read)


def cast(tensors: Mapping[str, Tensor], dtype: DTypeLike) -> dict[str, Tensor]:
    """The same tensors, those of floating-point numbers lazily in `dtype`.

    Integers and booleans, such as `d2t` and `t2d`, stay as they are.
    """
    dtype = np.dtype(dtype)

    def cast_one(tensor: Tensor) -> Tensor:
        if tensor.dtype not in FLOATING or tensor.dtype == dtype:
            return tensor

        def read() -> np.ndarray:
            flat = np.asarray(tensor).reshape(-1)
            return _convert_into(flat, np.empty(tensor.size, dtype)).reshape(tensor.shape)

        return CastTensor(tuple(tensor.shape), dtype, read, source=tensor)

    return {name: cast_one(tensor) for name, tensor in tensors.items()}


def byte_blocks(tensor: Tensor) -> Iterator[np.ndarray]:
    """The bytes of a tensor in order, as uint8 arrays of about BLOCK bytes of the source each.

    A block may be overwritten once BUFFERS further blocks were asked for.
    """
    if isinstance(tensor, CastTensor):
        yield from _converted_blocks(tensor)
        return
    if isinstance(tensor, StackedTensor):
        for part in tensor.parts:
            yield from byte_blocks(part)
        return
    array = np.asarray(tensor)
    if array.ndim == 2 and not array.flags.c_contiguous:
        # A transposed matrix is made contiguous some rows at a time, not as a whole.
        rows = max(1, BLOCK // max(1, array[0].nbytes)) if len(array) else 1
        for start in range(0, len(array), rows):
            yield np.ascontiguousarray(array[start : start + rows]).reshape(-1).view(np.uint8)
        return
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, data.size, BLOCK):
        yield data[start : start + BLOCK]


def _converted_blocks(tensor: CastTensor) -> Iterator[np.ndarray]:
    """`byte_blocks` of a tensor in another dtype: each block of the source is converted alone."""
    elements = min(BLOCK // tensor.source.dtype.itemsize, tensor.size)
    # Buffers in turns, because fresh memory for each block costs more than the conversion.
    buffers = [np.empty(elements, tensor.dtype) for _ in range(BUFFERS)]
    for i, block in enumerate(byte_blocks(tensor.source)):
        source_numbers = block.view(tensor.source.dtype)
        yield _convert_into(source_numbers, buffers[i % BUFFERS]).view(np.uint8)
        release(block)


# mapping -> what its file was when it was mapped
_mapped_files: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int, int, int]] = (
    weakref.WeakKeyDictionary()
)


def find_mapping(array: np.ndarray) -> tuple[np.memmap, int] | None:
    """The mapped file that an array is a view of, and the offset of the array's first byte in it.

    None for arrays in memory; among them are results of arithmetic on mapped arrays, which NumPy
    calls memmap too.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
        owner = owner.base
    if not isinstance(owner, np.memmap) or _mmap_of(owner) is None:
        return None
    mapping_start = np.frombuffer(_mmap_of(owner), np.uint8).ctypes.data
    return owner, array.ctypes.data - mapping_start


def map_file(path: Path, offset: int) -> np.memmap:
    """The bytes of a file from an offset on, of which `is_mapped_file` knows the file."""
    with path.open("rb") as file:
        data = np.memmap(file, np.uint8, "r", offset=offset)
        _mapped_files[_mmap_of(data)] = _file_id(file.fileno())
    return data


def is_mapped_file(data: np.memmap, handle: int) -> bool:
    """Whether an open file is the one that was mapped, and has not changed since.

    By its name there may be another one by now.
    """
    return _mapped_files.get(_mmap_of(data)) == _file_id(handle)


def _file_id(handle: int) -> tuple[int, int, int, int]:
    stat = os.fstat(handle)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _mmap_of(array: np.memmap) -> Any:
    """The `mmap.mmap` below a memmap; NumPy has no public name for it."""
    return array._mmap  # pyright: ignore[reportAttributeAccessIssue]


def release(tensor: Tensor) -> None:
    """Tells the system that the pages of a mapped tensor are not needed now.

    They leave this process's memory and stay in the system's file cache.
    """
    mapping = find_mapping(tensor) if isinstance(tensor, np.ndarray) else None
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        owner, start = mapping
        page_start = start - start % mmap.PAGESIZE
        length = start - page_start + tensor.nbytes
        _mmap_of(owner).madvise(mmap.MADV_DONTNEED, page_start, length)


def all_finite(data: np.ndarray, dtype: np.dtype) -> bool:
    """Whether floating-point numbers hold no NaN and no infinity; always true of other dtypes.

    Compares bit patterns: without its sign, a number is finite if it is not above the pattern of
    the largest finite one.

    Args:
      data: the numbers as uint8, one axis.
      dtype: of the numbers.
    """
    if dtype not in FLOATING:
        return True
    bits = np.dtype(f"u{dtype.itemsize}")
    largest = np.asarray(ml_dtypes.finfo(dtype).max, dtype).view(bits)
    magnitude = bits.type(2 ** (8 * dtype.itemsize - 1) - 1)
    patterns, scratch = data.view(bits), np.empty(FINITE_CHUNK, bits)
    for start in range(0, patterns.size, FINITE_CHUNK):
        part = patterns[start : start + FINITE_CHUNK]
        if np.bitwise_and(part, magnitude, out=scratch[: part.size]).max() > largest:
            return False
    return True


def warn_not_finite(where: str | Path, name: str) -> None:
    """Warns that tensor `name` of the file or folder `where` holds NaN or infinity."""
    message = f"{where}: {name} holds NaN or infinite numbers"
    warnings.warn(message, WeightsWarning, stacklevel=3)
