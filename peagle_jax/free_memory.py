"""How much memory is free on a device, for checks before something is read or allocated; and how
much this process has of two things that Linux limits: memory mappings, and data.
"""

from pathlib import Path

import jax

from peagle_jax.types import Device

MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
DEFAULT_MOST_MAPPINGS = 65_530  # Linux's
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


def free_bytes(device: Device | None = None) -> int | None:
    """Bytes that can still be allocated on a device; None where that is unknown.

    For a CPU this is the machine's available memory, or what a container's limit leaves of it.

    Args:
      device: of this process; None for its first.
    """
    asked = jax.local_devices()[0] if device is None else device
    if asked.platform != "cpu":
        stats = asked.memory_stats() or {}
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


def data_bytes() -> int | None:
    """Bytes of this process that Linux's RLIMIT_DATA counts; None where that is unknown."""
    for line in _lines(STATUS):
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return None


def num_mappings() -> int:
    """Memory mappings of this process; 0 where the system does not say."""
    return len(_lines(MAPS))


def most_mappings() -> int:
    """Mappings that a process may have; Linux's default where the system does not say."""
    most = _lines(MOST_MAPS)
    return int(most[0]) if most and most[0].isdigit() else DEFAULT_MOST_MAPPINGS


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA or Python says that an array cannot be allocated."""
    # where a program runs by itself, XLA's CPU client says "INTERNAL: ... Out of memory"
    text = str(error)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory" in text
