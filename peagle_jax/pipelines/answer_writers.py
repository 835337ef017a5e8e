"""What writes the answers of conversations: the target here, or a server that has it.

A writer takes turns as they come and gives answers as they are done, so that the conversations of a
batch need not be in step.
"""

import concurrent.futures
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from peagle_jax.chat.encoding import encode_turns
from peagle_jax.chat.pieces import Conversation, chat_body
from peagle_jax.chat.written_messages import message_of
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.decode.requests import Request
from peagle_jax.openai_server import OpenAIServer, RefusedError, item
from peagle_jax.types import InputError, Model


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn that the assistant is to write.

    Attributes:
      conversation: all that is said before it.
      temperature: 0 writes greedily.
      seed: of sampling.
      where: its place, for errors.
    """

    conversation: Conversation
    temperature: float
    seed: int
    where: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was written.

    Attributes:
      message: the assistant's, with `role` and `content`; None where what was written is none that
        a conversation can go on from, as a call of a tool that nobody runs.
      is_complete: whether it ended with a stop token, and not at the limit.
      prompt_ids: the token ids that it answers; () from a server.
      output_ids: the token ids that were written, the stop token included; () from a server.
      num_tokens: written tokens.
    """

    message: Mapping[str, Any] | None
    is_complete: bool
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    num_tokens: int


class RefusedTurnError(InputError):
    """A turn that the chat template cannot show: a row that cannot be used."""


Outcome = Answer | InputError | None


@runtime_checkable
class Writer(Protocol):
    """Writes turns."""

    def submit(self, turn: Turn) -> int | None:
        """Takes a turn; the number that its answer will have. None if the turn is too long.

        Raises:
          RefusedTurnError: it cannot be written, whoever writes.
        """
        ...

    def wait(self) -> list[tuple[int, Outcome]]:
        """Answers that are done, with their numbers, at least one. A turn must be under way.

        In the place of an answer there is an error that concerns its turn alone; or None, as from
        `submit`, where only the one who writes knows that a turn is too long.
        """
        ...


class EngineWriter:
    """The target writes, up to `batch_size` answers at a time.

    Args:
      target: the target, which nobody else uses: `make_engine` may free its matrices.
      tokenizer: its tokenizer, with a chat template.
      max_new_tokens: limit of an answer.
      batch_size: answers that are written together.

    Raises:
      InputError: an answer would not fit the target's context.
    """

    def __init__(
        self,
        target: Model,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        batch_size: int,
    ) -> None:
        self._context = target.config.context
        if max_new_tokens >= self._context:
            rule = f"an answer must fit the target's context of {self._context} tokens"
            next_step = f"use less than {self._context}"
            raise InputError("--max-new-tokens", rule, max_new_tokens, next_step)
        self._tokenizer, self._max_new_tokens = tokenizer, max_new_tokens
        self._engine = make_engine(target, max_batch=batch_size, donate_models=True)
        self._where: dict[int, str] = {}

    def submit(self, turn: Turn) -> int | None:
        """As `Writer.submit`; raises InputError where the memory does not suffice."""
        try:
            prompt = encode_turns(self._tokenizer, turn.conversation, turn.where)
        except InputError as error:
            about = error.where, error.rule, error.got, error.next_step
            raise RefusedTurnError(*about) from None
        if len(prompt) + self._max_new_tokens > self._context:
            return None
        number = self._engine.add(
            Request(
                prompt=prompt,
                max_new_tokens=self._max_new_tokens,
                temperature=turn.temperature,
                seed=turn.seed,
                name=turn.where,
            )
        )
        self._where[number] = turn.where
        return number

    def wait(self) -> list[tuple[int, Outcome]]:
        """Raises InputError where an answer failed, as where the target computed NaN."""
        done: list[tuple[int, Outcome]] = []
        while not done:
            for output in self._engine.step():
                answer = output.answer
                if answer is None:
                    continue
                where = self._where.pop(output.request_id)
                if answer.error is not None:
                    next_step = "look for NaN in the target's weights, or rewrite fewer at a time"
                    raise InputError(where, "the target must answer", answer.error, next_step)
                is_complete = answer.finish_reason == "stop"
                ids = answer.output_token_ids
                spelled = self._tokenizer.decode(ids[:-1] if is_complete else ids)
                written = Answer(
                    message_of(str(spelled)),
                    is_complete,
                    tuple(answer.prompt_token_ids),
                    tuple(ids),
                    len(ids),
                )
                done.append((output.request_id, written))
        return done


class ServerWriter:
    """A server with OpenAI's chat completions writes, such as vLLM's.

    Args:
      url: of the server, with or without its /v1.
      model: its name there; None for the first that the server lists.
      max_new_tokens: limit of an answer.
      concurrency: requests at the same time.

    Raises:
      InputError: the server does not answer, or does not list the model.
    """

    def __init__(self, url: str, model: str | None, max_new_tokens: int, concurrency: int) -> None:
        next_step = "look at the server's log; the same command goes on from what is written"
        self._server = OpenAIServer(url, model, next_step)
        self.model = self._server.model
        self._max_new_tokens = max_new_tokens
        self._pool = concurrent.futures.ThreadPoolExecutor(concurrency)
        self._running: dict[concurrent.futures.Future[Outcome], int] = {}
        self._num_submitted = 0
        self.too_long: InputError | None = None  # the first such answer of the server

    def submit(self, turn: Turn) -> int:
        """Sends the turn when one of the requests before it is done."""
        number, self._num_submitted = self._num_submitted, self._num_submitted + 1
        self._running[self._pool.submit(self._answer, turn)] = number
        return number

    def wait(self) -> list[tuple[int, Outcome]]:
        """Raises InputError where the server does not answer."""
        done, _ = concurrent.futures.wait(
            self._running, return_when=concurrent.futures.FIRST_COMPLETED
        )
        return [(self._running.pop(future), future.result()) for future in done]

    def _answer(self, turn: Turn) -> Outcome:
        """The answer to a turn, or why the server refuses this one; None if it is too long."""
        body: dict[str, Any] = {
            "model": self.model,
            **chat_body(turn.conversation),
            "max_tokens": self._max_new_tokens,
            "temperature": turn.temperature,
            "seed": turn.seed,
        }
        try:
            reply = self._server.ask("/chat/completions", body, turn.where)
        except RefusedError as error:
            # as vLLM and OpenAI say it: "maximum context length", "context_length_exceeded"
            if "context" not in str(error.got).lower():
                return error
            self.too_long = self.too_long or error
            return None
        choice = item(reply, "choices", 0)
        said = item(choice, "message")
        kept = ("content", "reasoning_content", "reasoning", "tool_calls")
        message = {key: said[key] for key in kept if said.get(key)}
        message = {"role": "assistant", "content": "", **message}
        if "tool_calls" in message:  # nobody runs them, and so nobody can go on
            message = None
        num_tokens = int((reply.get("usage") or {}).get("completion_tokens") or 0)
        return Answer(message, choice.get("finish_reason") != "length", (), (), num_tokens)
