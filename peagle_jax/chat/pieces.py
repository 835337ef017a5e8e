"""Pieces of messages' texts, with marks around them."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle_jax.chat.rendering import Mark, Marks
from peagle_jax.documents import REASONING

Span = tuple[int, int]  # of characters: the first, and the one after the last

# <|im_end|>, </think>, <turn|>, [/INST]
TAG = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\]")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages, and the tools that they may call.

    Attributes:
      messages: each with `role` and `content`, as for OpenAI's chat completions; further keys, such
        as `tool_calls`, are the template's business.
      tools: descriptions of functions, as the template reads them.
      chat_template_kwargs: what else the template reads, as `enable_thinking`: of the same name in
        requests to vLLM.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def chat_body(conversation: Conversation) -> dict[str, Any]:
    """A conversation as a request of OpenAI's chat completions has it, with vLLM's further key."""
    tools, options = list(conversation.tools), dict(conversation.chat_template_kwargs)
    return {
        "messages": list(conversation.messages),
        **({"tools": tools} if tools else {}),
        **({"chat_template_kwargs": options} if options else {}),
    }


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a message's text.

    Attributes:
      message: number of the message.
      key: of the message: "content", or one of REASONING.
      part: number of the part, if the content is a list of parts.
      start, end: of the piece in that text.
    """

    message: int
    key: str
    part: int | None
    start: int
    end: int


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """How a tokenizer spells its special tokens, longer ones first."""
    added = tokenizer.added_tokens_decoder.values()
    names = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return tuple(sorted(names, key=len, reverse=True))


def for_templates(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: without keys of None, and calls' arguments as objects.

    Templates ask whether there are tool calls, or reasoning, by their keys: empty ones are none.
    """
    optional = ("tool_calls", *REASONING)
    message = {
        key: value
        for key, value in message.items()
        if value is not None and (value or key not in optional)
    }
    if "tool_calls" in message:
        message["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    reasoning = next((message[key] for key in REASONING if message.get(key)), None)
    if reasoning is not None:
        # as transformers does it: templates read either
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object: no arguments, or JSON in a string, as vLLM reads them.

    A string of something else stays: templates that write arguments as they are may have meant it.
    """
    function = dict(function_of(call))
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    function["arguments"] = arguments
    return {**call, "function": function} if "function" in call else function


def with_joined_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose texts in parts are one, line by line, as vLLM joins them."""
    return {
        key: "\n".join(part["text"] for part in value)
        if key in ("content", *REASONING, "thinking") and is_list_of_parts(value)
        else value
        for key, value in message.items()
    }


def is_list_of_parts(value: Any) -> bool:
    """Whether it is a content in parts of text; also without any."""
    return isinstance(value, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value
    )


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function that a message calls: some data sets have it without a key of its own."""
    return call.get("function") or call


def with_marks(
    number: int, message: Mapping[str, Any], whole: bool, marks: Marks
) -> dict[str, Any]:
    """A message with marks in its texts.

    Args:
      number: of the message.
      message: its content is text, or a list of parts of text.
      whole: whether marks are put around the whole of a text, or around what it has between tags.
      marks: gives them out.
    """
    marked = dict(message)
    keys = ("content", *REASONING) if message["role"] == "assistant" else ("content",)
    for key in keys:
        value = message.get(key)
        if isinstance(value, str):
            marked[key] = _mark_text(value, Piece(number, key, None, 0, 0), whole, marks)
        elif value is not None:
            marked[key] = [
                part | {"text": _mark_text(part["text"], Piece(number, key, i, 0, 0), whole, marks)}
                for i, part in enumerate(value)
            ]
    return marked


def _mark_text(text: str, of: Piece, whole: bool, marks: Marks) -> str:
    """A text with marks around it, or around what it has between tags."""
    parts = [(0, len(text))] if whole else _between_tags(text)
    result, done = [], 0
    for start, end in parts:
        if start == end:
            continue
        piece = dataclasses.replace(of, start=start, end=end)
        begin, stop = (marks.new(Mark("piece", piece, is_end)) for is_end in (False, True))
        result += [text[done:start], begin, text[start:end], stop]
        done = end
    return "".join([*result, text[done:]])


def _between_tags(text: str) -> list[Span]:
    """What lies between tags, without space around it."""
    edges = [0, *(edge for m in TAG.finditer(text) for edge in m.span()), len(text)]
    spans = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        bare = text[start:end].strip()
        if bare:
            begin = start + text[start:end].index(bare)
            spans.append((begin, begin + len(bare)))
    return spans


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that overlap as one, without empty ones."""
    result: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if result and start < result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def cut_at_tag(text: str, other: str, same: int) -> int:
    """The length of what two texts begin with, if it may not end within a tag or a word."""
    while same:
        inside = re.search(r"<[^<>\s]*$", text[:same])
        if inside:
            same = inside.start()
            continue
        nexts = text[same : same + 1], other[same : same + 1]
        if text[same - 1].isalnum() and any(c.isalnum() for c in nexts):
            same -= 1
            continue
        return same
    return 0
