"""Values of options that are more than one word to argparse: lists, sizes, files to write."""

import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle_jax.atomic_write import write_atomically
from peagle_jax.types import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Reads whole numbers with commas between them.

    Args:
      option: its spelling, for the error.
      text: what was typed, for example "1,3,5".
      least: the smallest number that makes sense.

    Raises:
      InputError: a part is no number, or below `least`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        rule = f"must be numbers of {least} or more, separated by commas"
        raise InputError(option, rule, text or "nothing", f"give {option} 1,3,5")
    return numbers


def parse_rates(option: str, texts: Sequence[str]) -> list[float]:
    """Reads requests per second; inf is as many as there are places for.

    Raises:
      InputError: one is no number above 0.
    """
    rates = []
    for text in texts:
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not rate > 0:
            rule = "must be requests per second, above 0, or inf"
            raise InputError(option, rule, text, f"give {option} 2, or {option} inf")
        rates.append(rate)
    return rates


def parse_bytes(option: str, text: str) -> int:
    """Reads a number of bytes such as 5GB or 12.5 MiB.

    Args:
      option: its spelling, for the error.
      text: what was typed.

    Raises:
      InputError: there is no number, no unit, or less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", text, re.IGNORECASE)
    size = int(float(match[1]) * SIZE_UNITS[match[2].upper()]) if match else 0
    if size < 1:
        rule = f"must be a number and one of {', '.join(SIZE_UNITS)}"
        raise InputError(option, rule, text, f"give {option} 5GB")
    return size


def check_at_least(option: str, value: int | float, least: int) -> None:
    """Refuses a number that is too small.

    Raises:
      InputError: `value` is below `least`.
    """
    if value < least:
        raise InputError(
            option, f"must be {least} or more", value, f"give {option} {least} or more"
        )


def check_groups(data_parallel_size: int, batch_size: int, larger: str = "--batch-size") -> None:
    """Raises InputError where a group of devices would have nothing to decode.

    Args:
      larger: what makes the batch larger.
    """
    if data_parallel_size > batch_size:
        rule = f"must be at most the number decoded together, {batch_size}"
        next_step = f"give less, or a larger batch by {larger}"
        raise InputError("--data-parallel-size", rule, data_parallel_size, next_step)


def parse_part(option: str, words: str) -> tuple[int, int]:
    """Reads "2/3", the second of three parts, as (1, 3).

    Raises:
      InputError: it is nothing of that form.
    """
    place, slash, number = words.partition("/")
    if slash and place.isdecimal() and number.isdecimal() and 1 <= int(place) <= int(number):
        return int(place) - 1, int(number)
    rule = "must be a part of all, as 1/4 to 4/4"
    raise InputError(option, rule, words, f"give {option} 1/1 for everything")


def check_share(option: str, value: int | float) -> None:
    """Refuses a share of the documents that leaves none to use.

    Raises:
      InputError: `value` is negative, or 1 and more.
    """
    if not 0 <= value < 1:
        rule = "must lie in 0..1, and below 1"
        raise InputError(option, rule, value, f"give {option} 0.05, or 0 to use every document")


def parse_template_kwargs(
    words: str | None, tokenizer: "PreTrainedTokenizerBase | None"
) -> dict[str, Any] | None:
    """Reads `--chat-template-kwargs`.

    Args:
      words: what was typed; None where it was left out.
      tokenizer: of the target, whose template must read these options; None: they go to a server.

    Raises:
      InputError: they are no JSON object, or the template does not read one of them.
    """
    if words is None:
        return None
    option, rule = "--chat-template-kwargs", "must be a JSON object"
    next_step = "write it as '{\"enable_thinking\": false}'"
    try:
        options = json.loads(words)
    except (ValueError, RecursionError):
        raise InputError(option, rule, words, next_step) from None
    if not isinstance(options, dict):
        raise InputError(option, rule, words, next_step)
    if tokenizer is not None:
        from peagle_jax.chat.apply_template import check_template_kwargs

        check_template_kwargs(tokenizer, options, option)
    return options


def check_writable(path: Path) -> None:
    """Refuses a place for an output file before hours of work, and not after them.

    Raises:
      InputError: `path` is a folder, or lies in none that can be written to.
    """
    try:
        path.exists()
    except OSError as error:  # a name too long, or a folder above that may not be searched
        rule, next_step = "the output file must be writable", "choose a shorter name, or elsewhere"
        raise InputError(path, rule, error.strerror, next_step) from None
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        got = "a folder" if path.is_dir() else f"{path.parent}, which cannot be written to"
        raise InputError(
            path, "the output file must be writable", got, "name a file in another folder"
        )


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Writes one line of JSON for each row; the file appears whole or not at all.

    Raises:
      InputError: the file cannot be written.
    """
    try:
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        rule = "the output file must be writable"
        raise InputError(path, rule, error.strerror, "name a file in another folder") from None


def command_line(argv: Sequence[str]) -> str:
    """What was typed, for the metadata of a checkpoint.

    Of a local path only its last part is kept: a checkpoint that is published need not tell where
    somebody's files lie.
    """
    words = []
    for word in argv:
        option, equals, value = word.rpartition("=")
        if value.startswith(("/", "~", ".")):
            value = Path(value).name
        words.append(option + equals + value)
    return shlex.join(["peagle", *words])
