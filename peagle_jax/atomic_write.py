"""Small files that appear whole or not at all, whenever the process is killed."""

import contextlib
import errno
import os
from pathlib import Path

from peagle_jax.file_lock import wait_for_lock

# what `errno` says where there is no room
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST_NAME = 200  # characters of a file's name that its temporary one has, too


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes text as UTF-8, or bytes, under a temporary name beside `path`, then renames it.

    Two processes that do so at the same time write one after the other, by a lock; where there are
    none, under names of their own. What a killed one has left is written over by the next; an error
    leaves nothing.

    Args:
      path: the file; one that is there is replaced.
      content: all of it.

    Raises:
      UnicodeEncodeError: the text has half of a surrogate pair.
      OSError: the folder cannot be written to; the caller knows what to tell the user.
    """
    raw = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:LONGEST_NAME]}.tmp")
    has_own_name = False
    while True:
        handle = _open(temporary)
        try:
            if not has_own_name and not _is_locked(handle, temporary):
                temporary = path.with_name(f".{path.name[:LONGEST_NAME]}.{os.getpid()}.tmp")
                has_own_name = True
                continue
            if not _is_at(handle, temporary):
                continue  # who had the lock before has renamed it
            try:
                os.ftruncate(handle, 0)
                done = 0
                while done < len(raw):
                    done += os.write(handle, raw[done:])
                temporary.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            return
        finally:
            os.close(handle)


def append_line(path: Path, line: str) -> None:
    """Adds a line to a file, and begins it on a new one also where a crash tore the last one.

    Args:
      path: a file; it is made where it is missing.
      line: without its end.

    Raises:
      OSError: it cannot be written. What was written of the line is taken back.
    """
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        content = f"{line}\n".encode()
        if end:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                content = b"\n" + content
        done = 0
        try:
            while done < len(content):
                done += file.write(content[done:])
        except OSError:
            with contextlib.suppress(OSError):
                if file.seek(0, os.SEEK_END) == end + done:  # nobody has written behind it
                    file.truncate(end)
            raise


def _open(temporary: Path) -> int:
    """Opens a file to be written; one that is a link is removed, and not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            return os.open(temporary, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP or not temporary.is_symlink():
                raise
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _is_locked(handle: int, temporary: Path) -> bool:
    """Whether the lock was taken; where there are none, nobody writes under this name."""
    try:
        return wait_for_lock(handle)
    except OSError:
        temporary.unlink(missing_ok=True)
        return False


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False
