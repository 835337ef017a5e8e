"""Whether a cache fits, before it is allocated."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from peagle_jax.types import CacheShape, InputError

MEMINFO = Path("/proc/meminfo")
LIMIT, USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")  # of a container


def cache_bytes(shapes: Sequence[CacheShape], batch: int, slots: int, dtype, block: int | None = None) -> int:
    """Of the cache that `KVCache.empty` makes of the same arguments."""
    numbers = sum(2 * len(s.layers) * batch * s.kv_heads * s.held(slots, block) * s.head_dim for s in shapes)
    return numbers * jnp.dtype(dtype).itemsize


def free_bytes() -> int | None:
    """What the default device, or this machine for a CPU, can still give; None where it does not say."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    found = [int(line.split()[1]) * 1024 for line in _lines(MEMINFO) if line.startswith("MemAvailable:")]
    if (limit := _lines(LIMIT)) and limit[0].isdigit() and (used := _lines(USED)):
        found.append(int(limit[0]) - int(used[0]))
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def check_cache(shapes: Sequence[CacheShape], batch: int, slots: int, dtype, block: int | None, parts: int) -> None:
    """Raises InputError where a cache would not fit, with the size that would.

    Args:
      parts: devices that a cache is spread over. KV heads that do not divide lie on each, so this is the least it takes.
    """
    free = free_bytes()
    size = lambda n: cache_bytes(shapes, batch, n, dtype, block) // parts  # noqa: E731
    if free is None or size(slots) <= free:
        return
    low, high = 0, slots
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= free else (low, middle)
    got, fits = f"{size(slots) / 1e9:.1f} GB wanted, {free / 1e9:.1f} GB free", f"{batch} x {low} would fit"
    raise InputError("cache", f"{batch} rows x {slots} tokens must fit the memory", got, f"{fits}: ask for less, or smaller batches")
