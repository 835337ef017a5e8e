"""Checksums of a folder's files, beside them: Orbax reads flipped bytes without noticing."""

import json
import zlib
from pathlib import Path

from peagle_jax.atomic_write import write_atomically
from peagle_jax.types import InputError

FILE = "checksums.json"
BLOCK = 1 << 24  # bytes read at a time


def write_checksums(folder: Path) -> None:
    """Writes checksums.json: of every other file in the folder, its size and its CRC-32."""
    sums = {name: _checksum(folder / name) for name in _files(folder)}
    write_atomically(folder / FILE, json.dumps(sums, indent=1) + "\n")


def check_checksums(folder: Path, next_step: str) -> None:
    """Checks that the files are those that were written; a folder without checksums passes.

    Args:
      next_step: what to do about a damaged folder.

    Raises:
      InputError: a file is missing or has other bytes; or checksums.json is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return
    try:
        expected = json.loads(path.read_text(encoding="utf-8"))
        pairs = {str(name): (int(size), str(crc)) for name, (size, crc) in expected.items()}
    except OSError as error:
        raise InputError(path, "must be readable", error.strerror, next_step) from None
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(path, "must be a list of checksums", error, next_step) from None
    there = set(_files(folder))
    for name, (size, crc) in pairs.items():
        rule = f"{name} must have the checksum {crc} and {size:,} bytes"
        if name not in there:
            raise InputError(folder, rule, "nothing", next_step)
        got_size, got_crc = _checksum(folder / name)
        if (got_size, got_crc) != (size, crc):
            raise InputError(folder, rule, f"{got_crc} and {got_size:,}", next_step)


def _files(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    return [name for name in names if name not in (FILE, f".{FILE}.tmp")]


def _checksum(path: Path) -> tuple[int, str]:
    """A file's size in bytes, and its CRC-32 as hexadecimal digits."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, f"{crc:08x}"
