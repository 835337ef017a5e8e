"""Finds strings that end an answer in the text of its tokens."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from peagle_jax.decode.requests import Request
from peagle_jax.types import InputError


@runtime_checkable
class Detokenizer(Protocol):
    """What turns tokens into text: a tokenizer of transformers, or anything with its `decode`."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """The text of the tokens."""
        ...


class UndecodableError(Exception):
    """A tokenizer cannot decode its own tokens."""


def spell(
    tokenizer: Detokenizer,
    token_ids: Sequence[int],
    stop: Sequence[str],
    num_checked: int,
    is_done: bool,
) -> tuple[int | None, str | None]:
    """Where a string ends an answer, and the answer's text.

    Args:
      is_done: whether the answer ends here in any case, so that its text is wanted.

    Returns:
      The tokens up to the first string, or None without one; and the text, None of one that goes
      on. See `find_stop`.

    Raises:
      UndecodableError: the tokenizer raises, or panics.
    """
    try:
        found = find_stop(tokenizer, token_ids, stop, num_checked) if stop else None
        if found is not None:
            return found
        if is_done:
            return None, tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return None, None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library tokenizers is no Exception
        raise UndecodableError(f"the tokenizer cannot decode: {first_line(error)}") from error


def end_tokens(
    where: str, request: Request, usual: Sequence[int], tokenizer: Any
) -> tuple[int, ...]:
    """Tokens that end a request's answer: its own, or the usual ones, and special ones that its
    stop strings spell. The text of an answer leaves those out, so that no string is found there.

    Raises:
      InputError: there are stop strings, and no tokenizer.
    """
    strings = request.stop_strings
    if strings and tokenizer is None:
        next_step = "give the engine the target's tokenizer, or use stop_ids"
        raise InputError(where, "stop strings need a tokenizer", strings[0], next_step)
    convert = getattr(tokenizer, "convert_tokens_to_ids", None)
    spelled = [] if convert is None else [(string, convert(string)) for string in strings]
    special = [
        token
        for string, token in spelled
        if isinstance(token, int)
        and tokenizer.decode([token], skip_special_tokens=False) == string
        and not tokenizer.decode([token], skip_special_tokens=True)
    ]
    return (*(usual if request.stop_ids is None else request.stop_ids), *special)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def find_stop(
    tokenizer: Detokenizer,
    token_ids: Sequence[int],
    stop: Sequence[str],
    num_checked: int = 0,
) -> tuple[int, str] | None:
    """Where an answer ends because its text has one of the strings.

    Args:
      tokenizer: the target's.
      token_ids: the answer so far.
      stop: strings, each of at least one character.
      num_checked: tokens of which an earlier call knows that they have none of the strings.

    Returns:
      The fewest tokens whose text has one of the strings, and their text before the first of them;
      None where there is none.
    """

    def text_of(num_tokens: int) -> str:
        return tokenizer.decode(list(token_ids[:num_tokens]), skip_special_tokens=True)

    def position(text: str) -> int:
        return min((text.find(s) for s in stop if s in text), default=-1)

    if position(text_of(len(token_ids))) < 0:
        return None
    for num_tokens in range(num_checked + 1, len(token_ids) + 1):
        text = text_of(num_tokens)
        if (at := position(text)) >= 0:
            return num_tokens, text[:at]
    raise AssertionError("the whole text has a stop string, and so has its last part")
