"""Which characters of a rendered conversation the assistant wrote: what a loss may read.

Where a template marks generations, these are it. Otherwise every answer is located in the rendered
conversation, by marks around its text (`rendering`). What the template itself writes, such as
headers, is not trained, but the tag that ends a turn is. An answer that cannot be located is an
error: there is no guess, and no training on everything.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle_jax.chat.apply_template import render
from peagle_jax.chat.pieces import (
    TAG,
    Conversation,
    Piece,
    Span,
    cut_at_tag,
    function_of,
    merged,
    special_tokens_of,
    with_marks,
)
from peagle_jax.chat.rendering import (
    MarkedTemplate,
    Marks,
    TooManyMarksError,
    blocks_of_messages,
    generations,
    limited,
    marked_template,
)
from peagle_jax.documents import REASONING, content_text
from peagle_jax.types import InputError

TAGS_AND_SPACE = re.compile(rf"(?:{TAG.pattern}|\s)*")
# <think>\n\n</think>\n\n, which Qwen3 writes where there is no reasoning
EMPTY_PAIR = re.compile(r"<([^<>/\s]+)>\s*</\1>\s*")


def trained_spans(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    where: str,
    *,
    only_last: bool = False,
) -> tuple[str, list[Span]]:
    """The rendered conversation, and what of it the assistant wrote, in order.

    Args:
      tokenizer: with a chat template.
      conversation: what is said.
      where: its place, for errors.
      only_last: whether only what it wrote in the last message counts, which then is an answer.

    Raises:
      InputError: the template refuses the conversation or takes too much time or memory, or an
        answer cannot be located.
    """
    with limited(where):
        return _trained_spans(tokenizer, conversation, where, only_last)


def _trained_spans(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, where: str, only_last: bool
) -> tuple[str, list[Span]]:
    messages, text = render(tokenizer, conversation, where)
    variables = {
        **tokenizer.special_tokens_map,
        **conversation.chat_template_kwargs,
        "tools": list(conversation.tools) or None,
        "documents": None,
        "add_generation_prompt": False,
    }
    located = _Located(tokenizer, messages, variables, text, where)
    last = len(messages) - 1
    if located.template.has_generations:
        _, places = located.render(messages, Marks(text))
        generated = list(generations(places))
        if only_last:
            generated = located.within(last, blocks_of_messages(places), generated)
        spans = [located.with_end_of_turn(*span) for span in generated]
    else:
        spans = [
            span
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and number >= (last if only_last else 0)
            for span in located.answer(number)
        ]
    return text, merged(spans)


class _Located:
    """A conversation that was rendered with marks.

    Args:
      tokenizer: of the target.
      messages: of the conversation.
      variables: what the template can read beside them.
      text: the conversation, rendered without marks.
      where: its place, for errors.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        text: str,
        where: str,
    ) -> None:
        self.messages, self.variables = messages, variables
        self.text, self.where = text, where
        source = tokenizer.get_chat_template(tools=variables["tools"])
        self.template: MarkedTemplate = marked_template(source)
        self.special = special_tokens_of(tokenizer)
        self.generation_prompt = _generation_prompt(self.template, variables)
        self._pieces: dict[int, list[tuple[Piece, Span]]] = {}
        self.blocks: dict[int, list[Span]] = {}
        if not self.template.has_generations:
            self._locate()

    def render(self, messages: Sequence[Mapping], marks: Marks) -> tuple[str, list]:
        """What the template makes of messages with marks, and where these are."""
        copies = [dict(message) for message in messages]
        try:
            return self.template.render(copies, marks, self.variables)
        except TooManyMarksError:
            rule = "a conversation can be marked 65,533 times"
            next_step = "split the conversation"
            raise InputError(self.where, rule, f"{len(messages)} messages", next_step) from None
        except MemoryError:
            raise
        except Exception:  # a template raises what it likes, here at a mark
            return "", []

    # ------------------------------------------------------------ pieces

    def _locate(self) -> None:
        """Finds the blocks of all messages, and the pieces of answers and of tools' results."""
        numbers = [
            i for i, message in enumerate(self.messages) if message["role"] in ("assistant", "tool")
        ]
        if self._try(dict.fromkeys(numbers, True)):
            return
        if self._try(dict.fromkeys(numbers, False)):
            return
        # one does not go: which?
        found, self.blocks = {}, {}
        for number in numbers:
            if self._try({number: True}) or self._try({number: False}):
                found |= self._pieces
        self._pieces = found
        if not self.blocks:
            self._try({})

    def _try(self, tight: Mapping[int, bool]) -> bool:
        """Renders with marks in some messages; whether all of these were found.

        Args:
          tight: by the number of a message, whether marks are put around the whole of its text, or
            within it around all text between tags, without the space that templates may remove.
        """
        marks = Marks(self.text)
        messages = list(self.messages)
        for number, whole in tight.items():
            messages[number] = with_marks(number, messages[number], whole, marks)
        text, places = self.render(messages, marks)
        if text != self.text:
            return False
        starts: dict[Piece, int] = {}
        pieces: dict[int, list[tuple[Piece, Span]]] = {number: [] for number in tight}
        seen: list[tuple[Piece, bool]] = []
        for place, mark in places:
            if mark.kind != "piece":
                continue
            seen.append((mark.key, mark.is_end))
            if mark.is_end and mark.key in starts:
                pieces[mark.key.message].append((mark.key, (starts[mark.key], place)))
            starts[mark.key] = place
        if len(set(seen)) != len(seen) or len({key for key, _ in seen}) * 2 != len(seen):
            return False  # written twice, or in part
        self._pieces, self.blocks = pieces, blocks_of_messages(places)
        return True

    # ------------------------------------------------------------ answers

    def answer(self, number: int) -> list[Span]:
        """What the assistant wrote in one message.

        Raises:
          InputError: it cannot be located.
        """
        message, pieces = self.messages[number], self._pieces.get(number)
        blocks = self.blocks.get(number, [])
        if pieces is None or len(blocks) > 1 and not pieces:
            raise self._not_located(number)
        block = _block_of(blocks, pieces)
        if message.get("tool_calls"):
            if block is None:
                raise self._not_located(number)
            return self._answer_with_calls(number, block, pieces)
        if pieces:
            start, end = self._start(pieces, block), self._right(pieces[-1], block)
            if block is not None and pieces[-1][0].key in REASONING and not content_text(message):
                # the template may write headers of the empty answer after the reasoning (GPT-OSS)
                end = max(end, self._last_tag(block)[1])
            return [self.with_end_of_turn(start, end, block)]
        if _all_is_reasoning(message):
            # an empty answer, or one of reasoning that the template drops
            return [self._last_tag(block)] if block else []
        raise self._not_located(number)

    def within(
        self, number: int, blocks: Mapping[int, list[Span]], spans: Iterable[Span]
    ) -> list[Span]:
        """The spans that lie in what the template writes for a message.

        Raises:
          InputError: there is no such place, as where its loop is not over the messages; or a span
            lies in it and beside it.
        """
        if number not in blocks:
            raise self._not_located(number)
        own, inside = blocks[number], []
        for start, end in spans:
            if any(a <= start and end <= b for a, b in own):
                inside.append((start, end))
            elif any(start < b and a < end for a, b in own):
                raise self._not_located(number)
        return inside

    def _not_located(self, number: int) -> InputError:
        rule = "every answer must be found in what the target's chat template makes of it"
        got = f"turn {number + 1}, which the template drops or rewrites"
        next_step = (
            "look at it with peagle show-data, put {% generation %} around what the assistant "
            "writes in the template, or leave the conversation out"
        )
        return InputError(self.where, rule, got, next_step)

    def _answer_with_calls(
        self, number: int, block: Span, pieces: Sequence[tuple[Piece, Span]]
    ) -> list[Span]:
        """An answer that calls tools: all that the template writes for it, without the header."""
        start, end = block
        header = self._header_end(block)
        own_end = start + len(self.text[start:end].rstrip())
        begin = header + _length(EMPTY_PAIR.match(self.text[header:end]))
        names = [str(function_of(call).get("name")) for call in self.messages[number]["tool_calls"]]
        # of several calls of one function GPT-OSS writes the first alone
        if any(self.text.count(name, header, end) < names.count(name) for name in names):
            raise self._not_located(number)
        if pieces and names[0] not in self.text[header : pieces[0][1][0]]:
            begin = self._start(pieces, block)
        if not self._holds_results(number, block):
            return [(begin, own_end)]
        # the results of the calls stand within the block (Gemma 4): what the template writes where
        # the conversation ends here is the assistant's
        is_after_text = bool(pieces) and pieces[0][1][0] < self.text.find(names[0], header)
        calls_end = self._end_without_results(number, block, with_content=is_after_text)
        if any(self.text.count(name, begin, calls_end) < names.count(name) for name in names):
            raise self._not_located(number)
        spans = [(begin, calls_end)]
        after = [found for found in pieces if found[1][0] >= calls_end]
        if after:
            last = self._right(after[-1], block)
            spans.append(self.with_end_of_turn(after[0][1][0], last, block))
        return spans

    def _holds_results(self, number: int, block: Span) -> bool:
        """Whether the results of an answer's calls stand within its block, as in Gemma 4's.

        They are `tool_responses` of the message itself, or the messages behind it. One with an
        empty content has no place of its own; without a block it may stand within this one, or
        nowhere, and then the conversation is the same without it.
        """
        responses = "tool_responses"
        if self.messages[number].get(responses) and responses in self.template.source:
            return True
        nowhere = []
        for other in range(number + 1, len(self.messages)):
            if self.messages[other]["role"] != "tool":
                break
            spans = [span for _, span in self._pieces.get(other, [])]
            if any(block[0] <= start < block[1] for start, _ in spans):
                return True
            if not spans and not self.blocks.get(other):
                nowhere.append(other)
        if not nowhere:
            return False
        rest = [message for i, message in enumerate(self.messages) if i not in nowhere]
        return self.render(rest, Marks(self.text))[0] != self.text

    def _end_without_results(self, number: int, block: Span, *, with_content: bool) -> int:
        """Where the calls of an answer end; its content stands before them, or behind results."""
        marks = Marks(self.text)
        left_out = ("tool_responses",) if with_content else ("content", "tool_responses")
        message = {k: v for k, v in self.messages[number].items() if k not in left_out}
        text, places = self.render([*self.messages[:number], message], marks)
        blocks = blocks_of_messages(places).get(number, [])
        if len(blocks) != 1:
            raise self._not_located(number)
        alone = text[blocks[0][0] : blocks[0][1]].rstrip()
        whole = self.text[block[0] : block[1]]
        same = len(os.path.commonprefix([alone, whole]))
        return block[0] + cut_at_tag(whole, alone, same)

    def _start(self, pieces: Sequence[tuple[Piece, Span]], block: Span | None) -> int:
        """Where an answer with such pieces begins: before its first, if tags come before it."""
        piece, (start, _) = pieces[0]
        header = self._header_end(block) if block else None
        if piece.key in REASONING:
            # the tag that opens the reasoning
            return start if header is None else header
        before = self._source(piece)[: piece.start]
        shown = self.text[header or 0 : start]
        same = os.path.commonprefix([before[::-1], shown[::-1]])[::-1]
        same = same[len(same) - _length_at_end(TAGS_AND_SPACE, same) :]
        bare = same.lstrip()
        space = same[: len(same) - len(bare)]
        # space, if it is all the space there and the answer's own
        rests = shown[: len(shown) - len(same)], before[: len(before) - len(same)]
        if header is None or (space and any(rest != rest.rstrip() for rest in rests)):
            return start - len(bare)
        return start - len(same)

    def _right(self, found: tuple[Piece, Span], block: Span | None) -> int:
        """Where an answer ends whose last piece this is: after tags that it ends with."""
        piece, (_, end) = found
        limit = block[1] if block else len(self.text)
        after = self._source(piece)[piece.end :]
        same = os.path.commonprefix([after, self.text[end:limit]])
        return end + len(same[: _length(TAGS_AND_SPACE.match(same))].rstrip())

    def _source(self, piece: Piece) -> str:
        """The text that a piece is of."""
        value = self.messages[piece.message][piece.key]
        return value if piece.part is None else value[piece.part]["text"]

    def _header_end(self, block: Span) -> int:
        """Where the header ends that a template writes before an answer."""
        shown = self.text[block[0] : block[1]]
        same = len(os.path.commonprefix([shown, self.generation_prompt]))
        return block[0] + cut_at_tag(shown, self.generation_prompt, same)

    def _last_tag(self, block: Span) -> Span:
        """The tag at the end of a block; nothing if there is none."""
        start, end = block
        end = start + len(self.text[start:end].rstrip())
        tags = [(m.start(), m.end()) for m in TAG.finditer(self.text, start, end)]
        return tags[-1] if tags and tags[-1][1] == end else (end, end)

    def with_end_of_turn(self, start: int, end: int, block: Span | None = None) -> Span:
        """A span with the tag that ends the turn, if one follows.

        Within a block there may be space before it, and where several tags follow, it is the first,
        or the last of them that the tokenizer has as a special token. Without a block it must
        follow at once, because what comes later may begin the next turn.
        """
        if block is None:
            tag = self._tag_at(end, len(self.text))
            shown = self.text[start:end].rstrip()  # a line may end within what a template marks
            ends_with_tag = shown.endswith(self.special) or (
                tag not in self.special
                and any(tag.end() == len(shown) for tag in TAG.finditer(shown))
            )
            return start, end if ends_with_tag else end + len(tag)
        place, best = end, end
        while True:
            shown = self.text[place : block[1]]
            place += len(shown) - len(shown.lstrip())
            tag = self._tag_at(place, block[1])
            if not tag:
                return start, best
            place += len(tag)
            if best == end or tag in self.special:
                best = place

    def _tag_at(self, place: int, limit: int) -> str:
        for token in self.special:
            if self.text.startswith(token, place, limit):
                return token
        match = TAG.match(self.text, place, limit)
        return match.group() if match else ""


