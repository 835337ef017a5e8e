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


def open_locked(path: Path) -> IO[str] | None:
    """Opens a file for appending and takes its lock; None where another process has it.

    Args:
      path: a file, made if it does not exist.

    Raises:
      OSError: it cannot be opened.
    """
    while True:
        file = path.open("a", encoding="utf-8")
        if not try_lock(file):
            file.close()
            return None
        # the process that had the lock before may have removed the file that was opened here
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


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
