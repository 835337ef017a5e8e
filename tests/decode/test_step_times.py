"""What is kept of a machine and a pair of models: seconds of a step, and what was accepted."""

import concurrent.futures
import dataclasses
import functools
import json
import threading
import time

import jax
import numpy as np
import pytest
import tiny

from peagle_jax.decode import adaptive_k, step_times
from peagle_jax.decode.adaptive_k import KChooser, Survival
from peagle_jax.decode.batch import Batch
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.requests import Request
from peagle_jax.decode.step_times import StepTimes, head_digest, what_times_depend_on

PROMPTS = [[3, 14, 15], [9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 23], [8], [4, 6, 2, 6, 4, 33, 8]]
# a first draft costs much, further ones little: as P-EAGLE on a CPU
SECONDS = {0: 1.0, 1: 1.9, 3: 2.0, 5: 2.2, 7: 2.9}


def test_what_was_accepted_is_a_guess_for_the_next_engine(tmp_path):
    """One that a few steps with other texts overrule."""
    chooser = KChooser(3)
    chooser.survival.observe(3, 600, 6000, np.array([4800, 2400, 600]))
    chooser._wait = 256
    times = StepTimes({"machine": "one"}, tmp_path)
    times.keep_drafts("greedy", "head", KChooser(3))  # which saw none
    assert not list(tmp_path.iterdir())
    times.keep_drafts("greedy", "head", chooser)
    again = StepTimes({"machine": "one"}, tmp_path)
    known, other = KChooser(3), KChooser(3)
    again.recall_drafts("greedy", "head", known)
    again.recall_drafts("sampled", "head", other)
    assert known.survival.chances(3) == pytest.approx([0.8, 0.4, 0.1], abs=0.02)
    assert known.survival.counts()[0][0] == pytest.approx(adaptive_k.RECALLED_WEIGHT)
    assert (known.wait, other.wait) == (256, adaptive_k.FIRST_WAIT)
    assert other.survival.chances(3) == pytest.approx(Survival(3).chances(3))
    num_steps = 2 * adaptive_k.RECALLED_WEIGHT
    known.survival.observe(3, num_steps, num_steps, np.zeros(3, int))
    assert known.survival.chances(3)[0] < 0.1
    # of another head of these shapes
    retrained = KChooser(3)
    again.recall_drafts("greedy", "head 2", retrained)
    assert retrained.survival.chances(3) == pytest.approx(Survival(3).chances(3))
    digests = {head_digest(head.params) for head in (tiny.head(), tiny.head(seed=9), tiny.head())}
    assert len(digests) == 2
    # of another K, or damaged
    values = [[1, 1], [1, 1], [128]], [[1, "x", 1]] * 3, 3, [[1, 1, 1], [1, 1], [128]]
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    (key,) = content["drafts"]
    for drafts in ({key: values[0]}, {key: values[1]}, {key: values[2]}, {key: values[3]}, []):
        file.write_text(json.dumps(content | {"drafts": drafts}))
        damaged = StepTimes({"machine": "one"}, tmp_path)
        fresh = KChooser(3)
        damaged.recall_drafts("greedy", "head", fresh)
        assert fresh.wait == adaptive_k.FIRST_WAIT
        assert fresh.survival.chances(3) == pytest.approx(Survival(3).chances(3))


def test_engines_hand_on_what_was_accepted(tmp_path, monkeypatch):
    """Where drafting does not pay, the second engine knows from its first step on."""
    monkeypatch.setattr(
        StepTimes, "get", lambda self, ks, *_: {0: 1.0, 1: 1.7, 3: 1.75, 4: 1.8} if ks else {}
    )

    def steps_by_k() -> dict:
        engine = Engine(
            tiny.target(), make_drafter(tiny.head(), 4), tiny.head().params, adaptive_k=True,
            step_times=tmp_path, max_batch=1,
        )  # fmt: skip
        for _ in engine.run([Request(prompt=PROMPTS[0], max_new_tokens=80, stop_ids=())]):
            pass
        return dict(engine.stats.steps_by_k)

    first, second = steps_by_k(), steps_by_k()
    assert first[0] and len(first) > 1
    assert set(second) == {0}


