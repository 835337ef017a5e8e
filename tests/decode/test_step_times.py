"""What is kept of a machine and a pair of models: seconds of a step, and what was accepted."""

import concurrent.futures
import dataclasses
import functools
import itertools
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
    survival = Survival(3)
    survival.observe(3, 600, 6000, np.array([4800, 2400, 600]))
    times = StepTimes({"machine": "one"}, tmp_path)
    times.keep_drafts("greedy", survival)
    again = StepTimes({"machine": "one"}, tmp_path)
    known, other = KChooser(3), KChooser(3)
    again.recall_drafts("greedy", known)
    again.recall_drafts("sampled", other)
    assert known.survival.chances(3) == pytest.approx([0.8, 0.4, 0.1], abs=0.02)
    assert known.survival.counts()[0][0] == pytest.approx(adaptive_k.RECALLED_TOKENS)
    assert other.survival.chances(3) == pytest.approx(Survival(3).chances(3))
    num_steps = 2 * adaptive_k.RECALLED_TOKENS
    known.survival.observe(3, num_steps, num_steps, np.zeros(3, int))
    assert known.survival.chances(3)[0] < 0.1
    # of another head of these shapes
    retrained = KChooser(3)
    StepTimes({"machine": "one"}, tmp_path, "head 2").recall_drafts("greedy", retrained)
    assert retrained.survival.chances(3) == pytest.approx(Survival(3).chances(3))
    digests = {head_digest(head.params) for head in (tiny.head(), tiny.head(seed=9), tiny.head())}
    assert len(digests) == 2
    # of another K, or damaged
    values = [[1, 1], [1, 1]], [[1, "x", 1]] * 2, 3, [[1, 1, 1], [1, 1]]
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    (key,) = content["drafts"]
    for drafts in ({key: values[0]}, {key: values[1]}, {key: values[2]}, {key: values[3]}, []):
        file.write_text(json.dumps(content | {"drafts": drafts}))
        damaged = StepTimes({"machine": "one"}, tmp_path)
        fresh = KChooser(3)
        damaged.recall_drafts("greedy", fresh)
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
        # the first calls compile: they do not count, however fast they seem
        return 1.0 + k - 0.01 * len(calls) if len(calls) > 3 else 0.001

    times = StepTimes(about, tmp_path / "new")
    seconds = times.get([0, 1, 3], 2, 200, "greedy", measure)
    assert calls == [0, 1, 3] * 9
    # a quarter of the eight rounds was faster, or would have been
    assert seconds == pytest.approx(
        {k: 1 + k - 0.01 * (19.75 + i) for i, k in enumerate((0, 1, 3))}
    )
    assert times.get([0, 1, 3], 2, 256, "greedy", measure) is seconds
    assert StepTimes(about, tmp_path / "new").get([0, 1, 3], 2, 100, "greedy", measure) == seconds
    assert len(calls) == 27
    times.get([0, 1, 3], 2, 200, "sampled", measure)
    times.get([0, 1], 2, 200, "greedy logprobs", measure)
    assert len(calls) == 27 + 27 + 18
    # what a file says of other models does not count, nor does a damaged file
    other = tiny.head(dim=40)
    changed = what_times_depend_on(spec, (target.params, other.params), 1)
    assert changed != about and changed["device"] == about["device"]
    assert not StepTimes(changed, tmp_path / "new")._own
    beside = what_times_depend_on(spec, (target.params, head.params), 2)
    assert not StepTimes(beside, tmp_path / "new")._own
    (file,) = (tmp_path / "new").iterdir()
    content = json.loads(file.read_text())
    assert content["about"] == about and "2 rows, 256 slots, greedy" in content["times"]
    name, fine = "2 rows, 256 slots, greedy", [256, {"1": 0.5}]
    file.write_text(json.dumps({"times": {name: fine}, "drafts": {}}))
    (own,) = StepTimes(about, tmp_path / "new")._own.values()
    assert own.slots == 256 and own.seconds == {1: 0.5}
    damaged: list = ["", "[]", {name: 3}, {name: [256, {"x": 1}]}, {name: [256, {"1": []}]}]
    damaged += [{name: [256, {"1": x}]} for x in (0.0, -1.0, float("nan"), float("inf"))]
    damaged += [{wrong: fine} for wrong in ("a", "0 rows, 256 slots, greedy", "2 rows, greedy")]
    for times in damaged:
        text = times if isinstance(times, str) else json.dumps({"times": times, "drafts": {}})
        file.write_text(text)
        assert not StepTimes(about, tmp_path / "new")._own, text
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
    assert small != large and len(calls) == 2 * 18
    for rows, slots in ((1, 100), (2, 257), (8, 9000)):
        assert get(rows, slots, "greedy") == small and get(rows, slots, "sampled") == large
        assert get(rows, slots, "greedy") is get(rows, slots, "greedy")
    times.count(8, 9000, "greedy", 511)
    times.count(8, 9000, "sampled", 600)
    times.count(8, 4000, "greedy", 600)
    assert get(8, 9000, "greedy") == small and len(calls) == 2 * 18
    times.count(8, 8000, "greedy", 1)  # of one size with 9,000
    measured = get(8, 9000, "greedy")
    assert len(calls) == 3 * 18 and measured not in (small, large)
    # nearer in rows
    assert get(6, 100, "greedy") == measured and get(3, 9000, "greedy") == small
    # as near in rows, nearer in slots
    assert get(4, 200, "greedy") == small and get(4, 16_000, "greedy") == measured
    assert len(calls) == 3 * 18
    # too far in rows; other numbers of drafts
    assert get(33, 9000, "greedy") not in (small, measured) and len(calls) == 4 * 18
    assert set(times.get([0, 1], 2, 300, "greedy", measure)) == {0, 1} and len(calls) == 5 * 18
    # what was counted is kept with the times
    again = StepTimes({"machine": "one"}, tmp_path)
    assert again.get([0, 3], 8, 9000, "greedy", measure) == measured
    assert len(calls) == 5 * 18
    again.get([0, 3], 8, 9000, "sampled", measure)
    assert len(calls) == 6 * 18


