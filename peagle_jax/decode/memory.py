"""Whether a target's KV cache fits the device's memory, checked before it is allocated."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from peagle_jax.free_memory import free_bytes
from peagle_jax.types import CacheShape, InputError


def cache_bytes(
    shapes: Sequence[CacheShape],
    batch: int,
    cache_size: int,
    dtype: DTypeLike,
    block: int | None = None,
    parts: int = 1,
) -> int:
    """Bytes on each device of the cache that `KVCache.empty` makes of the same arguments.

    Args:
      parts: devices that the KV heads are spread over. Where their number does not divide the
        heads, every device has all heads.
    """
    value_bytes = jnp.dtype(dtype).itemsize
    scale_bytes = 4 if value_bytes == 1 else 0  # float8: a float32 scale beside every vector

    def group_bytes(shape: CacheShape) -> int:
        divides = shape.kv_heads % parts == 0
        heads = shape.kv_heads // parts if divides else shape.kv_heads
        slots = shape.num_slots(cache_size, block)
        vectors = 2 * len(shape.layers) * batch * heads * slots  # 2: keys and values
        return vectors * (shape.head_dim * value_bytes + scale_bytes)

    return sum(map(group_bytes, shapes))


def check_cache(
    shapes: Sequence[CacheShape],
    batch: int,
    cache_size: int,
    dtype: DTypeLike,
    block: int | None,
    parts: int,
    held: int = 0,
) -> None:
    """Checks that a target's cache fits its devices. Arguments as of `cache_bytes`.

    Args:
      held: bytes that are in use now, and will be free when this cache is needed.

    Raises:
      InputError: it does not. The message says how many tokens would fit.
    """
    free = free_bytes()
    if free is not None:
        free += held

    def size(cache_size: int) -> int:
        return cache_bytes(shapes, batch, cache_size, dtype, block, parts)

    if free is None or size(cache_size) <= free:
        return
    fits, too_many = 0, cache_size
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if size(middle) <= free:
            fits = middle
        else:
            too_many = middle
    rule = f"{batch} rows x {cache_size} tokens must fit the memory"
    got = f"{size(cache_size) / 1e9:.1f} GB wanted, {max(free, 0) / 1e9:.1f} GB free"
    if fits:
        next_step = f"{batch} x {fits} would fit: lower max_new_tokens, or max_batch"
    else:
        next_step = "lower max_batch, or use a machine with more memory"
    raise InputError("cache_size", rule, got, next_step)
