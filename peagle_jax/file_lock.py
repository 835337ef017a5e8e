"""A lock on a file or folder, which the operating system ends with its process."""

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

OPENING_TRIES = 20  # of a file that others remove


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


def wait_for_lock(handle: int, seconds: float = 10.0) -> bool:
    """Takes the lock of an open file as soon as no other process has it.

    Returns:
      False where a process keeps it for longer.

    Raises:
      OSError: the file system has no locks.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.005)


def open_locked(path: Path) -> IO[str] | None:
    """Opens a file for appending and takes its lock; None where another process has it.

    Args:
      path: a file, made with its folder if it does not exist.

    Raises:
      OSError: it cannot be opened.
    """
    for tries_left in reversed(range(OPENING_TRIES)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a", encoding="utf-8")
        except FileNotFoundError:  # the folder went since, or there can be no such file
            if not tries_left:
                raise
            continue
        if not try_lock(file):
            file.close()
            return None
        # who had the lock before may have removed the file that was opened here
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()
    return None


@contextlib.contextmanager
def lock_briefly(folder: Path, seconds: float = 2.0) -> Iterator[None]:
    """Holds the lock of a folder, for which others wait so many seconds at most.

    After that it goes on without: something else may hold the lock for long.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + seconds
        while not try_lock(handle) and time.monotonic() < until:
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


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