# ---------------------------------------------------------------- step times


def test_times_are_kept_by_machine_and_models(tmp_path):
    target, head = tiny.target(), tiny.head()
    spec = Engine(target, make_drafter(head, 3), head.params, adaptive_k=True).spec
    about = what_times_depend_on(spec, (target.params, head.params), 1)
    calls = []

    def measure(k):
        calls.append(k)
        # the first calls compile: they do not count, however fast they seem; then every second
        # round is of a faster machine
        return (1.0 + k) * (1 + (len(calls) - 1) // 3 % 2) if len(calls) > 3 else 0.001

    times = StepTimes(about, tmp_path / "new")
    seconds = times.get([0, 1, 3], 2, 200, "greedy", measure)
    assert calls == [0, 1, 3] * 4
    assert seconds == pytest.approx({k: seconds[0] * (1 + k) for k in (0, 1, 3)})
    assert 1 <= seconds[0] <= 2
    assert times.get([0, 1, 3], 2, 1024, "greedy", measure) is seconds
    again = StepTimes(about, tmp_path / "new").get([0, 1, 3], 2, 100, "greedy", measure)
    assert again == pytest.approx(seconds) and again is not seconds
    assert len(calls) == 12
    times.get([0, 1, 3], 2, 200, "sampled", measure)
    times.get([0, 1], 2, 200, "greedy logprobs", measure)
    assert len(calls) == 12 + 12 + 8
    # what a file says of other models does not count, nor does a damaged file
    other = tiny.head(dim=40)
    changed = what_times_depend_on(spec, (target.params, other.params), 1)
    assert changed != about and changed["device"] == about["device"]
    assert not StepTimes(changed, tmp_path / "new")._own
    beside = what_times_depend_on(spec, (target.params, head.params), 2)
    assert not StepTimes(beside, tmp_path / "new")._own
    (file,) = (tmp_path / "new").iterdir()
    content = json.loads(file.read_text())
    assert content["about"] == about and "2 rows, 1024 slots, greedy" in content["times"]
    name, fine = "2 rows, 1024 slots, greedy", [[{"1": 0.5}], 0.1, 7.0]
    file.write_text(json.dumps({"times": {name: fine}, "drafts": {}}))
    (own,) = StepTimes(about, tmp_path / "new")._own.values()
    assert (own.seconds, own.cost, own.decoded) == ({1: 0.5}, 0.1, 7.0)
    damaged: list = ["", "[]", {name: 3}, {name: fine[:2]}, {name: [[], 0.1, 7.0]}]
    rounds = {"x": 1}, {"1": []}, *({"1": x} for x in (0.0, -1.0, float("nan"), float("inf")))
    damaged += [{name: [[by_k], 0.1, 7.0]} for by_k in rounds]
    damaged += [{name: [[{"1": 0.5}, {"2": 0.5}], 0.1, 7.0]}, {name: [[{"1": 0.5}], -0.1, 7.0]}]
    damaged += [{wrong: fine} for wrong in ("a", "0 rows, 256 slots, greedy", "2 rows, greedy")]
    damaged += [{f"2 rows, {'9' * 400} slots, greedy": fine}, {name: [[{"1": 1e300}], 0.1, 7.0]}]
    for times in damaged:
        text = times if isinstance(times, str) else json.dumps({"times": times, "drafts": {}})
        file.write_text(text)
        assert not StepTimes(about, tmp_path / "new")._own, text
    # numbers as no run has them
    wait, ones = [128.0], [1.0, 1.0]
    for drafts in ([ones, ones, wait], [ones, [1.5, 1.0], wait], [ones, [1.0], wait]):
        file.write_text(json.dumps({"times": {name: fine}, "drafts": {"greedy head": drafts}}))
        assert bool(StepTimes(about, tmp_path / "new")._own) == (drafts[1] == ones)
    # a folder that cannot be made: measured once for this process
    (tmp_path / "file").write_text("")
    times = StepTimes(about, tmp_path / "file" / "below")
    assert times.get([0], 1, 9, "greedy", measure) is times.get([0], 1, 9, "greedy", measure)


def test_new_rows_and_slots_borrow_the_nearest_times(tmp_path):
    """They are measured once 512 steps were taken with them."""
    calls = []

    def measure(k):
        calls.append(k)
        return 1.0 + k + len(calls)

    times = StepTimes({"machine": "one"}, tmp_path)
    get = functools.partial(times.get, [0, 3], measure=measure)
    small, large = get(2, 200, "greedy"), get(2, 200, "sampled")
    assert small != large and len(calls) == 2 * 8
    for rows, slots in ((1, 100), (2, 1025), (8, 9000)):
        assert get(rows, slots, "greedy") == small and get(rows, slots, "sampled") == large
        assert get(rows, slots, "greedy") is get(rows, slots, "greedy")
    times.count(8, 9000, "greedy", 511, 1.0)
    times.count(8, 9000, "sampled", 600, 1.0)
    times.count(8, 4000, "greedy", 600, 1.0)
    assert get(8, 9000, "greedy") == small and len(calls) == 2 * 8
    times.count(8, 8000, "greedy", 1, 1.0)  # of one size with 9,000
    measured = get(8, 9000, "greedy")
    assert len(calls) == 3 * 8 and measured not in (small, large)
    # nearer in rows
    assert get(6, 100, "greedy") == measured and get(3, 9000, "greedy") == small
    # as near in rows, nearer in slots
    assert get(4, 200, "greedy") == small and get(4, 16_000, "greedy") == measured
    assert len(calls) == 3 * 8
    # too far in rows; other numbers of drafts
    assert get(33, 9000, "greedy") not in (small, measured) and len(calls) == 4 * 8
    assert set(times.get([0, 1], 2, 300, "greedy", measure)) == {0, 1} and len(calls) == 5 * 8
    # what was counted is kept with the times
    again = StepTimes({"machine": "one"}, tmp_path)
    assert again.get([0, 3], 8, 9000, "greedy", measure) == measured
    assert len(calls) == 5 * 8
    again.get([0, 3], 8, 9000, "sampled", measure)
    assert len(calls) == 6 * 8


def test_a_further_round_is_measured_now_and_then(tmp_path, monkeypatch):
    """For a two-hundredth of the time; where it must be compiled first, after a long time."""
    clock, calls = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def measure(k):
        calls.append(k)
        clock[0] += 0.25
        return slowness * (1.0 + k)

    def get(is_compiled: bool) -> dict[int, float]:
        return dict(times.get([0, 3], 2, 200, "greedy", measure, lambda k: is_compiled))

    times, slowness = StepTimes({"machine": "one"}, tmp_path), 1.0
    assert get(False) == pytest.approx({0: 1.0, 3: 4.0})
    waits = 2 * 2 * 0.25 / step_times.PART_OF_TIME  # both are called twice
    assert waits < step_times.COMPILING_WAITS
    before = len(calls)
    times.count(2, 200, "greedy", 5, waits - 1)
    times.count(2, 200, "sampled", 5, 9e9)  # another batch
    assert get(True) == get(False) == {0: 1.0, 3: 4.0} and len(calls) == before
    times.count(2, 200, "greedy", 5, 1.0)
    get(False)
    assert len(calls) == before
    get(True)
    assert calls[before:] == [0, 3, 0, 3]
    get(True)
    assert len(calls) == before + 4
    own = times._own["2 rows, 1024 slots, greedy"]
    own.decoded += step_times.COMPILING_WAITS  # of other processes
    get(False)
    assert len(calls) == before + 4
    times.count(2, 200, "greedy", 5, step_times.COMPILING_WAITS)
    get(False)
    assert len(calls) == before + 8 and (own.decoded, own.decoded_here) == (0, 0)
    # a process that has compiled once for it has the programs, and waits for longer where not
    own.compiling = 2 * step_times.COMPILING_WAITS * step_times.PART_OF_TIME
    times.count(2, 200, "greedy", 5, 1.5 * step_times.COMPILING_WAITS)
    get(False)
    assert len(calls) == before + 8
    # a machine that others slow down is so for all; of ratios the middle one counts
    seconds = times.get([0, 3], 2, 200, "greedy", measure)
    for _ in range(step_times.NUM_ROUNDS):
        slowness = 2.0
        times.count(2, 200, "greedy", 5, waits)
        get(True)
    assert seconds == pytest.approx({0: 2.0, 3: 8.0})
    assert len(times._own["2 rows, 1024 slots, greedy"].rounds) == step_times.NUM_ROUNDS
    # what was measured and decoded since is kept
    chooser = KChooser(3)
    chooser.survival.observe(3, 1, 1, np.array([1, 0, 0]))
    times.count(2, 200, "greedy", 5, 3.0)
    times.keep_drafts("greedy", "head", chooser)
    again = StepTimes({"machine": "one"}, tmp_path)
    assert again.get([0, 3], 2, 200, "greedy", lambda k: 99.0) == pytest.approx(seconds)
    assert again._own["2 rows, 1024 slots, greedy"].decoded == 3.0


def test_of_several_rounds_the_middle_ratios_count():
    rounds = [{0: 1.0, 3: 4.0}] * 3 + [{0: 9.0, 3: 12.0}] * 2
    measured = step_times.MeasuredTimes(rounds)
    assert measured.seconds == pytest.approx({0: 1.0, 3: 4.0})
    seconds = measured.seconds
    for _ in range(2):
        measured.add({0: 9.0, 3: 12.0}, 0.5)
    assert seconds is measured.seconds and seconds[3] / seconds[0] == pytest.approx(12 / 9)
    assert (measured.cost, measured.decoded) == (0.5, 0.0)


@pytest.mark.parametrize("seconds, num_rounds", [(0.0, 3), (1e9, 32)])
def test_short_steps_are_measured_in_more_rounds(tmp_path, monkeypatch, seconds, num_rounds):
    """A few of them may all be of one slow moment; this one ends after ten."""
    monkeypatch.setattr(step_times, "MEASURED_SECONDS", seconds)
    calls = []

    def measure(k):
        calls.append(k)
        return (1.0 + k) * (1 + k * (len(calls) < 2 * 11))

    times = StepTimes({"machine": "one"}, tmp_path).get([0, 3], 1, 256, "greedy", measure)
    assert len(calls) == 2 * (1 + num_rounds)
    assert times[3] / times[0] == pytest.approx(4.0 if num_rounds == 32 else 16.0)


def test_engines_in_threads_measure_once(tmp_path):
    """The second one waits where it knows nothing, and borrows what the first has measured."""
    times, calls = StepTimes({"machine": "one"}, tmp_path), []
    began, go_on = threading.Event(), threading.Event()

    def measure(k):
        began.set()
        assert go_on.wait(60)
        calls.append(k)
        return 1.0 + k

    get = functools.partial(times.get, [0, 3], slots=200, sampling="greedy")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(get, num_rows=3, measure=measure)
        assert began.wait(60)
        second = pool.submit(get, num_rows=2, measure=measure)
        go_on.set()
    assert first.result() == second.result() and len(calls) == 8
    # where there are times to borrow, nobody waits
    times.count(2, 200, "greedy", 512, 1.0)
    began.clear()
    go_on.clear()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        third = pool.submit(get, num_rows=2, measure=measure)
        assert began.wait(60)
        borrowed = get(num_rows=2, measure=lambda k: 1 / 0)
        go_on.set()
    assert borrowed is second.result() and third.result() is not borrowed and len(calls) == 16


def test_engines_of_a_process_share_what_is_kept(tmp_path):
    """What the one has learned the next one knows, written or not."""

    def engine(folder, head) -> Engine:
        drafter = make_drafter(head, 4)
        return Engine(
            tiny.target(), drafter, head.params, adaptive_k=True, step_times=folder, max_batch=1
        )

    one, same = engine(tmp_path, tiny.head()), engine(tmp_path, tiny.head())
    retrained, other = engine(tmp_path, tiny.head(seed=9)), engine(tmp_path / "b", tiny.head())
    assert one._step_times is same._step_times is retrained._step_times is not other._step_times
    assert one._head == same._head != retrained._head


def test_an_engine_measures_again_when_it_has_decoded(tmp_path, monkeypatch):
    """Where all programs are compiled: an engine that has only loaded times has compiled one K."""
    get, rounds = StepTimes.get, []

    def noting(self, *arguments):
        before = len(next(iter(self._own.values())).rounds) if self._own else 0
        seconds = get(self, *arguments)
        (own,) = self._own.values()
        rounds.append(len(own.rounds) - before)
        return seconds

    def decode() -> Engine:
        engine = Engine(
            tiny.target(), make_drafter(tiny.head(), 4), tiny.head().params, adaptive_k=True,
            step_times=tmp_path, max_batch=1, max_steps=4,
        )  # fmt: skip
        dict(engine.run([Request(prompt=PROMPTS[0], max_new_tokens=40, stop_ids=())]))
        return engine

    monkeypatch.setattr(StepTimes, "get", noting)
    monkeypatch.setattr(step_times, "PART_OF_TIME", 1e9)  # a further round is due at once
    first = decode()
    assert rounds[0] > 0 and set(rounds[1:]) <= {0, 1} and sum(rounds[1:]) > 3
    (own,) = first._step_times._own.values()
    assert 0 <= own.decoded < first.stats.decode_seconds
    rounds.clear()
    monkeypatch.setattr(Batch, "has_compiled_steps", lambda self, k: k == 4)
    decode()
    assert set(rounds) == {0}
    # and what compiles is no decoding
    decoded = own.decoded
    monkeypatch.setattr(Batch, "has_compiled_steps", lambda self, k: False)
    decode()
    assert own.decoded == decoded


def test_what_a_call_costs_is_no_part_of_a_step(tmp_path, monkeypatch):
    """By a clock that decoding alone moves: two milliseconds a call, the rest its steps."""
    clock = [0.0]
    take_steps = Batch._take_steps

    def ticking(self, spec, until_done, max_steps):
        num_steps = take_steps(self, spec, until_done, max_steps)
        clock[0] += 1e-3 * (2.0 + (0.5 + 0.25 * spec.k) * int(num_steps))
        return num_steps

    monkeypatch.setattr(Batch, "_take_steps", ticking)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    engine = Engine(
        tiny.target(), make_drafter(tiny.head(), 4), tiny.head().params, adaptive_k=True,
        step_times=tmp_path, max_batch=1,
    )  # fmt: skip
    dict(engine.run([Request(prompt=PROMPTS[0], max_new_tokens=80, stop_ids=())]))
    (own,) = engine._step_times._own.values()
    times = own.seconds
    wanted = {k: 1e-3 * (0.5 + 0.25 * k) for k in (0, 1, 3, 4)}
    assert times == pytest.approx(wanted)
    # of as many steps as take six milliseconds
    batch = engine._batch
    assert list(batch._call_seconds.values()) == pytest.approx([2e-3])
    for program, count in batch._timed_steps.items():
        of_a_step = 1e-3 * (0.5 + 0.25 * program[0].k)
        assert count == pytest.approx(6e-3 / of_a_step, abs=1)
    assert engine.stats.measure_seconds > 0 and engine.stats.decode_seconds > 0


def test_measuring_leaves_the_rows_alone(tmp_path):
    engine = Engine(
        tiny.target(), make_drafter(tiny.head(), 4), tiny.head().params, adaptive_k=True,
        step_times=tmp_path, max_batch=2, max_steps=3,
    )  # fmt: skip
    for prompt in PROMPTS[:2]:
        engine.add(Request(prompt=prompt, max_new_tokens=40, stop_ids=()))
    engine.step()
    batch = engine._batch
    names = [f.name for f in dataclasses.fields(batch.state) if f.name not in ("cache", "draft")]

    def arrays() -> list:
        lengths = batch.state.cache.length, batch.state.draft.cache.length
        return jax.device_get([lengths, *(getattr(batch.state, name) for name in names)])

    before = arrays()
    seconds = [batch.step_seconds(k) for k in (0, 2, 4, 0, 2, 4)][3:]  # the first compile
    assert all(0 < s < 1 for s in seconds)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, arrays())))
    answers = {o.request_id: o.answer for _ in range(99) for o in engine.step() if o.answer}
    for i, prompt in enumerate(PROMPTS[:2]):
        assert answers[i].output_token_ids == tiny.greedy(tuple(prompt), 40)


# ---------------------------------------------------------------- the text