# ---------------------------------------------------------------- helpers


@functools.lru_cache(maxsize=16)
def _prompt_after_user(template: MarkedTemplate, encoded_variables: str) -> str:
    messages = [{"role": "user", "content": "x"}]
    variables = json.loads(encoded_variables)
    try:
        text, places = template.render(messages, Marks(""), variables)
    except MemoryError:
        raise  # what `limited` makes one line of
    except Exception:  # a template raises what it likes
        return ""
    blocks = blocks_of_messages(places).get(0)
    return text[max(end for _, end in blocks) :] if blocks else ""


def _generation_prompt(template: MarkedTemplate, variables: Mapping[str, Any]) -> str:
    """What the template writes after a user's turn, for the assistant to go on."""
    variables = {**variables, "tools": None, "add_generation_prompt": True}
    return _prompt_after_user(template, json.dumps(variables, sort_keys=True, default=str))


def _block_of(blocks: Sequence[Span], pieces: Sequence[tuple[Piece, Span]]) -> Span | None:
    """The block that pieces lie in; the only one if there are no pieces."""
    if not pieces:
        return blocks[0] if len(blocks) == 1 else None
    first, last = pieces[0][1][0], pieces[-1][1][1]
    around = [block for block in blocks if block[0] <= first and last <= block[1]]
    return min(around, key=lambda block: block[1] - block[0]) if around else None


def _all_is_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether a message's text is empty, or ends with a tag."""
    content = content_text(message).strip()
    return not content or any(match.end() == len(content) for match in TAG.finditer(content))


def _length(match: re.Match | None) -> int:
    return len(match.group()) if match else 0


def _length_at_end(pattern: re.Pattern, text: str) -> int:
    """Characters at the end of a text that a pattern matches."""
    match = re.search(rf"(?:{pattern.pattern})$", text)
    return _length(match)
