"""Whether a target's KV cache fits the device's memory, checked before it is allocated."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from peagle_jax.types import CacheShape, InputError

MEMINFO = Path("/proc/meminfo")
CGROUP_V2 = Path("/sys/fs/cgroup")
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
# a container's limit, its use, and its statistics, by version of cgroups
CGROUPS = (
    (CGROUP_V2 / "memory.max", CGROUP_V2 / "memory.current", CGROUP_V2 / "memory.stat"),
    (
        CGROUP_V1 / "memory.limit_in_bytes",
        CGROUP_V1 / "memory.usage_in_bytes",
        CGROUP_V1 / "memory.stat",
    ),
)


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


def free_bytes() -> int | None:
    """Bytes that can still be allocated on the default device; None where that is unknown.

    For a CPU this is the machine's available memory, or what a container's limit leaves of it.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    free = []
    for line in _lines(MEMINFO):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for limit_file, usage_file, statistics_file in CGROUPS:
        limit, usage = _lines(limit_file), _lines(usage_file)
        if limit and limit[0].isdigit() and usage:
            # cached files count as used, but are given up when memory is needed
            reclaimable = _cached_file_bytes(statistics_file)
            free.append(int(limit[0]) - int(usage[0]) + reclaimable)
    return min(free, default=None)


def _cached_file_bytes(statistics_file: Path) -> int:
    """Bytes of a container's memory that only cache files."""
    names = ("inactive_file ", "active_file ")
    lines = [line for line in _lines(statistics_file) if line.startswith(names)]
    return sum(int(line.split()[1]) for line in lines)


def _lines(path: Path) -> list[str]:
    """A file's lines; none where it does not exist or may not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


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
        next_step = f"{batch} x {fits} would fit: lower max_new_tokens, or use a smaller batch"
    else:
        next_step = "use a smaller batch, or a machine with more memory"
    raise InputError("cache_size", rule, got, next_step)
