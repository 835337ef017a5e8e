"""Writes keys and values of new tokens into a layer's cache.

A float8 cache gets one scale for each token and head. On a CPU a bfloat16 cache is an array of
16-bit integers, the bits of its numbers.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from peagle_jax.kernels import fp8_matmul
from peagle_jax.kernels.choose import choose, non_16bit_reason
from peagle_jax.kernels.launch import platform

# Rows of a batch that are written by an operation each; with more, a loop writes them.
MAX_UNROLLED = 16
# keys and values [B G S H]; where they are float8, then the scales of both [B G S]
CacheArrays = tuple[Num[Array, "..."], ...]


def array_dtype(dtype: DTypeLike) -> DTypeLike:
    """The dtype of the arrays of a cache whose keys and values are of `dtype`.

    XLA moves no bfloat16 numbers on a CPU: even to write one token it makes float32 of the whole
    array, and then bfloat16 again. It does move integers.
    """
    return jnp.uint16 if platform() == "cpu" and jnp.dtype(dtype) == jnp.bfloat16 else dtype


def numbers(stored: Num[Array, "..."]) -> Float[Array, "..."]:
    """Keys or values of which `stored` may be the bits (`array_dtype`)."""
    if stored.dtype != jnp.uint16:
        return stored
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)


def reference(
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    slots: Int[Array, "B T"],
    cache: CacheArrays,
) -> CacheArrays:
    """The cache with token t of row b in slot `slots[b, t]`; slots of S and more are dropped."""
    rows = jnp.arange(k.shape[0])[:, None]
    return tuple(
        old.at[rows, :, slots].set(new, mode="drop")
        for old, new in zip(cache, _as_stored(k, v, cache), strict=True)
    )


def consecutive(
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    slots: Int[Array, "B T"],
    cache: CacheArrays,
    *,
    is_converted: bool = False,
) -> CacheArrays:
    """As `reference`, for slots of a row that follow each other and lie inside the cache.

    XLA does this in place, where it copies the whole cache for a scatter.

    Args:
      is_converted: whether the cache will be read in another dtype.
    """
    new = _as_stored(k, v, cache)
    return tuple(
        _update_rows(old, jnp.moveaxis(x, 1, 2), slots[:, 0], is_converted)
        for old, x in zip(cache, new, strict=True)
    )


def _update_rows(
    cache: Num[Array, "B G S ..."],
    new: Num[Array, "B G T ..."],
    first: Int[Array, " B"],
    is_converted: bool = False,
) -> Num[Array, "B G S ..."]:
    """The cache with `new` in the slots from `first` on."""

    def update_row(row, cache):
        update = jax.lax.dynamic_slice_in_dim(new, row, 1)
        start = (row, 0, first[row], *[0] * (new.ndim - 3))
        if new.shape[2] == 1 and cache.shape[2] > 1:
            update, start = _with_neighbour(cache, update, start)
        return jax.lax.dynamic_update_slice(cache, update, start)

    if is_converted:
        # XLA fuses an update with the conversion of what it returns, and then copies the cache. It
        # cannot do so with a loop of which it does not know how often it runs: always B times.
        num_rows = jnp.where(first[0] >= 0, len(new), 0)
        return jax.lax.fori_loop(0, num_rows, update_row, cache)
    return jax.lax.fori_loop(0, len(new), update_row, cache, unroll=len(new) <= MAX_UNROLLED)


def move(
    cache: Num[Array, "B G S ..."],
    sources: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    *,
    ring: bool,
) -> Num[Array, "B G S ..."]:
    """The cache with what lies at `sources` also at `targets`, which follow each other in a row.

    Args:
      ring: places are to be taken modulo S.
    """
    size = cache.shape[2]
    if ring:
        sources, targets = sources % size, targets % size
    index = sources.reshape(len(sources), 1, -1, *[1] * (cache.ndim - 3))
    moved = jnp.take_along_axis(cache, index, axis=2)
    if not ring:
        return _update_rows(cache, moved, targets[:, 0])
    rows = jnp.arange(len(cache))[:, None]
    return cache.at[rows, :, targets].set(jnp.moveaxis(moved, 2, 1))


def _with_neighbour(
    cache: Num[Array, "B G S ..."], new: Num[Array, "1 G 1 ..."], start: tuple
) -> tuple[Num[Array, "1 G 2 ..."], tuple]:
    """`new` together with what a slot beside it holds.

    XLA on a CPU updates a cache in place if it can fuse something with the update. Of an update
    that is nothing but one token it makes a part of its readers instead, and copies the cache.
    """
    row, head, slot, *rest = start
    at = jnp.minimum(slot, cache.shape[2] - 2)
    start = (row, head, at, *rest)
    old = jax.lax.dynamic_slice(cache, start, (1, new.shape[1], 2, *new.shape[3:]))
    is_new = (jnp.arange(2) == slot - at).reshape(1, 1, 2, *[1] * (new.ndim - 3))
    return jnp.where(is_new, new, old), start


def _as_stored(
    k: Float[Array, "B T G H"], v: Float[Array, "B T G H"], cache: CacheArrays
) -> CacheArrays:
    """New keys and values in the dtypes of a cache; with their scales, where it is float8."""
    new: CacheArrays = (k, v)
    if len(cache) == 4:
        k_values, k_scale = fp8_matmul.scaled(k, axis=-1)
        v_values, v_scale = fp8_matmul.scaled(v, axis=-1)
        new = (k_values, v_values, k_scale, v_scale)
    return tuple(_converted(old.dtype, x) for old, x in zip(cache, new, strict=True))


def _converted(dtype: DTypeLike, x: Float[Array, "..."]) -> Num[Array, "..."]:
    if jnp.dtype(dtype) != jnp.uint16:
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def triton(
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    slots: Int[Array, "B T"],
    cache: CacheArrays,
) -> CacheArrays:
    """As `reference`, in place: the Triton kernel."""
    from peagle_jax.kernels import cache_write_triton

    return cache_write_triton.write(k, v, slots, cache)


FORMS = {"reference": reference, "triton": triton}


def write(
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    slots: Int[Array, "B T"],
    cache: CacheArrays,
    *,
    are_consecutive: bool = False,
    is_converted: bool = False,
    form: str = "auto",
) -> CacheArrays:
    """As `reference`.

    Args:
      are_consecutive: the slots are as `consecutive` wants them, which then takes the place of
        `reference`.
      is_converted: as of `consecutive`.
      form: a name of FORMS, or "auto".

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    reason = non_16bit_reason(k, v)
    if cache[0].dtype == jnp.uint16:
        reason = "a cache of bits is a CPU's (array_dtype)"
    form = choose("cache writing", form, FORMS, reason)
    if form == "reference" and are_consecutive:
        return consecutive(k, v, slots, cache, is_converted=is_converted)
    return FORMS[form](k, v, slots, cache)
