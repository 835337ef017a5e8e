"""One line where a mapped file is cut while it is read.

Weights and corpora are memory-mapped. If another program cuts such a file, the operating system
ends the reader with SIGBUS at the first byte that is gone, and nothing says why.
"""

import ctypes
import os
import signal
import time

EXIT_CODE = 2  # as for other files that cannot be used
LINE = (
    b"peagle: files must stay whole while they are read; got a bus error: one became shorter, or a "
    b"disk or shared memory cannot be read; run again when they are complete\n"
)

# what is still to be said: several threads may read the same file
_unsaid = [LINE]

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


@_HANDLER
def _end(number: int) -> None:
    try:
        line = _unsaid.pop()
    except IndexError:
        time.sleep(60)  # another thread says it, and ends the process
    else:
        os.write(2, line)
    os._exit(EXIT_CODE)


def explain_bus_errors() -> None:
    """Ends this process with a line and exit code 2 at a SIGBUS, from now on.

    The handler is the C library's: one of `signal.signal` runs when the interrupted operation has
    ended, and this one never does. It is Python, and so a thread of XLA's that faults waits for
    Python's lock, which nobody keeps who waits for XLA.
    """
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, _HANDLER], ctypes.c_void_p
    set_handler(signal.SIGBUS, _end)
