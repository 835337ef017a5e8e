"""Memory that glibc keeps for the next training step, instead of asking the system for it again.

XLA allocates what a step needs anew in every step, in pieces of many megabytes on a CPU. glibc
gives pieces that large back to the system, which hands out zeroed pages: in the demo's recipe
27,570 page faults a step, 46 of 253 ms of processor time (LOG.md, 2026-11-26).
"""

import ctypes
import os
import sys

# of malloc.h
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
USERS_OWN = ("GLIBC_TUNABLES", "MALLOC_")  # beginnings of environment variables


def environment() -> dict[str, str]:
    """Variables that make a process keep freed memory; none where the environment has its own."""
    if _is_users_own():
        return {}
    return {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}


def keep_freed_memory() -> bool:
    """Lets freed memory stay with this process; whether it will.

    To be called before threads begin: each would have an arena of its own, which gives memory back.
    Where the C library is not glibc, or the environment says how it allocates, nothing is changed.
    """
    if _is_users_own() or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    # one arena; no piece by `mmap`, which is always given back; and no memory back from the arena
    return all([mallopt(ARENA_MAX, 1), mallopt(MMAP_MAX, 0), mallopt(TRIM_THRESHOLD, -1)])


def _is_users_own() -> bool:
    """Whether the environment says how glibc allocates."""
    return any(name.startswith(USERS_OWN) for name in os.environ)
