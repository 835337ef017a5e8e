"""The folder that `peagle extract` fills: whose it is, whether it fits the disk, who may write."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle_jax.file_lock import try_lock
from peagle_jax.train.hidden_state_store import INDEX, HiddenStateIndex, read_index, write_index
from peagle_jax.types import InputError


def _existing_parent(out: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(path for path in [out, *out.absolute().parents] if path.exists())


def read_old_index(out: Path) -> HiddenStateIndex | None:
    """The index of a folder that was begun; None for a new one.

    Raises:
      InputError: the folder contains something else, or cannot be written.
    """
    if (out / INDEX).exists():
        return read_index(out)
    parent = _existing_parent(out)
    if not parent.is_dir() or not os.access(parent, os.R_OK | os.W_OK | os.X_OK):
        rule, got = "the output folder must be writable", f"{parent}, which is not"
        raise InputError(out, rule, got, "choose another place with --out")
    if parent == out:
        other_files = sorted(p.name for p in out.iterdir() if p.name != f".{INDEX}.tmp")
        if other_files:
            rule = f"must be a new folder, or one that `peagle extract` began: with {INDEX}"
            got = f"{other_files[0]} without it"
            raise InputError(out, rule, got, "choose another folder with --out")
    return None


def check_unchanged(
    out: Path, old_index: HiddenStateIndex | None, values: Mapping[str, Any]
) -> None:
    """Raises InputError if the folder was begun with another value of one of these keys."""
    if old_index is None:
        return
    for key, value in values.items():
        old = getattr(old_index, key)
        if old != value:
            old, new = (list(v) if isinstance(v, tuple) else v for v in (old, value))
            rule = f"{key} was {old} when this folder was begun, and must stay so"
            next_step = "repeat the options and the data it was begun with, or choose another --out"
            raise InputError(out / INDEX, rule, new, next_step)


def check_disk(
    out: Path, index: HiddenStateIndex, missing: Sequence[int], say: Callable[[str], None]
) -> None:
    """Raises InputError if the missing shards do not fit on the disk."""
    size = sum(index.bytes_of(shard) for shard in missing)
    free = shutil.disk_usage(_existing_parent(out)).free
    say(
        f"{out}: {size:,} bytes to write, in {len(missing)} of {index.shards} shards; "
        f"{free:,} bytes are free"
    )
    if free < size:
        rule = f"{size:,} bytes must be free to write the hidden states"
        next_step = (
            "make room, choose another disk with --out, or write less (--max-chars, "
            "--aux-hidden-state-layers, --dtype)"
        )
        raise InputError(out, rule, f"{free:,} bytes", next_step)


@contextlib.contextmanager
def locked_folder(out: Path, index: HiddenStateIndex) -> Iterator[None]:
    """The folder with its index, and no other process that writes there.

    Two processes would use the same temporary names, and one would rename the other's half shard.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        rule, next_step = "the output folder must be writable", "choose another place with --out"
        raise InputError(out, rule, error.strerror, next_step) from None
    try:
        _lock(handle, out)
        if not (out / INDEX).exists():
            write_index(out, index)
        yield
    except OSError as error:
        rule = "the hidden states must be written to the end"
        next_step = "make room, then run this again: complete shards are kept"
        raise InputError(out, rule, error.strerror or error, next_step) from None
    finally:
        os.close(handle)  # this also releases the lock, as does the end of the process


def _lock(handle: int, out: Path) -> None:
    if not try_lock(handle):
        rule, got = "one process fills a folder at a time", "another one at it"
        raise InputError(out, rule, got, "wait for it, or choose another --out")
