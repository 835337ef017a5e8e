"""Tensors that stay in their file until they are asked for: what the reader gives, the converters pass on, the writer takes."""

import dataclasses
import math
import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping

import jax
import ml_dtypes
import numpy as np

from peagle_jax.types import WeightsWarning

DTYPES = {
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
BLOCK = (
    16 << 20
)  # bytes copied at a time: of 4, 16 and 64 MB the fastest for the kernel's copy (LOG.md)
BUFFERS = 4
SCANNED = 1 << 16  # elements looked at together: they stay in the processor's cache


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed when it is asked for, and not kept: a cast, an FP8 matrix times its scales."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        array = self.read()
        return array.astype(
            array.dtype if dtype is None else dtype, copy=bool(copy)
        )  # np.array asks for a copy, and makes none itself


Tensor = np.ndarray | jax.Array | LazyTensor


@dataclasses.dataclass(frozen=True)
class Cast(LazyTensor):
    """A tensor in another dtype: the writer converts it piece by piece, and so never holds the whole of it."""

    source: Tensor = dataclasses.field(kw_only=True)


def _convert(array: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`array` in the dtype of `out`, written there."""
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # the writer says which tensor became infinite
        out[: len(array)] = array
    return out[: len(array)]


def apply(
    function: Callable[[np.ndarray], np.ndarray], tensor: Tensor, shape: tuple[int, ...], dtype
) -> LazyTensor:
    """`function(tensor)`, of that shape and dtype, once it is asked for."""

    def read() -> np.ndarray:
        result = function(np.asarray(tensor))
        release(tensor)
        return result

    return LazyTensor(tuple(shape), np.dtype(dtype), read)


def cast(tensors: Mapping[str, Tensor], dtype) -> dict[str, Tensor]:
    """Floating-point tensors in `dtype`, lazily; integers and booleans (`d2t`, `t2d`) as they are."""
    dtype = np.dtype(dtype)

    def make(t: Tensor) -> Cast:
        def whole():
            return _convert(np.asarray(t).reshape(-1), np.empty(t.size, dtype)).reshape(t.shape)

        return Cast(tuple(t.shape), dtype, whole, source=t)

    return {
        name: make(t) if t.dtype in FLOATING and t.dtype != dtype else t
        for name, t in tensors.items()
    }


def blocks(tensor: Tensor) -> Iterator[np.ndarray]:
    """The bytes of a tensor in order, BLOCK of the source's at a time. A block stays what it is until BUFFERS more are asked for."""
    if isinstance(tensor, Cast):
        most = BLOCK // tensor.source.dtype.itemsize
        ring = [
            np.empty(min(most, tensor.size), tensor.dtype) for _ in range(BUFFERS)
        ]  # fresh memory costs more than the cast
        for i, block in enumerate(blocks(tensor.source)):
            yield _convert(block.view(tensor.source.dtype), ring[i % BUFFERS]).view(np.uint8)
            release(block)
        return
    array = np.asarray(tensor)
    if array.ndim == 2 and not array.flags.c_contiguous:  # a transposed matrix, some rows at a time
        rows = max(1, BLOCK // max(1, array[0].nbytes)) if len(array) else 1
        for start in range(0, len(array), rows):
            yield np.ascontiguousarray(array[start : start + rows]).reshape(-1).view(np.uint8)
        return
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, data.size, BLOCK):
        yield data[start : start + BLOCK]


def mapped_at(array: np.ndarray) -> tuple[np.memmap, int] | None:
    """The mapped file that an array is a view of, and the array's first byte in the mapping."""
    owner = array
    while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
        owner = owner.base
    if (
        not isinstance(owner, np.memmap) or owner._mmap is None
    ):  # arithmetic on a mapped array calls its result a memmap too
        return None
    return owner, array.ctypes.data - np.frombuffer(owner._mmap, np.uint8).ctypes.data


def release(tensor: Tensor) -> None:
    """Tells the system that these pages of a mapped file are not needed now: they stay in its cache, not in this process."""
    place = mapped_at(tensor) if isinstance(tensor, np.ndarray) else None
    if place is not None and hasattr(mmap, "MADV_DONTNEED"):
        owner, start = place
        first = start - start % mmap.PAGESIZE
        owner._mmap.madvise(mmap.MADV_DONTNEED, first, start - first + tensor.nbytes)


def finite(data: np.ndarray, dtype: np.dtype) -> bool:
    """Whether the bytes `data` of floating-point numbers hold no NaN and no infinity; always true of other dtypes.

    Compares bit patterns: without its sign, a number is finite if it is not above the pattern of the largest finite one.
    """
    if dtype not in FLOATING:
        return True
    bits = np.dtype(f"u{dtype.itemsize}")
    largest = np.asarray(ml_dtypes.finfo(dtype).max, dtype).view(bits)
    magnitude = bits.type(2 ** (8 * dtype.itemsize - 1) - 1)
    patterns, scratch = data.view(bits), np.empty(SCANNED, bits)
    for start in range(0, patterns.size, SCANNED):
        part = patterns[start : start + SCANNED]
        if np.bitwise_and(part, magnitude, out=scratch[: part.size]).max() > largest:
            return False
    return True


def warn_unless_finite(where, name: str, good: bool) -> None:
    if not good:
        warnings.warn(
            f"{where}: {name} holds NaN or infinite numbers", WeightsWarning, stacklevel=3
        )