def test_borrowed_times_follow_what_is_observed(tmp_path):
    """What was never observed keeps its ratio to what was."""
    times = StepTimes({"machine": "one"}, tmp_path)
    lent = times.get([0, 1, 3], 4, 200, "greedy", lambda k: 1.0 + k)
    assert lent == {0: 1.0, 1: 2.0, 3: 4.0}
    borrowed = times.get([0, 1, 3], 2, 900, "greedy", lambda k: 0.0)
    for _ in range(20):
        times.observe(0, 2, 900, "greedy", 3.0)
    times.observe(0, 2, 600, "greedy", 99.0)  # other slots
    assert borrowed == pytest.approx({0: 3.0, 1: 6.0, 3: 12.0})
    for _ in range(20):
        times.observe(3, 2, 900, "greedy", 4.0)
    assert borrowed[3] == pytest.approx(4.0) and borrowed[0] == pytest.approx(borrowed[1] / 2)
    assert lent == {0: 1.0, 1: 2.0, 3: 4.0}
    assert times.get([0, 1, 3], 2, 900, "greedy", lambda k: 0.0) is borrowed


@pytest.mark.parametrize("seconds, num_rounds", [(0.0, 8), (1e9, 32)])
def test_short_steps_are_measured_in_more_rounds(tmp_path, monkeypatch, seconds, num_rounds):
    """Eight rounds of them may all be of one slow moment; this one ends after ten."""
    monkeypatch.setattr(step_times, "MEASURED_SECONDS", seconds)
    calls = []

    def measure(k):
        calls.append(k)
        return (1.0 + k) * (1 + k * (len(calls) < 2 * 11))

    times = StepTimes({"machine": "one"}, tmp_path).get([0, 3], 1, 256, "greedy", measure)
    assert len(calls) == 2 * (1 + num_rounds)
    assert times[3] == (4.0 if num_rounds == 32 else 16.0)


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
    assert first.result() == second.result() and len(calls) == 18
    # where there are times to borrow, nobody waits
    times.count(2, 200, "greedy", 512)
    began.clear()
    go_on.clear()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        third = pool.submit(get, num_rows=2, measure=measure)
        assert began.wait(60)
        borrowed = get(num_rows=2, measure=lambda k: 1 / 0)
        go_on.set()
    assert borrowed is second.result() and third.result() is not borrowed and len(calls) == 36


def test_the_quantile_is_numpys():
    times = np.random.default_rng(3).random(16)
    for count in range(17):
        filled = [*times[:count], *[0.7] * (step_times.ENOUGH - count)]
        want = np.quantile(filled, step_times.QUANTILE)
        np.testing.assert_allclose(step_times._quantile(times[:count].tolist(), 0.7), want)


