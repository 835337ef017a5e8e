"""The output file of `peagle regenerate`: rows are appended, by one process at a time.

Beside it lies what it was begun with, so that rows of another target or seed are never added.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from peagle_jax import corpus
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


def lines_there(out: Path, begins: str, about: dict[str, Any]) -> list[str]:
    """The lines that are already in the output file, which is of this run from now on.

    A line that a killed process has left incomplete is dropped. Nothing else ever is.

    Args:
      out: the output file.
      begins: how its lines begin.
      about: what they depend on.

    Raises:
      InputError: the file contains something else, or depends on something else.
    """
    *lines, unfinished = corpus.read_text(out).split("\n")
    is_ours = unfinished.startswith(begins[: len(unfinished)]) and all(
        line.startswith(begins) and _is_row(line, NEEDED[begins]) for line in lines
    )
    if not is_ours:
        rule = "answers are appended to a file of answers of this kind"
        next_step = "choose another file with --out"
        raise InputError(out, rule, "a file of something else", next_step)
    path = out.with_name(out.name + corpus.ABOUT)
    if lines and path.exists():
        former = {"dtype": "float32"} | _read_about(path)  # the only one there was at first
        for key, value in about.items():
            if former.get(key) != value:
                rule = f"{key} was {former.get(key)} when {out.name} was begun, and must stay so"
                next_step = "repeat what it was begun with, or choose another file with --out"
                raise InputError(path, rule, value, next_step)
    else:
        write_atomically(path, json.dumps(about, indent=1) + "\n")
    if unfinished:  # in its place, because the lock is the file's
        os.truncate(out, out.stat().st_size - len(unfinished.encode()))
    return lines


def begun_with(out: Path) -> dict[str, Any]:
    """What an output file was begun with; nothing where it has no rows yet."""
    path = out.with_name(out.name + corpus.ABOUT)
    has_rows = out.is_file() and out.stat().st_size > 0
    return _read_about(path) if has_rows and path.exists() else {}


def _read_about(path: Path) -> dict[str, Any]:
    content = corpus.read_text(path)
    try:
        former = json.loads(content)
    except (ValueError, RecursionError) as error:
        next_step = "choose another file with --out"
        raise InputError(path, "must be JSON", error, next_step) from None
    return former if isinstance(former, dict) else {}


def _is_row(line: str, needed: Mapping[str, type]) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        return isinstance(row, dict) and all(type(row.get(k)) is kind for k, kind in needed.items())
    return False
