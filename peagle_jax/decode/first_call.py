"""What happens when a program is called for the first time, and so is compiled.

One thread compiles it while the others that need a new one wait: JAX compiles a program twice where
two threads call it for the first time together, and each takes longer than one alone.

And there is room for it. XLA compiles every kernel of a program for a CPU as an object of its own,
which is three regions of mapped memory, and JAX keeps a program for as long as the process runs. A
decoding program has a hundred kernels, Linux lets a process map 65,530 regions, and beyond that XLA
crashes. A server meets a few hundred programs in some hours of requests of many lengths and kinds.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator
from pathlib import Path

import jax

# The part of the regions that Linux allows which may be mapped before a program is compiled. The
# rest is for that program, which has some hundreds, and for what others compile meanwhile.
MAPPED_PART = 0.7
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
DEFAULT_MOST = 65_530

_called: set[Hashable] = set()
_mapped_by_others = 0  # regions that were left when programs were let go of last
_compiling = threading.RLock()


@contextlib.contextmanager
def first_call(*program: Hashable) -> Iterator[bool]:
    """Around every call of a program. Yields whether it may be compiled now.

    Args:
      program: what it is compiled for, as a jitted function tells programs apart. A program that is
        compiled anew under the name of another costs time and nothing else.
    """
    if program in _called:
        yield False
        return
    with _compiling:
        _make_room()
        yield True
        _called.add(program)


def _make_room() -> None:
    """Lets go of all compiled programs if few regions are left; one that runs stays until its end.

    Those that are needed again are compiled again, or read from JAX's persistent cache.
    """
    global _mapped_by_others
    num_mapped, most = _num_mapped(), _most_mapped()
    if num_mapped > _mapped_by_others + MAPPED_PART * (most - _mapped_by_others):
        _called.clear()
        jax.clear_caches()
        _mapped_by_others = _num_mapped()  # where these are many, room is not made at every call


def _num_mapped() -> int:
    """Regions of memory that this process maps; 0 where Linux does not say."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def _most_mapped() -> int:
    """Regions that a process may map; the kernel's default where it does not say."""
    return int(MOST_MAPS.read_text()) if MOST_MAPS.exists() else DEFAULT_MOST
