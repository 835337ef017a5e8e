"""Lets one thread compile a program while the others that need a new one wait.

JAX compiles a program twice where two threads call it for the first time together, and each takes
longer than one alone.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator

_called: set[Hashable] = set()
_compiling = threading.RLock()


@contextlib.contextmanager
def first_call(*program: Hashable) -> Iterator[None]:
    """Around every call of a program.

    Args:
      program: what it is compiled for, as a jitted function tells programs apart. A program that is
        compiled anew under the name of another costs time and nothing else.
    """
    if program in _called:
        yield
        return
    with _compiling:
        yield
    _called.add(program)
