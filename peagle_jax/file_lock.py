"""A lock on a file or folder, which the operating system ends with its process."""

import fcntl
from typing import IO


def try_lock(file: int | IO[str]) -> bool:
    """Takes the lock, which lasts until the file is closed; False where another process has it.

    A file system without locks gives it to everybody.

    Args:
      file: open, or the descriptor of an open file or folder.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
