"""Latency under load: requests that arrive while others are decoded.

Closed loop: as many requests are under way as the batch holds; the next is sent when one is done.
Open loop: requests are sent at random times, a given number per second on average, whether or not
earlier ones are done. What serves is an engine in this process or another process
(`bench.served_model`); the client, `serve`, is the same. Of an engine a token counts when the host
has it (`Output.time`). To hand out every step's tokens, the engine returns to the host after every
step, which costs speed; `bench.suite` measures speed without that.

Results have the names of `vllm bench serve --save-result`, in milliseconds and per second.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from peagle_jax.bench.answer_statistics import mean_acceptance_length
from peagle_jax.bench.suite import COMPILED, Decoding
from peagle_jax.decode.requests import Generation
from peagle_jax.types import InputError

CLOSED = float("inf")  # requests per second: as soon as there is a place
PERCENTILE = 99
MAX_WARM_UPS = 4  # passes that may compile something before the last one, whose times count


@runtime_checkable
class Answered(Protocol):
    """An answer at its end: a `Generation`, or what a server said of it."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        ...

    @property
    def error(self) -> str | None:
        """One line that says what failed; None without a failure."""
        ...


@runtime_checkable
class News(Protocol):
    """What is new of one request: an `Output`, or a piece that a server sent."""

    @property
    def request_id(self) -> int:
        """The number that `add` gave the request."""
        ...

    @property
    def num_new_tokens(self) -> int:
        """Tokens that came, at least."""
        ...

    @property
    def answer(self) -> Answered | None:
        """At the end of the request."""
        ...

    @property
    def time(self) -> float:
        """When they came, in seconds of the client's clock."""
        ...


@runtime_checkable
class Server(Protocol):
    """What serves requests: an `Engine`, or a `ServedModel`."""

    max_batch: int

    def add(self, request: Any) -> int:
        """Takes a request in; its number."""
        ...

    def step(self) -> Sequence[News]:
        """What is new after some work."""
        ...