def test_times_follow_what_is_observed(tmp_path):
    times = StepTimes({"machine": "one"}, tmp_path)
    seconds = times.get([0, 3], 2, 512, "greedy", lambda k: 1.0 + k)
    assert seconds == {0: 1.0, 3: 4.0}
    # other slots, rows, ways of sampling and numbers of drafts are not those that were measured
    for other in ((0, 2, 1024, "greedy"), (0, 1, 512, "greedy"), (0, 2, 512, "sampled"),
                  (1, 2, 512, "greedy")):  # fmt: skip
        times.observe(*other, seconds=9.0)
    assert seconds == {0: 1.0, 3: 4.0}
    # a slow moment changes nothing
    times.observe(3, 2, 512, "greedy", seconds=40.0)
    assert seconds == {0: 1.0, 3: 4.0}
    # a machine that became slower is so for all; what was not observed keeps its ratio
    for _ in range(20):
        times.observe(0, 2, 512, "greedy", seconds=2.0)
    assert seconds == pytest.approx({0: 2.0, 3: 8.0})
    # one K alone is slower than it was measured
    for _ in range(20):
        times.observe(3, 2, 512, "greedy", seconds=10.0)
        times.observe(0, 2, 512, "greedy", seconds=2.0)
    assert seconds == pytest.approx({0: 2.0, 3: 10.0}, rel=0.05)
    # a machine that became faster is so for all, which a few steps show
    for _ in range(4):
        times.observe(0, 2, 512, "greedy", seconds=0.5)
    assert seconds == pytest.approx({0: 0.5, 3: 2.5}, rel=0.1)
    own = times._own["2 rows, 1024 slots, greedy"]
    assert (len(own.paces), len(own.shares[3])) == (8, 16)
    times.keep_drafts("greedy", Survival(3))
    survival = Survival(3)
    survival.observe(3, 1, 1, np.array([1, 0, 0]))
    times.keep_drafts("greedy", survival)
    again = StepTimes({"machine": "one"}, tmp_path)
    assert again.get([0, 3], 2, 512, "greedy", lambda k: 99.0) == seconds


def test_an_engine_observes_its_steps(tmp_path, monkeypatch):
    """Of programs that were compiled before, and of enough steps at once."""
    observed = []
    monkeypatch.setattr(StepTimes, "observe", lambda self, *args: observed.append(args))
    monkeypatch.setattr(StepTimes, "get", lambda self, ks, *_: dict.fromkeys(ks, 1.0))
    counts = itertools.cycle([16, 3, 16, 16])

    def choose(self, seconds):
        self.k, self._seconds = 4, dict.fromkeys(range(5), 1.0)
        self.steps_left = next(counts)
        return self.k

    monkeypatch.setattr(KChooser, "choose", choose)
    engine = Engine(
        tiny.target(), make_drafter(tiny.head(), 4), tiny.head().params, adaptive_k=True,
        step_times=tmp_path, max_batch=1,
    )  # fmt: skip
    request = Request(prompt=PROMPTS[0], max_new_tokens=80, stop_ids=())
    ((_, answer),) = engine.run([request])
    assert 1 <= len(observed) < engine.stats.num_steps / adaptive_k.FIRST_STEPS
    counted = sum(engine._step_times._num_steps.values())
    assert counted == engine.stats.num_steps
    assert all(args[:2] == (4, 1) and args[3] == "greedy" and 0 < args[4] < 1 for args in observed)
    # the first call compiled, and one took three steps
    assert len(observed) <= -(-engine.stats.num_steps // 16)


def test_what_a_call_costs_is_no_part_of_a_step(tmp_path, monkeypatch):
    """By a clock that decoding alone moves: two seconds a call, the rest its steps."""
    clock, observed = [0.0], []
    take_steps, observe = Batch._take_steps, StepTimes.observe

    def ticking(self, spec, until_done, max_steps):
        num_steps = take_steps(self, spec, until_done, max_steps)
        clock[0] += 2.0 + (0.5 + 0.25 * spec.k) * int(num_steps)
        return num_steps

    def noting(self, k, *arguments):
        observed.append((k, arguments[-1]))
        observe(self, k, *arguments)

    monkeypatch.setattr(Batch, "_take_steps", ticking)
    monkeypatch.setattr(StepTimes, "observe", noting)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    engine = Engine(
        tiny.target(), make_drafter(tiny.head(), 4), tiny.head().params, adaptive_k=True,
        step_times=tmp_path, max_batch=1,
    )  # fmt: skip
    dict(engine.run([Request(prompt=PROMPTS[0], max_new_tokens=80, stop_ids=())]))
    (own,) = engine._step_times._own.values()
    times = own.seconds
    assert observed and set(times) == {0, 1, 3, 4}
    for k, seconds in [*observed, *times.items()]:
        assert seconds == pytest.approx(0.5 + 0.25 * k)
    # a call that seems to cost more than these steps took is timed again
    assert engine._batch._call_seconds and set(engine._batch._call_seconds.values()) == {2.0}
    for program in engine._batch._call_seconds:
        engine._batch._call_seconds[program] = 99.0
    engine.add(Request(prompt=PROMPTS[0], max_new_tokens=80, stop_ids=()))
    engine.max_steps = 4
    engine.step()
    assert engine._batch.seconds_a_step(6.0, 4) == 1.0
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
