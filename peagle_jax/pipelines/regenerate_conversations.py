"""Lets a target write the assistant's turns of conversations anew, turn by turn.

A head learns best from what its target writes, because that is what it will draft.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from peagle_jax.chat.encoding import conversation_of, encode_document
from peagle_jax.documents import BadRows, Document
from peagle_jax.pipelines.answer_writers import Answer, RefusedTurnError, Turn, Writer
from peagle_jax.types import InputError


@dataclasses.dataclass
class _Rewriting:
    """A conversation on its way.

    Attributes:
      number: of the row that it becomes.
      document: what it was.
      said: the messages so far, with the target's own answers.
      rest: the messages after the next answer.
      num_turns: answers that were written.
      num_tokens: their tokens.
    """

    number: int
    document: Document
    said: list[Mapping[str, Any]]
    rest: deque[Mapping[str, Any]]
    num_turns: int = 0
    num_tokens: int = 0

    def go_on(self) -> bool:
        """Says what others say next. Whether the assistant then is to answer.

        Calls of tools are kept with their results, which nobody could compute anew, and so is what
        an assistant says before it was asked.
        """
        while self.rest:
            message = self.rest.popleft()
            was_asked = any(said["role"] == "user" for said in self.said)
            if message["role"] == "assistant" and was_asked and not message.get("tool_calls"):
                return True
            self.said.append(message)
        return False


def rewrite(
    documents: Iterable[tuple[int, Document]],
    writer: Writer,
    tokenizer: PreTrainedTokenizerBase | None,
    temperatures: Sequence[float],
    seed: int,
    at_a_time: int,
    bad_rows: BadRows | None = None,
    num_documents: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The conversations with the assistant's turns written anew, as rows for JSONL, in order.

    Where an answer reaches its limit, the row ends before it: the target had more to say. If it is
    the first, the row is its prompt and its tokens, which need no end; or there is no row, if a
    server does not tell the tokens. A row also ends where the conversation has become too long for
    the target, and there is none of one that nobody asks anything in.

    Args:
      documents: conversations and prompts, with the number of the row that each becomes. A prompt
        is a user's turn; where a conversation ends with a user's turn, it is answered, too.
      writer: of the answers.
      tokenizer: of the target, which rows are tried with: what its template cannot show again is
        written as tokens. None: rows are not tried.
      temperatures: conversation i takes i modulo their number, and in every further pass over the
        conversations the one after it.
      seed: of sampling, together with the number of the row and of the turn.
      at_a_time: conversations under way.
      bad_rows: takes what the chat template or a server refuses, whose row ends before that; None:
        the first is an error.
      num_documents: in one pass; None: there is no second one.

    Raises:
      InputError: a conversation is refused, or the writer fails.
    """
    bad_rows = bad_rows or BadRows()
    coming = iter(documents)
    under_way: dict[int, _Rewriting] = {}
    done: dict[int, dict[str, Any] | None] = {}
    order: deque[int] = deque()

    def submit(job: _Rewriting) -> str | None:
        """Why the next answer of a conversation is not under way; None if it is."""
        messages = tuple(job.said)
        conversation = conversation_of(job.document, messages)
        where = f"{job.document.name}, turn {len(messages) + 1}"
        passes, document = 0, job.number
        if num_documents is not None:
            passes, document = divmod(job.number, num_documents)
        temperature = temperatures[(document + passes) % len(temperatures)]
        own_seed = np.random.SeedSequence([seed, job.number, job.num_turns]).generate_state(1)[0]
        turn = Turn(conversation, temperature, int(own_seed) >> 1, where)
        try:
            key = writer.submit(turn)
        except RefusedTurnError as error:
            bad_rows.take(error)
            return "refused"
        if key is None:
            return "context"
        under_way[key] = job
        return None

    while True:
        some = list(itertools.islice(coming, max(0, at_a_time - len(under_way))))
        for number, document in some:
            job = _Rewriting(number, document, [], deque(turns_of(document)))
            order.append(number)
            if not job.go_on() or submit(job) is not None:
                done[number] = None  # nobody asks anything, or too much, or what is refused
        while order and order[0] in done:
            row = done.pop(order.popleft())
            if row is not None:
                yield row
        if not under_way:
            if not some:
                return
            continue  # none of these could be answered
        for key, answer in writer.wait():
            job = under_way.pop(key)
            if answer is None:
                done[job.number] = _row(job, None, "context")
                continue
            if isinstance(answer, InputError):
                bad_rows.take(answer)
                done[job.number] = _row(job, None, "refused")
                continue
            job.num_tokens += answer.num_tokens
            finish_reason = _take(job, answer, tokenizer)
            if finish_reason is None:
                if not job.go_on():
                    finish_reason = "stop"
                else:
                    finish_reason = submit(job)
            if finish_reason is not None:
                done[job.number] = _row(job, answer, finish_reason)


def turns_of(document: Document) -> list[Mapping[str, Any]]:
    """The messages of a document, with a place for an answer after every turn of a user."""
    messages = list(document.messages)
    if document.prompt is not None:
        messages = [{"role": "user", "content": document.prompt}]
    result: list[Mapping[str, Any]] = []
    for message, after in itertools.zip_longest(messages, messages[1:]):
        result.append(message)
        if message["role"] == "user" and (after is None or after["role"] == "user"):
            result.append({"role": "assistant", "content": ""})
    return result


def _take(job: _Rewriting, answer: Answer, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Adds an answer to a conversation; why the conversation ends before it, or None."""
    if not answer.is_complete:
        return "length"
    if answer.message is None:
        return "unreadable"
    job.said.append(answer.message)
    if tokenizer is not None and not _can_be_read(job, tokenizer):
        job.said.pop()
        return "unreadable"
    job.num_turns += 1
    return None


def _can_be_read(job: _Rewriting, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether training can locate all answers so far."""
    document = dataclasses.replace(job.document, messages=tuple(job.said), prompt=None)
    try:
        encode_document(tokenizer, document)
    except InputError:
        return False
    return True


def _is_answer(message: Mapping[str, Any]) -> bool:
    """Whether the assistant says something; what calls a tool stands before an answer."""
    return message["role"] == "assistant" and not message.get("tool_calls")


def _row(job: _Rewriting, answer: Answer | None, finish_reason: str) -> dict[str, Any] | None:
    """The row of a conversation that has ended, after this answer or before it."""
    row: dict[str, Any] = {"sample": job.number, "source": job.document.from_name}
    counts = {"num_tokens": job.num_tokens, "finish_reason": finish_reason}
    if job.num_turns == 0:
        if answer is None or not answer.output_ids:
            return None
        ids = {
            "prompt_token_ids": list(answer.prompt_ids),
            "output_token_ids": list(answer.output_ids),
        }
        return row | ids | {"num_turns": 1} | counts
    # without a question that was not answered to the end, and calls that were made for it
    while finish_reason != "stop" and not _is_answer(job.said[-1]):
        job.said.pop()
    row["messages"] = job.said
    if job.document.tools:
        row["tools"] = list(job.document.tools)
    if job.document.chat_template_kwargs:  # as training is to show it, too
        row["chat_template_kwargs"] = dict(job.document.chat_template_kwargs)
    return row | {"num_turns": job.num_turns} | counts
