"""What happens when a program is called for the first time, and so is compiled.

One thread compiles it while the others that need a new one on the same device wait: JAX compiles a
program twice where two threads call it for the first time together, and each takes longer than one
alone.

And there is room for it. XLA compiles every kernel of a program for a CPU as an object of its own,
which is three memory mappings, and JAX keeps a program for as long as the process runs. A decoding
program has a hundred kernels, Linux lets a process have 65,530 mappings, and beyond that XLA
crashes. A server meets a few hundred programs in some hours of requests of many lengths and kinds.
"""

import collections
import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import Any, cast

import jax

from peagle_jax.free_memory import most_mappings, num_mappings

# The part of the mappings that Linux allows which may be in use before a program is compiled. The
# rest is for that program, which has some hundreds, and for what others compile meanwhile.
USED_PART = 0.7

_called: set[Hashable] = set()
# by default device: each has programs of its own
_compiling: collections.defaultdict[Any, threading.RLock] = collections.defaultdict(threading.RLock)
_mappings_of_others = 0  # mappings that were left after the last of them


@contextlib.contextmanager
def first_call(*program: Hashable) -> Iterator[None]:
    """Around every call of a program.

    Args:
      program: what it is compiled for, as a jitted function tells programs apart. One that is
        compiled anew under the name of another costs time, and no room is made for it.
    """
    device = cast(Any, jax.config).jax_default_device
    program = (*program, device)
    if program in _called:
        yield
        return
    with _compiling[device]:
        _make_room()
        yield
        _called.add(program)


def was_called(*program: Hashable) -> bool:
    """Whether a program was called, and so compiled, and not let go of since."""
    return (*program, cast(Any, jax.config).jax_default_device) in _called


def let_go() -> None:
    """Lets go of all compiled programs of this process; one that runs stays until its end.

    Those that are needed again are compiled again, or read from JAX's persistent cache.
    """
    _called.clear()
    jax.clear_caches()


def _make_room() -> None:
    """Lets go of programs if few mappings are left."""
    global _mappings_of_others
    if num_mappings() > _mappings_of_others + USED_PART * (most_mappings() - _mappings_of_others):
        let_go()
        _mappings_of_others = num_mappings()  # where these are many, room is not made at each call
