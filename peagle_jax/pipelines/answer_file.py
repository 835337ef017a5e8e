"""The output file of `peagle regenerate`: rows are appended, by one process at a time.

Beside it lies what it was begun with, so that rows of another target or seed are never added.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from peagle_jax import corpus, json_files
from peagle_jax.atomic_write import write_atomically
from peagle_jax.file_lock import open_locked
from peagle_jax.types import InputError

# as every line of an output file begins
ANSWER_BEGINS = '{"prompt_token_ids": ['
CONVERSATION_BEGINS = '{"sample": '
# What a resumed file's lines must have, by how they begin.
NEEDED = {
    ANSWER_BEGINS: {"prompt_token_ids": list, "output_token_ids": list},
    CONVERSATION_BEGINS: {"sample": int, "num_tokens": int},
}


@contextlib.contextmanager
def appendable(out: Path) -> Iterator[None]:
    """Makes the output file where it is not there, and takes it away if an error leaves it empty.

    New folders go with it. A lock keeps out other processes, whose rows would stand between these.

    Raises:
      InputError: it cannot be written, or another process writes it.
    """
    there_before = out.stat().st_ino if out.exists() else None
    new_parents = [parent for parent in out.parents if not parent.exists()]
    try:
        file = open_locked(out)
    except OSError as error:
        rule, next_step = "the output file must be writable", "choose another place with --out"
        raise InputError(out, rule, error.strerror, next_step) from None
    if file is None:
        rule, got = "one process writes a file at a time", "another one at it"
        raise InputError(out, rule, got, "wait for it, or choose another --out")
    about = out.with_name(out.name + corpus.ABOUT)
    with file:
        # another process may have made or removed the file before this one got its lock
        is_new = os.fstat(file.fileno()).st_ino != there_before and not about.exists()
        try:
            yield
        except BaseException:
            # only who has the lock takes the file away: an empty one may be somebody else's
            if is_new and out.exists() and out.stat().st_size == 0:
                out.unlink()
                about.unlink(missing_ok=True)
                for parent in new_parents:
                    with contextlib.suppress(OSError):  # somebody else uses it
                        parent.rmdir()
            raise


def continue_file(
    out: Path, begins: str, about: dict[str, Any], visit: Callable[[dict[str, Any]], None]
) -> int:
    """Makes an output file one of this run, and counts the rows that are in it already.

    A line that a killed process has left incomplete is dropped. Nothing else ever is. One row is in
    memory at a time.

    Args:
      out: the output file.
      begins: how its lines begin.
      about: what they depend on.
      visit: is given every row, in order.

    Raises:
      InputError: the file contains something else, or depends on something else.
    """
    path = out.with_name(out.name + corpus.ABOUT)
    num_rows = num_bytes = 0
    with _opened(out) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            row = _row_of(line, begins)
            if row is None:
                raise _of_something_else(out)
            if not num_rows and path.exists():
                _check_begun_so(out, path, about)
            visit(row)
            num_rows += 1
            num_bytes += len(line)
        else:
            line = b""
    if not line.startswith(begins.encode()[: len(line)]):
        raise _of_something_else(out)
    if not num_rows or not path.exists():
        write_atomically(path, json.dumps(about, indent=1) + "\n")
    if line:  # in its place, because the lock is the file's
        os.truncate(out, num_bytes)
    return num_rows


def _check_begun_so(out: Path, path: Path, about: dict[str, Any]) -> None:
    """Raises InputError where the rows of a file depend on something else."""
    former = {"dtype": "float32"} | _read_about(path)  # the only one there was at first
    for key, value in about.items():
        if former.get(key) != value:
            rule = f"{key} was {former.get(key)} when {out.name} was begun, and must stay so"
            next_step = "repeat what it was begun with, or choose another file with --out"
            raise InputError(path, rule, value, next_step)


def _opened(out: Path) -> BinaryIO:
    try:
        return out.open("rb")
    except OSError as error:
        next_step = "name a file that you may read, with --out"
        raise InputError(out, "must be readable", error.strerror, next_step) from None


def _of_something_else(out: Path) -> InputError:
    rule = "answers are appended to a file of answers of this kind"
    return InputError(out, rule, "a file of something else", "choose another file with --out")


def begun_with(out: Path) -> dict[str, Any]:
    """What an output file was begun with; nothing where it has no rows yet."""
    path = out.with_name(out.name + corpus.ABOUT)
    has_rows = out.is_file() and out.stat().st_size > 0
    return _read_about(path) if has_rows and path.exists() else {}


def _read_about(path: Path) -> dict[str, Any]:
    content = json_files.read_text(path)
    try:
        former = json.loads(content)
    except (ValueError, RecursionError) as error:
        next_step = "choose another file with --out"
        raise InputError(path, "must be JSON", error, next_step) from None
    return former if isinstance(former, dict) else {}


def _row_of(line: bytes, begins: str) -> dict[str, Any] | None:
    """The row of a line that begins so and has what is needed; None for any other line."""
    if not line.startswith(begins.encode()):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    has_all = all(type(row.get(key)) is kind for key, kind in NEEDED[begins].items())
    return row if has_all else None