@dataclasses.dataclass
class Served:
    """What a client saw of one request.

    Attributes:
      sent: seconds, when it was sent.
      arrivals: when tokens came, and how many. Of a server how many is not known: 1.
      answer: at the end.
    """

    sent: float
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    answer: Answered | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return self.answer.num_tokens if self.answer is not None else 0

    @property
    def first(self) -> float:
        """Time to the first token, in seconds."""
        return self.arrivals[0][0] - self.sent

    @property
    def whole(self) -> float:
        """Time to the last one."""
        return self.arrivals[-1][0] - self.sent

    @property
    def per_token(self) -> float | None:
        """Time per output token after the first; None where there is none after it."""
        others = self.num_tokens - 1
        return (self.whole - self.first) / others if others > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Times between arrivals: inter-token latency as vLLM counts it, of chunks."""
        times = [at for at, _ in self.arrivals]
        return np.diff(times).tolist()


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """When requests are sent in an open loop, in seconds: a Poisson process that begins at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def serve(
    engine: Server,
    requests: Sequence[Any],
    rate: float = CLOSED,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> list[Served]:
    """Sends requests and notes when their tokens come.

    Args:
      engine: with nothing under way. Requests beyond its `max_batch` wait in it (open loop).
      requests: of its kind, made to stream.
      rate: requests per second, or CLOSED.
      seed: of the times of an open loop.
      clock: seconds, the clock of `Output.time`.
      sleep: waits for the next request where nothing is under way.

    Returns:
      What was seen of each request that was sent, in their order: after a failure no more are.
    """
    is_closed = rate == CLOSED
    due = [0.0] * len(requests) if is_closed else arrival_times(len(requests), rate, seed)
    served: list[Served] = []
    by_id: dict[int, Served] = {}
    begin, to_send = clock(), len(requests)
    while len(served) < to_send or by_id:
        while len(served) < to_send:
            number, now = len(served), clock() - begin
            is_full = is_closed and len(by_id) >= engine.max_batch
            if is_full or due[number] > now:
                break
            # of an open loop when it was due: the engine may have been busy
            seen = Served(now if is_closed else due[number])
            served.append(seen)
            by_id[engine.add(requests[number])] = seen
        if not by_id:
            sleep(max(0.0, due[len(served)] - (clock() - begin)))
            continue
        for output in engine.step():
            seen = by_id[output.request_id]
            if output.num_new_tokens:
                seen.arrivals.append((output.time - begin, output.num_new_tokens))
            if output.answer is not None:
                seen.answer = output.answer
                del by_id[output.request_id]
                if output.answer.error is not None:
                    to_send = len(served)
    return served


def serve_case(decoding: Decoding, rate: float, seed: int) -> dict:
    """Serves the requests of a decoder until a pass compiles nothing, and gives its result.

    In an open loop the shapes of a pass depend on its times: a warm pass, which is faster, may meet
    others than the pass before it did.

    Returns:
      As of `load_result`. Where even the last pass compiled something, COMPILED says how many
      programs: its times are too long then.

    Raises:
      InputError: a request failed.
    """
    known: set[tuple] = set()
    requests = [dataclasses.replace(request, stream=True) for request in decoding.requests]
    for number in range(1 + MAX_WARM_UPS):
        engine = decoding.engine()
        served = serve(engine, requests, rate, seed=seed)
        for seen in served:
            if seen.answer is not None and seen.answer.error is not None:
                next_step = "look for NaN in the target's weights and the head's"
                rule = "every request must be answered"
                raise InputError("peagle bench", rule, seen.answer.error, next_step)
        compiled = engine.stats.programs - known
        known |= compiled
        if number and not compiled:
            break
    result = load_result(served, decoding.case.batch_size, rate)
    if decoding.case.adaptive_k:
        # later positions were drafted less often
        result.pop("spec_decode_per_position_acceptance_rates", None)
    return result | ({COMPILED: len(compiled)} if compiled else {})


def load_result(served: Sequence[Served], concurrency: int | None, rate: float) -> dict:
    """What `vllm bench serve --save-result` writes, of what was served.

    Percentages are of 100, as there; a rate of `inf` is a closed loop. A concurrency of None says
    that the client set no limit.
    """
    done = [seen for seen in served if is_done(seen)]
    answers = [seen.answer for seen in done if seen.answer is not None]
    begin = min(seen.sent for seen in done)
    duration = max(seen.arrivals[-1][0] for seen in done) - begin
    inputs = sum(answer.num_prompt_tokens for answer in answers)
    outputs = sum(answer.num_tokens for answer in answers)
    result = {
        "duration": duration,
        "completed": len(done),
        "failed": len(served) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_concurrency": concurrency,
        "request_rate": "inf" if rate == CLOSED else rate,
    }
    per_token = [seen.per_token for seen in done]
    times = {
        "ttft": [seen.first for seen in done],
        "tpot": [seconds for seconds in per_token if seconds is not None],
        "itl": [gap for seen in done for gap in seen.gaps],
        "e2el": [seen.whole for seen in done],
    }
    for name, values in times.items():
        if not values:  # answers of one token have no time between tokens
            continue
        milliseconds = 1e3 * np.asarray(values)
        result[f"mean_{name}_ms"] = float(milliseconds.mean())
        result[f"median_{name}_ms"] = float(np.median(milliseconds))
        result[f"std_{name}_ms"] = float(milliseconds.std())
        result[f"p{PERCENTILE}_{name}_ms"] = float(np.percentile(milliseconds, PERCENTILE))
    ours = [answer for answer in answers if isinstance(answer, Generation)]
    if not any(answer.num_drafts for answer in ours):
        return result
    counters = acceptance_counters(
        sum(answer.num_drafts for answer in ours),
        sum(answer.num_draft_tokens for answer in ours),
        np.sum([answer.num_accepted_per_pos for answer in ours], axis=0).tolist(),
    )
    return result | counters | {"mean_acceptance_length": mean_acceptance_length(ours)}


def is_done(seen: Served) -> bool:
    """Whether a request was answered whole, with one token at least."""
    return seen.answer is not None and seen.answer.error is None and bool(seen.arrivals)


def acceptance_counters(
    num_drafts: int, num_draft_tokens: int, num_accepted_per_pos: Sequence[int]
) -> dict:
    """vLLM's counters of speculation under the names of `vllm bench serve`; {} without a draft."""
    if not num_drafts:
        return {}
    accepted = sum(num_accepted_per_pos)
    return {
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_draft_tokens": num_draft_tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / num_draft_tokens,
        "spec_decode_acceptance_length": 1 + accepted / num_drafts,
        "spec_decode_per_position_acceptance_rates": [n / num_drafts for n in num_accepted_per_pos],
    }


LINES = (
    ("Successful requests", "completed", "d"),
    ("Benchmark duration (s)", "duration", ".2f"),
    ("Total input tokens", "total_input_tokens", "d"),
    ("Total generated tokens", "total_output_tokens", "d"),
    ("Request throughput (req/s)", "request_throughput", ".2f"),
    ("Output token throughput (tok/s)", "output_throughput", ".2f"),
    ("Total token throughput (tok/s)", "total_token_throughput", ".2f"),
    ("Mean TTFT (ms)", "mean_ttft_ms", ".2f"),
    ("Median TTFT (ms)", "median_ttft_ms", ".2f"),
    ("P99 TTFT (ms)", "p99_ttft_ms", ".2f"),
    ("Mean TPOT (ms)", "mean_tpot_ms", ".2f"),
    ("Median TPOT (ms)", "median_tpot_ms", ".2f"),
    ("P99 TPOT (ms)", "p99_tpot_ms", ".2f"),
    ("Mean ITL (ms)", "mean_itl_ms", ".2f"),
    ("Median ITL (ms)", "median_itl_ms", ".2f"),
    ("P99 ITL (ms)", "p99_itl_ms", ".2f"),
    ("Acceptance rate (%)", "spec_decode_acceptance_rate", ".2f"),
    ("Acceptance length", "spec_decode_acceptance_length", ".2f"),
    ("Mean of the answers' own", "mean_acceptance_length", ".2f"),
    ("Programs compiled meanwhile", COMPILED, "d"),
)


def load_lines(result: dict, title: str) -> list[str]:
    """The block that `vllm bench serve` prints, of a result."""
    lines = [f" {title} ".center(50, "=")]
    for label, key, form in LINES:
        if key in result:
            lines.append(f"{label + ':':<40} {result[key]:<{9}{form}}".rstrip())
    return [*lines, "=" * 50]
