"""A folder for temporary files of any size, which a killed process does not leave for good."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from peagle_jax.file_lock import lock_briefly, try_lock, wait_for_lock

# Not that of versions before, whose folders had no lock: they may be in use.
PREFIX = "peagle-temporary-"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in that for temporary files, removed in the end.

    It is locked for as long as this process lives. What processes that were killed have left there
    is removed first: folders of this user's that nobody locks. On a file system without locks it
    stays.

    Raises:
      OSError: the folder cannot be made.
    """
    parent = Path(tempfile.gettempdir())
    # held also between a folder's making and its lock, so that no other process takes it for left
    with lock_briefly(parent):
        for left in parent.glob(f"{PREFIX}*"):
            _remove_if_left(left)
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
        handle = os.open(folder.name, os.O_RDONLY)
        try_lock(handle)
    try:
        with folder:
            yield Path(folder.name)
    finally:
        os.close(handle)


def _remove_if_left(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's, a link, or no folder
        return
    try:
        if os.fstat(handle).st_uid == os.getuid() and wait_for_lock(handle, seconds=0.0):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # no locks here, by which to tell what is in use
        pass
    finally:
        os.close(handle)
