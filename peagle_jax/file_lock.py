"""A lock on a file or folder, which the operating system ends with its process."""

import fcntl
import os
import weakref
from pathlib import Path
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


def lock_while_alive(owner: object, path: Path) -> bool:
    """Takes the lock for as long as `owner` lives; False where another process, or owner, has it.

    Args:
      path: a file or folder that exists.

    Raises:
      OSError: it cannot be opened.
    """
    # over NFS a file must be open for writing, and a folder cannot be
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    if not try_lock(handle):
        os.close(handle)
        return False
    weakref.finalize(owner, os.close, handle)
    return True
