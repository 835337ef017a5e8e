"""Strings that end an answer, found in the text of its tokens."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class StopString:
    """Where a string ends an answer.

    Attributes:
      num_tokens: the fewest tokens whose text has it.
      text: their text before it.
      string: the string.
    """

    num_tokens: int
    text: str
    string: str


def end_tokens(
    where: str, request: Request, usual: Sequence[int], tokenizer: Any
) -> dict[int, int | str | None]:
    """Tokens that end a request's answer, each with the `Generation.stop_reason` that it gives.

    They are its own, or the usual ones, and special ones that its stop strings spell. The text of
    an answer leaves those out, so that no string is found there.

    Raises:
      InputError: there are stop strings, and no tokenizer.
    """
    strings = request.stop_strings
    if strings and tokenizer is None:
        next_step = "give the engine the target's tokenizer, or use stop_ids"
        raise InputError(where, "stop strings need a tokenizer", strings[0], next_step)
    convert = getattr(tokenizer, "convert_tokens_to_ids", None)
    spelled = [] if convert is None else [(string, convert(string)) for string in strings]
    special = {
        token: string
        for string, token in spelled
        if isinstance(token, int)
        and tokenizer.decode([token], skip_special_tokens=False) == string
        and not tokenizer.decode([token], skip_special_tokens=True)
    }
    own = request.stop_ids
    named = dict.fromkeys(usual) if own is None else {int(token): int(token) for token in own}
    return {**special, **named} if own is not None else {**named, **special}


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def find_stop(
    tokenizer: Detokenizer,
    token_ids: Sequence[int],
    stop: Sequence[str],
    num_checked: int = 0,
    min_tokens: int = 0,
) -> StopString | None:
    """Where an answer ends because its text has one of the strings; None where there is none.

    Of several it is the first in the text, and of those that begin at one place the first of
    `stop`.

    Args:
      tokenizer: the target's.
      token_ids: the answer so far.
      stop: strings, each of at least one character.
      num_checked: tokens of which an earlier call knows that they have none of the strings.
      min_tokens: strings that end within the text of so many tokens end no answer.
    """

    def text_of(num_tokens: int) -> str:
        return tokenizer.decode(list(token_ids[:num_tokens]), skip_special_tokens=True)

    num_exempt = len(text_of(min_tokens)) if min_tokens else 0

    def first(text: str) -> tuple[int, str] | None:
        # a string must end behind the exempt text
        places = [(text.find(s, max(num_exempt - len(s) + 1, 0)), s) for s in stop]
        return min((p for p in places if p[0] >= 0), key=lambda p: p[0], default=None)

    def found_in(num_tokens: int) -> StopString | None:
        text = text_of(num_tokens)
        found = first(text)
        return None if found is None else StopString(num_tokens, text[: found[0]], found[1])

    whole = found_in(len(token_ids))
    if whole is None:
        return None
    shorter = range(max(num_checked, min_tokens) + 1, len(token_ids))
    return next(filter(None, map(found_in, shorter)), whole)
