"""A model that another process serves with OpenAI's API, as something that `bench.load` measures.

A piece that the server sends counts as an arrival, as in `vllm bench serve`; how many tokens an
answer has, the server says at its end. vLLM's own counters of speculation are read before and after
a pass; they are of all its clients, so that nobody else should use it meanwhile.
"""

import dataclasses
import itertools
import queue
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from peagle_jax.bench.load import CLOSED, acceptance_counters, is_done, load_result, serve
from peagle_jax.chat.pieces import Conversation, chat_body
from peagle_jax.openai_server import OpenAIServer, item
from peagle_jax.text import Prompt
from peagle_jax.types import InputError

WAIT = 1e-3  # seconds that `ServedModel.step` waits for news
SETTLING = 0.1  # seconds between two readings of counters, which must agree
MAX_READINGS = 20
# vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 17.0
COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(?:{([^}]*)})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


@dataclasses.dataclass(frozen=True)
class ServerRequest:
    """What a server is asked, greedily.

    Attributes:
      prompt: token ids or text, to complete; or a chat.
      max_new_tokens: limit of the answer.
      ignore_eos: vLLM's option, to answer up to the limit.
      name: of the prompt, for errors.
    """

    prompt: Prompt
    max_new_tokens: int
    ignore_eos: bool = False
    name: str = ""

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a chat."""
        return isinstance(self.prompt, Conversation)

    @property
    def path(self) -> str:
        """Where such a prompt goes."""
        return "/chat/completions" if self.is_chat else "/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The request for a model, as JSON."""
        asked: dict[str, Any] = {"prompt": self.prompt}
        if isinstance(self.prompt, Conversation):
            asked = chat_body(self.prompt)
        return {
            "model": model,
            **asked,
            "max_tokens": self.max_new_tokens,
            "temperature": 0,
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


@dataclasses.dataclass(frozen=True)
class ServerAnswer:
    """What a server said of an answer at its end.

    Attributes:
      num_prompt_tokens: by its own count.
      num_tokens: likewise.
      text: the answer.
      is_cut: whether its limit ended it.
      failure: what went wrong; None where nothing did.
    """

    num_prompt_tokens: int
    num_tokens: int
    text: str = ""
    is_cut: bool = False
    failure: InputError | None = None

    @property
    def error(self) -> str | None:
        """One line that says what failed; None without a failure."""
        return None if self.failure is None else str(self.failure)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Something that the server sent: see `load.News`."""

    request_id: int
    num_new_tokens: int
    answer: ServerAnswer | None
    time: float


class ServedModel:
    """The requests that are under way at a server.

    Args:
      server: with the model.
      max_batch: requests at the same time in a closed loop.
    """

    def __init__(self, server: OpenAIServer, max_batch: int) -> None:
        self.max_batch = max_batch
        self._server = server
        self._news: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._numbers = itertools.count()

    def add(self, request: ServerRequest) -> int:
        """Sends a request; its number."""
        number = next(self._numbers)
        # a daemon: a server that hangs does not keep an interrupted command alive
        threading.Thread(target=self._send, args=(number, request), daemon=True).start()
        return number

    def step(self) -> Sequence[Piece]:
        """What has come; nothing after a millisecond without anything."""
        pieces: list[Piece] = []
        try:
            pieces.append(self._news.get(timeout=WAIT))
            while True:
                pieces.append(self._news.get_nowait())
        except queue.Empty:
            return pieces

    def run(self, requests: Sequence[ServerRequest]) -> list[ServerAnswer]:
        """The answers to requests, `max_batch` at a time.

        Raises:
          InputError: the server refuses one, or does not answer.
        """
        answers: dict[int, ServerAnswer] = {}
        to_send = list(reversed(requests))
        num_running = 0
        while to_send or num_running:
            while to_send and num_running < self.max_batch:
                self.add(to_send.pop())
                num_running += 1
            for piece in self.step():
                if piece.answer is None:
                    continue
                if piece.answer.failure is not None:
                    raise piece.answer.failure
                answers[piece.request_id] = piece.answer
                num_running -= 1
        return [answers[number] for number in sorted(answers)]

    def _send(self, number: int, request: ServerRequest) -> None:
        """Puts the pieces of an answer among the news, and its end or failure."""
        try:
            answer = self._receive(number, request)
        except InputError as error:
            answer = ServerAnswer(0, 0, failure=error)
        except Exception as error:  # whatever it is: without an end the client would wait for ever
            rule, next_step = "must answer as OpenAI's API says", "use another server"
            failure = InputError("--server", rule, f"{type(error).__name__}: {error}", next_step)
            answer = ServerAnswer(0, 0, failure=failure)
        self._news.put(Piece(number, 0, answer, time.perf_counter()))

    def _receive(self, number: int, request: ServerRequest) -> ServerAnswer:
        said: list[str] = []  # without reasoning, which is no part of a later turn's prompt
        usage: Any = None
        is_cut = False
        body = request.body(self._server.model)
        for now, piece in self._server.stream(request.path, body, request.name):
            usage = piece.get("usage") or usage
            for choice in piece.get("choices") or []:
                is_cut = choice.get("finish_reason") == "length" or is_cut
                text = _text_of(choice)
                if text is not None:
                    said.append(text)
                    self._news.put(Piece(number, 1, None, now))
        counted = {"usage": usage}
        num_prompt_tokens = int(item(counted, "usage", "prompt_tokens"))
        num_tokens = int(item(counted, "usage", "completion_tokens"))
        return ServerAnswer(num_prompt_tokens, num_tokens, "".join(said), is_cut)


def _text_of(choice: Any) -> str | None:
    """What a piece of an answer says, without reasoning; None where it brings no token.

    A chat begins with a piece that says nothing but the role, and may end with an empty one.
    """
    if "text" in choice:
        return choice["text"]
    delta = choice.get("delta") or {}
    # vLLM has sent the reasoning under both names in some versions
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")
    if reasoning or delta.get("content") or delta.get("tool_calls"):
        return str(delta.get("content") or "")
    return "" if "content" in delta and "role" not in delta else None


def measure(
    server: OpenAIServer,
    model: ServedModel,
    requests: Sequence[ServerRequest],
    rate: float,
    seed: int,
) -> tuple[dict, InputError | None]:
    """Serves requests once.

    Args:
      server: whose counters are read, if it has vLLM's.
      model: at that server, with nothing under way.
      requests: to send.
      rate: requests per second, or `load.CLOSED`.
      seed: of the times of an open loop.

    Returns:
      (as of `load.load_result`, with `k` by the counters; None). Where a request failed, of those
      that were done, {} without any; and the failure.
    """
    before = settled_counters(server)
    served = serve(model, requests, rate, seed=seed)
    failures = [
        seen.answer.failure
        for seen in served
        if isinstance(seen.answer, ServerAnswer) and seen.answer.failure is not None
    ]
    failure = failures[0] if failures else None
    if not any(map(is_done, served)):
        next_step = "give --ignore-eos, or prompts that the model answers"
        nothing = InputError(
            "--server", "must answer with a token", "only empty answers", next_step
        )
        return {}, failure or nothing
    concurrency = model.max_batch if rate == CLOSED else None
    result = load_result(served, concurrency, rate) | {"k": None}
    after = None if failure or before is None else settled_counters(server)
    if before is not None and after is not None:
        result |= after.since(before)
        drafts = after.num_drafts - before.num_drafts
        if drafts:
            result["k"] = round((after.num_draft_tokens - before.num_draft_tokens) / drafts)
    return result, failure


# ---------------------------------------------------------------- vLLM's counters


@dataclasses.dataclass(frozen=True)
class Counters:
    """vLLM's counters of speculation since it was started.

    Attributes:
      num_drafts: speculative steps of a request.
      num_draft_tokens: tokens that were drafted.
      num_accepted_per_pos: by position, in how many of them the draft was accepted.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_per_pos: tuple[int, ...]

    def since(self, before: "Counters") -> dict:
        """What was counted since an earlier reading, as of `load.acceptance_counters`."""
        earlier = (*before.num_accepted_per_pos, *[0] * len(self.num_accepted_per_pos))
        return acceptance_counters(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            [a - b for a, b in zip(self.num_accepted_per_pos, earlier, strict=False)],
        )


def read_counters(metrics: str | None) -> Counters | None:
    """The counters in a server's /metrics, over all its engines; None where it has none."""
    counts: dict[str, int] = {}
    per_pos: dict[int, int] = {}
    for name, labels, value in COUNTER.findall(metrics or ""):
        count, position = int(float(value)), POSITION.search(labels)
        if position is None:
            counts[name] = counts.get(name, 0) + count
        else:
            per_pos[int(position[1])] = per_pos.get(int(position[1]), 0) + count
    if "drafts" not in counts:
        return None
    accepted = tuple(per_pos[i] for i in sorted(per_pos))
    return Counters(counts["drafts"], counts.get("draft_tokens", 0), accepted)


def settled_counters(server: OpenAIServer) -> Counters | None:
    """A server's counters once they stand still: vLLM adds a step after it sent its tokens."""
    counters = read_counters(server.find("/metrics"))
    for _ in range(MAX_READINGS):
        time.sleep(SETTLING)
        before, counters = counters, read_counters(server.find("/metrics"))
        if counters == before:
            break
    return counters
