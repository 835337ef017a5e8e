"""A document of a corpus: a text, a conversation, a prompt, or an answer in tokens."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from peagle_jax.types import InputError

# transformers knows three names of the reasoning that comes before an answer
REASONING = ("reasoning_content", "reasoning", "thinking")
# What can be done with rows that cannot be used.
BAD_ROWS = ("refuse", "skip")
NUM_NAMED = 5  # bad rows that are named; of the others only the number is told


class BadRows:
    """What becomes of rows that cannot be used: the first ends the work, or all are counted.

    Args:
      choice: one of BAD_ROWS.
    """

    def __init__(self, choice: str = "refuse") -> None:
        self._skip = choice == "skip"
        self.errors: list[InputError] = []
        self.count = 0

    def take(self, error: InputError) -> None:
        """Takes in a row that cannot be used.

        Raises:
          InputError: the first, if rows are not to be skipped.
        """
        if not self._skip:
            raise error
        self.count += 1
        if len(self.errors) < NUM_NAMED:
            self.errors.append(error)

    def report(self, say: Callable[[str], None]) -> None:
        """Tells how many rows were skipped, and why the first ones."""
        for error in self.errors:
            say(f"skipped: {error}")
        if self.count > len(self.errors):
            say(f"skipped: {self.count - len(self.errors):,} rows more")


@dataclasses.dataclass(frozen=True)
class Document:
    """One text, one conversation, one prompt with or without an answer, or an answer in tokens.

    Attributes:
      name: what errors call it; decides whether the document is held out, if it has no source.
      text: of a text; otherwise None.
      messages: of a conversation, with `role` and `content`.
      prompt_ids: of an answer: the prompt's token ids.
      output_ids: of an answer: what a target wrote, as in the files of `peagle regenerate` and
        `peagle generate --out`.
      tools: of a conversation: the functions that the assistant may call.
      chat_template_kwargs: of a conversation or a prompt: options of the target's chat template.
      prompt: of a prompt; otherwise None.
      completion: how the prompt goes on, if that is known.
      special_tokens: whether special tokens that a text or a prompt spells are these tokens, as in
        conversations that were rendered already; else they are plain text.
      only_last: whether of a conversation's answers only the last, which ends it, is trained.
      source: the document that it was made of, by `peagle regenerate` for example: all of one
        source are held out together. None: the document itself.
    """

    name: str
    text: str | None
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | None = None
    completion: str | None = None
    source: str | None = None
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    special_tokens: bool = False
    only_last: bool = False

    @property
    def from_name(self) -> str:
        """The document that it was made of, or its own name."""
        return self.source or self.name

    @property
    def may_be_chat(self) -> bool:
        """Whether it can go through a chat template: a conversation, or a prompt as its turn."""
        return bool(self.messages) or self.prompt is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is read without a chat template."""
        return self.text is not None or self.prompt is not None

    @property
    def plain(self) -> str:
        """The text, the prompt and its completion, or the contents of the messages."""
        if self.text is not None:
            return self.text
        if self.prompt is not None:
            return self.prompt + (self.completion or "")
        return "\n".join(content_text(message) for message in self.messages)

    @property
    def size(self) -> int:
        """Characters; of an answer, tokens."""
        return len(self.plain) or len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.text or self.messages or self.output_ids or self.prompt)

    def answers_apart(self) -> Iterator["Document"]:
        """A conversation for each answer, which ends it and alone is trained; itself without one.

        A template then shows every answer as it was written: with its reasoning, which many drop
        when the next turn begins. What the assistant says before the first user answers nothing.
        """
        roles = [said["role"] for said in self.messages]
        first = roles.index("user") if "user" in roles else 0
        ends = [i for i in range(first + 1, len(roles) + 1) if roles[:i][-1:] == ["assistant"]]
        for number, end in enumerate(ends, 1):
            yield dataclasses.replace(
                self,
                name=f"{self.name}, answer {number}",
                messages=self.messages[:end],
                only_last=True,
                source=self.from_name,
            )
        if not ends:
            yield self

    def digest(self) -> bytes:
        """SHA-256 of the content, without the name."""
        parts = vars(self) | {"name": None, "source": None}
        for key in ("chat_template_kwargs", "special_tokens", "only_last"):
            if not parts[key]:  # digests are of runs from before there were any
                del parts[key]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def content_text(message: Mapping[str, Any]) -> str:
    """The text of a message, also where it is a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""
