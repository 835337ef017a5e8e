"""Text files, JSONL, and JSON files that are one list: read with one line for what is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

from peagle_jax.documents import BadRows
from peagle_jax.types import InputError

HEAD_BYTES = 1 << 16  # that tell what a file is; a list is read in pieces of so many
MAX_ROW = 1 << 28  # characters of a row in a list


def read_text(path: Path) -> str:
    """Reads a UTF-8 file.

    Raises:
      InputError: it is missing, a folder, not readable, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]:#04x} at {error.start}"
        next_step = "convert the file to UTF-8, or remove it"
        raise InputError(path, "must be UTF-8 text", got, next_step) from None


def unreadable(path: Path, error: OSError) -> InputError:
    """What is wrong with a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return InputError(path, "this file must exist", "nothing", "check the name")
    if isinstance(error, IsADirectoryError):
        return InputError(path, "must be a file", "a folder", "name a file in it")
    next_step = "name a file that you may read"
    return InputError(path, "this file must be readable", error.strerror, next_step)


def read_jsonl(path: Path, bad_rows: BadRows | None = None) -> Iterator[tuple[int, dict]]:
    """The line number, from 1, and the object of each line that is not blank.

    Args:
      path: the file.
      bad_rows: takes lines that are no JSON objects; None: the first is an error.

    Raises:
      InputError: the file cannot be read, or a line is not a JSON object.
    """
    bad_rows = bad_rows or BadRows()
    rule, next_step = "each line must be a JSON object", "correct or remove the line"
    for number, line in _lines(path):
        where = f"{path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            got = f"byte {line[error.start]:#04x} at {error.start} of the line"
            bad_rows.take(InputError(where, "must be UTF-8 text", got, next_step))
            continue
        except (ValueError, RecursionError) as error:
            bad_rows.take(InputError(where, rule, error, next_step))
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            bad_rows.take(InputError(where, rule, type(row).__name__, next_step))


def json_rows(path: Path, bad_rows: BadRows) -> Iterator[tuple[int, dict]]:
    """The number, from 1, and the object of each item of a JSON file that is one list.

    It is read in pieces: of the whole, no more than the longest row is in memory.

    Raises:
      InputError: the file cannot be read, or is no list of objects.
    """
    rule, next_step = "must be a list of JSON objects", "write it as JSONL: one object a line"
    decoder, number = json.JSONDecoder(), 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            rest = file.read(HEAD_BYTES).lstrip().removeprefix("[")
            while not (rest := rest.lstrip(", \n\r\t")).startswith("]"):
                try:
                    row, end = decoder.raw_decode(rest)
                except ValueError as error:
                    more = file.read(max(HEAD_BYTES, len(rest)))
                    if not more or len(rest) > MAX_ROW:
                        where = f"{path}, item {number + 1}"
                        raise InputError(where, rule, error, next_step) from None
                    rest += more
                    continue
                rest, number = rest[end:], number + 1
                if isinstance(row, dict):
                    yield number, row
                else:
                    got = type(row).__name__
                    bad_rows.take(InputError(f"{path}, item {number}", rule, got, next_step))
            if (rest[1:] + file.read(HEAD_BYTES)).strip():
                raise InputError(path, rule, "more after its end", next_step)
    except RecursionError as error:
        raise InputError(path, rule, error, next_step) from None
    except UnicodeDecodeError as error:
        got, step = f"byte {error.object[error.start]:#04x}", "convert the file to UTF-8"
        raise InputError(path, "must be UTF-8 text", got, step) from None
    except OSError as error:
        raise unreadable(path, error) from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The number, from 1, and the bytes of each line that is not blank, one after another."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise unreadable(path, error) from None
