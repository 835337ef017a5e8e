"""Whether a cache fits, before it is allocated."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from peagle_jax.types import CacheShape, InputError

MEMINFO = Path("/proc/meminfo")
# limit, use and statistics of a container, by version of cgroups
CGROUPS = (
    tuple(
        map(
            Path,
            (
                "/sys/fs/cgroup/memory.max",
                "/sys/fs/cgroup/memory.current",
                "/sys/fs/cgroup/memory.stat",
            ),
        )
    ),
    tuple(
        Path("/sys/fs/cgroup/memory") / f"memory.{name}"
        for name in ("limit_in_bytes", "usage_in_bytes", "stat")
    ),
)


def cache_bytes(
    shapes: Sequence[CacheShape],
    batch: int,
    cache_size: int,
    dtype,
    block: int | None = None,
    parts: int = 1,
) -> int:
    """Of the cache that `KVCache.empty` makes of the same arguments, on each of `parts` devices; KV heads that do not divide lie on all."""

    def share(heads):
        return heads // parts if heads % parts == 0 else heads

    size = jnp.dtype(dtype).itemsize
    scale = 4 if size == 1 else 0  # bytes beside every vector
    return sum(
        2
        * len(s.layers)
        * batch
        * share(s.kv_heads)
        * s.held(cache_size, block)
        * (s.head_dim * size + scale)
        for s in shapes
    )


def free_bytes() -> int | None:
    """What the default device, or this machine for a CPU, can still give; None where it does not say."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    found = [
        int(line.split()[1]) * 1024 for line in _lines(MEMINFO) if line.startswith("MemAvailable:")
    ]
    for limit, used, statistics in CGROUPS:
        if (most := _lines(limit)) and most[0].isdigit() and (now := _lines(used)):
            files = sum(
                int(line.split()[1])
                for line in _lines(statistics)
                if line.startswith(("inactive_file ", "active_file "))
            )
            found.append(
                int(most[0]) - int(now[0]) + files
            )  # what is only kept of files is given back
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def check_cache(
    shapes: Sequence[CacheShape], batch: int, cache_size: int, dtype, block: int | None, parts: int
) -> None:
    """Raises InputError where a target's cache would not fit its devices, with the number of tokens that would."""
    free = free_bytes()

    def size(n):
        return cache_bytes(shapes, batch, n, dtype, block, parts)

    if free is None or size(cache_size) <= free:
        return
    low, high = 0, cache_size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= free else (low, middle)
    got = f"{size(cache_size) / 1e9:.1f} GB wanted, {max(free, 0) / 1e9:.1f} GB free"
    next_step = (
        f"{batch} x {low} would fit: ask for less, or smaller batches"
        if low
        else "use smaller batches, or another machine"
    )
    raise InputError(
        "cache", f"{batch} rows x {cache_size} tokens must fit the memory", got, next_step
    )
