"""Latency under load: times against a scripted engine, and a real one in both loops."""

import dataclasses
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from peagle_jax.bench.load import (
    CLOSED,
    COMPILED,
    Served,
    arrival_times,
    load_lines,
    load_result,
    serve,
    serve_case,
)
from peagle_jax.bench.served_model import ServerAnswer
from peagle_jax.bench.suite import Case, Decoding
from peagle_jax.cli.arguments import parse_rates
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.requests import Generation, Output, Request
from peagle_jax.types import InputError
from tests import tiny

REQUESTS = [
    Request(prompt=[i + 1, 5, 7], max_new_tokens=6, stop_ids=(), stream=True) for i in range(5)
]


class Clock:
    """Seconds that only pass when somebody works or sleeps."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Scripted:
    """Every step takes a second, and gives each running request two tokens of four."""

    def __init__(self, clock, max_batch):
        self.clock, self.max_batch = clock, max_batch
        self.waiting, self.running, self.most = [], {}, 0
        self.after = 0.0  # seconds of other work before a step returns

    def add(self, request):
        assert request.stream
        number = len(self.waiting) + len(self.running) + 100 * int(self.clock.now)
        self.waiting.append((number, request))
        return number

    def step(self):
        while self.waiting and len(self.running) < self.max_batch:
            number, request = self.waiting.pop(0)
            self.running[number] = request, 0
        self.most = max(self.most, len(self.running))
        self.clock.now += 1.0
        outputs = []
        for number, (request, count) in list(self.running.items()):
            self.running[number] = request, count + 2
            answer = None
            if count + 2 == 4:
                answer = Generation(list(request.prompt), [1] * 4, "length", [], 2, 6, [2, 1, 0])
                del self.running[number]
            outputs.append(Output(number, [1, 1], answer, self.clock.now))
        self.clock.now += self.after
        return outputs


def scripted(rate, max_batch=2, count=4):
    clock = Clock()
    engine = Scripted(clock, max_batch)
    served = serve(engine, REQUESTS[:count], rate, clock=clock, sleep=clock.sleep)
    return engine, served


def test_closed_loop():
    engine, served = scripted(CLOSED)
    # two at a time: the others are sent when these are done
    assert [seen.sent for seen in served] == [0, 0, 2, 2] and engine.most == 2
    assert served[2].arrivals == [(3, 2), (4, 2)]
    assert served[2].first == 1 and served[2].whole == 2
    assert served[2].per_token == pytest.approx(1 / 3) and served[2].gaps == [1]


def test_tokens_count_when_the_host_has_them():
    """A step that goes on after it read a prompt makes the next tokens late, not these."""
    clock = Clock()
    engine = Scripted(clock, 1)
    engine.after = 0.5
    (seen,) = serve(engine, REQUESTS[:1], clock=clock, sleep=clock.sleep)
    assert seen.arrivals == [(1, 2), (2.5, 2)] and seen.first == 1


class Passes(Decoding):
    """A decoder whose passes meet the given programs."""

    def __init__(self, programs):
        self.programs, self.engines = programs, []
        self.case = Case("none", 0, 2, 0.0)
        self.requests = REQUESTS[:2]

    def engine(self):
        clock = time.perf_counter
        engine = Scripted(SimpleNamespace(now=clock() + 10.0 ** len(self.engines)), 2)
        engine.stats = SimpleNamespace(programs=set(self.programs[len(self.engines)]))
        self.engines.append(engine)
        return engine


@pytest.mark.parametrize(
    ("programs", "num_passes", "num_compiled"),
    [
        (["a", "a"], 2, None),
        (["", ""], 2, None),
        (["a", "ab", "b"], 3, None),
        (["a", "b", "ab", "c"], 3, None),
        (["a", "b", "c", "d", "abcd"], 5, None),
        (["a", "b", "c", "d", "aef"], 5, 2),
    ],
)
def test_passes_are_repeated_until_nothing_is_compiled(programs, num_passes, num_compiled):
    decoding = Passes(programs)
    result = serve_case(decoding, CLOSED, 0)
    assert len(decoding.engines) == num_passes and result["completed"] == 2
    assert result.get(COMPILED) == num_compiled
    assert any("compiled" in line for line in load_lines(result, "x")) == bool(num_compiled)
    # the times are those of the last pass
    assert result["median_ttft_ms"] == pytest.approx(1e3 * (1 + 10.0 ** (num_passes - 1)), rel=0.01)


def test_a_failure_of_our_engine_is_said(monkeypatch):
    whole = Scripted.step

    def step(self):
        error = "the target computed NaN or infinity"
        return [
            dataclasses.replace(
                out, answer=out.answer and dataclasses.replace(out.answer, error=error)
            )
            for out in whole(self)
        ]

    monkeypatch.setattr(Scripted, "step", step)
    with pytest.raises(InputError, match="NaN or infinity; look for NaN in the target's weights"):
        serve_case(Passes(["", ""]), CLOSED, 0)


def test_no_time_per_token_without_a_second_token():
    """As a server may count none where it sent two empty pieces."""
    nothing = ServerAnswer(3, 0)
    assert Served(0.0, [(1.0, 1), (2.0, 1)], nothing).per_token is None
    assert Served(0.0, [(1.0, 1), (2.0, 1)], ServerAnswer(3, 1)).per_token is None
    assert Served(0.0, [(1.0, 1), (2.0, 1)], ServerAnswer(3, 3)).per_token == 0.5


def test_result():
    _, served = scripted(CLOSED)
    result = load_result(served, 2, CLOSED)
    assert result["duration"] == 4 and result["completed"] == 4 and result["failed"] == 0
    assert result["total_input_tokens"] == 12 and result["total_output_tokens"] == 16
    assert result["output_throughput"] == 4 and result["request_throughput"] == 1
    assert result["median_ttft_ms"] == 1000 and result["p99_tpot_ms"] == pytest.approx(1000 / 3)
    assert result["mean_itl_ms"] == 1000 and result["mean_e2el_ms"] == 2000
    # 2 + 1 of 6 drafted tokens in 2 steps
    assert result["spec_decode_acceptance_rate"] == pytest.approx(50)
    assert result["spec_decode_acceptance_length"] == pytest.approx(2.5)
    assert result["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5, 0.0]
    assert result["request_rate"] == "inf" and json.loads(json.dumps(result)) == result


def test_open_loop_waits_for_nobody():
    """A request that came while the engine was busy has waited since it was due."""
    times = arrival_times(4, 2.0, seed=0)
    engine, served = scripted(2.0)
    assert [seen.sent for seen in served] == pytest.approx(times)
    for seen in served:
        assert seen.first >= 1  # a step at least, and what it waited
    assert max(seen.first for seen in served) > 1.5 and engine.most == 2
    slow = scripted(1e-5)[1]  # nothing else is under way: it sleeps until the next is due
    assert [seen.first for seen in slow] == pytest.approx([1] * 4)


def test_arrivals_are_poisson():
    times = arrival_times(4000, 5.0, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.08)  # exponential: as wide as its mean
    assert times == arrival_times(4000, 5.0, seed=3) != arrival_times(4000, 5.0, seed=4)


def test_one_token_has_no_time_between_tokens():
    answer = Generation([1], [2], "length", [], 0, 0, [])
    seen = Served(0.0, [(1.0, 1)], answer)
    assert seen.per_token is None
    result = load_result([seen], 1, 3.0)
    assert "mean_tpot_ms" not in result and "spec_decode_num_drafts" not in result
    assert result["request_rate"] == 3.0 and result["median_ttft_ms"] == 1000
    assert not any("TPOT" in line for line in load_lines(result, "x"))


def test_block_of_vllm():
    _, served = scripted(CLOSED)
    lines = load_lines(load_result(served, 2, CLOSED), "P-EAGLE")
    assert lines[0].strip("=") == " P-EAGLE " and len(lines[0]) == 50
    assert "Output token throughput (tok/s):         4.00" in lines
    assert "P99 TTFT (ms):                           1000.00" in lines


@pytest.mark.parametrize("rate", [CLOSED, 200.0])
def test_a_real_engine(rate):
    target, head = tiny.target(), tiny.head()
    drafter = make_drafter(head, 2)
    engine = Engine(target, drafter, head.params, max_batch=2)
    served = serve(engine, REQUESTS, rate)
    want = generate(target, None, [r.prompt for r in REQUESTS], max_new_tokens=6, stop_ids=())
    for seen, answer in zip(served, want, strict=True):
        assert seen.answer.output_token_ids == answer.output_token_ids
        assert seen.num_tokens == 6 and seen.first > 0
        assert seen.arrivals[0][1] == 1  # the prompt's own token comes before any draft
        assert min(seen.gaps) > 0  # also where the next tokens came from the same call of step
    result = load_result(served, 2, rate)
    assert result["completed"] == 5 and result["spec_decode_num_drafts"] > 0
    assert result["spec_decode_draft_tokens"] == 2 * result["spec_decode_num_drafts"]


def test_rates_of_requests():
    assert parse_rates("--request-rate", ["inf", "0.5"]) == [CLOSED, 0.5]
    for text in ("0", "-1", "fast", "nan"):
        with pytest.raises(InputError, match="requests per second"):
            parse_rates("--request-rate", [text])
