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
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16,
    "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
FLOATING = tuple(np.dtype(DTYPES[name]) for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))
BLOCK = 1 << 20  # bytes copied at a time
SCANNED = 1 << 16  # elements looked at together: they stay in the processor's cache


@dataclasses.dataclass(frozen=True)
class Lazy:
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
        return array if dtype is None else array.astype(dtype, copy=False)


Tensor = np.ndarray | jax.Array | Lazy


@dataclasses.dataclass(frozen=True)
class Cast(Lazy):
    """A tensor in another dtype: the writer converts it piece by piece, and so never holds the whole of it."""

    source: Tensor = dataclasses.field(kw_only=True)


def _convert(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # the writer says which tensor became infinite
        return array.astype(dtype)


def apply(function: Callable[[np.ndarray], np.ndarray], tensor: Tensor, shape: tuple[int, ...], dtype) -> Lazy:
    """`function(tensor)`, of that shape and dtype, once it is asked for."""

    def read() -> np.ndarray:
        result = function(np.asarray(tensor))
        release(tensor)
        return result

    return Lazy(tuple(shape), np.dtype(dtype), read)


def cast(tensors: Mapping[str, Tensor], dtype) -> dict[str, Tensor]:
    """Floating-point tensors in `dtype`, lazily; integers and booleans (`d2t`, `t2d`) as they are."""
    dtype = np.dtype(dtype)
    make = lambda t: Cast(tuple(t.shape), dtype, lambda: _convert(np.asarray(t), dtype), source=t)  # noqa: E731
    return {name: make(t) if t.dtype in FLOATING and t.dtype != dtype else t for name, t in tensors.items()}


def blocks(tensor: Tensor) -> Iterator[np.ndarray]:
    """The bytes of a tensor in order, some MB at a time; pages of a mapped file are given back behind them."""
    if isinstance(tensor, Cast):
        for block in blocks(tensor.source):
            yield _convert(block.view(tensor.source.dtype), tensor.dtype).view(np.uint8)
        return
    array = np.ascontiguousarray(tensor)
    data = array.reshape(-1).view(np.uint8)
    for start in range(0, data.size, BLOCK):
        yield data[start : start + BLOCK]
        release(tensor)


def release(tensor: Tensor) -> None:
    """Tells the system that the pages of a mapped file are not needed now: they stay in its cache, not in this process."""
    if isinstance(tensor, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
        tensor._mmap.madvise(mmap.MADV_DONTNEED)


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
        warnings.warn(f"{where}: {name} holds NaN or infinite numbers", WeightsWarning, stacklevel=3)
