"""Engines side by side answer as one does, whichever engine has a request."""

import asyncio
import collections
import contextvars
import inspect
import threading

import jax
import jax.numpy as jnp
import pytest
import tiny
from groups import requests

from peagle_jax.decode import first_call, parallel_engine
from peagle_jax.decode.batch import Batch
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.parallel_engine import (
    MOST_STEPS,
    EngineOptions,
    ParallelEngine,
    default_threads,
    make_engine,
)
from peagle_jax.decode.requests import Request
from peagle_jax.decode.serving import AsyncEngine
from peagle_jax.decode.step_times import ROUNDS
from peagle_jax.types import InputError

CONTEXT = {"context": 640}


class SomebodysOwn:
    """A drafter that is not of this package."""

    k = 3

    def init(self, batch, cache_size): ...
    def prefill(self, params, state, tokens, aux_hidden_states, count): ...
    def step(self, params, state, tokens, aux_hidden_states, count): ...


def engine(num_threads=2, max_batch=5, **options):
    target, head = tiny.pair("peagle", **CONTEXT)
    drafter = make_drafter(head, 3, "peagle")
    return make_engine(
        target, drafter, head.params, max_batch=max_batch, num_threads=num_threads, **options
    )


def texts(answers):
    return {place: answer.output_token_ids for place, answer in answers}


@pytest.fixture(scope="module")
def alone():
    """What one engine answers."""
    one = engine(1)
    assert isinstance(one, Engine)
    return texts(one.run(requests(23)))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_answers_are_those_of_one_engine(num_threads, alone):
    several = engine(num_threads)
    assert isinstance(several, ParallelEngine)
    assert [e.max_batch for e in several.engines] == {2: [3, 2], 3: [2, 2, 1]}[num_threads]
    assert texts(several.run(requests(23))) == alone
    assert not several.has_work and several.num_running == several.num_waiting == 0
    assert not several._engine_of  # nothing is kept of requests that are done
    # everyone did something; the batch took the steps of the slowest
    steps = [e.stats.num_steps for e in several.engines]
    assert min(steps) > 0 and several.stats.num_steps == max(steps)
    assert several.stats.num_threads == num_threads
    assert sum(several.stats.steps_by_k.values()) == sum(steps)
    assert several.stats.decode_seconds < sum(e.stats.decode_seconds for e in several.engines)


def test_they_decode_at_the_same_time(monkeypatch):
    """An engine waits within its step until the other is in one, too."""
    together = threading.Barrier(2, timeout=60)
    step = Engine.step

    def waiting(self):
        if not self.stats.num_steps:
            together.wait()
        return step(self)

    monkeypatch.setattr(Engine, "step", waiting)
    several = engine(max_batch=2)
    assert len(list(several.run(requests(2)))) == 2


def test_a_request_goes_where_a_row_is_free():
    """The third request does not wait for the long one that an engine began with."""
    several = engine(max_batch=2)
    wanted = [Request(prompt=[5], max_new_tokens=n, stop_ids=()) for n in (300, 3, 4, 5)]
    order = [place for place, _ in several.run(wanted)]
    assert order[-1] == 0
    assert {e.stats.num_steps > 0 for e in several.engines} == {True}


def test_cancelling():
    """In the queue, in an engine, and when it is done."""
    several = engine(max_batch=2, max_steps=2)
    long = [Request(prompt=[7, i], max_new_tokens=200, stop_ids=()) for i in range(3)]
    ids = [several.add(request) for request in long]
    assert not several.step() or several.has_work
    several.cancel(ids[2])  # both engines have one row, so that it waits
    several.cancel(ids[0])
    several.cancel(12345)
    reasons = {}
    while several.has_work:
        for output in several.step():
            if output.answer:
                reasons[output.request_id] = output.answer.finish_reason, output.answer.num_tokens
    assert reasons[ids[2]] == ("cancelled", 0)
    assert reasons[ids[0]][0] == "cancelled" and 0 < reasons[ids[0]][1] < 200
    assert reasons[ids[1]] == ("length", 200)
    several.cancel(ids[1])
    assert not several.has_work and not any(e._waiting._cancelled for e in several.engines)


def test_streams_of_tasks(alone):
    """Tasks that share the engines, one of which stops listening."""
    several = engine()
    wanted = requests(23)

    async def ask(server, place):
        tokens = []
        streaming = Request(**{**vars(wanted[place]), "stream": True})
        async for output in server.stream(streaming):
            tokens += output.new_token_ids
            if place == 4:
                break
        return tokens

    async def all_tasks():
        async with AsyncEngine(several) as server:
            return await asyncio.gather(*(ask(server, place) for place in range(9)))

    for place, tokens in enumerate(asyncio.run(all_tasks())):
        assert tokens == alone[place] or place == 4
    assert several.max_steps == 8


def test_an_error_in_a_thread_is_raised_after_what_others_have_done(monkeypatch):
    several = engine(max_batch=2)
    step, begun = Engine.step, threading.Event()

    def failing(self):
        if self is several.engines[1]:
            begun.wait(60)
            raise RuntimeError("out of luck")
        outputs = step(self)
        begun.set()
        return outputs

    monkeypatch.setattr(Engine, "step", failing)
    answered = []
    with pytest.raises(RuntimeError, match="out of luck"):
        for place, _ in several.run([Request(prompt=[3], max_new_tokens=4) for _ in range(2)]):
            answered.append(place)
    assert answered == [0]


def test_a_request_does_not_wait_while_an_engine_is_idle(monkeypatch):
    """It comes from another thread in the middle of the other engine's step."""
    several = engine(max_batch=2)
    step, begun, answered = Engine.step, threading.Event(), threading.Event()
    in_time = []

    def slow(self):
        if self is several.engines[0]:
            begun.set()
            in_time.append(answered.wait(30))
        return step(self)

    monkeypatch.setattr(Engine, "step", slow)
    first = several.add(Request(prompt=[3], max_new_tokens=2))

    def decode():
        while several.has_work:
            if any(output.request_id != first for output in several.step()):
                answered.set()

    thread = threading.Thread(target=decode)
    thread.start()
    assert begun.wait(60)
    several.add(Request(prompt=[4], max_new_tokens=2))
    thread.join(90)
    assert not thread.is_alive() and all(in_time) and not several._engine_of


def test_a_request_that_cannot_begin_goes_to_another_engine(monkeypatch):
    """The engine that has it has no memory left for it, say."""
    several = engine(max_batch=4, max_steps=1)
    memory = several.engines[0]._memory
    monkeypatch.setattr(memory, "num_allowed", lambda asked, running, held: 0 if running else 1)
    for number, limit in enumerate((100, 2, 2)):  # the first and the third are one engine's
        several.add(Request(prompt=[3 + number], max_new_tokens=limit, stop_ids=()))
    ends = []
    while several.has_work:
        ends += [out.request_id for out in several.step() if out.answer is not None]
    assert ends == [1, 2, 0] and not several._engine_of


def test_step_times_are_measured_once(tmp_path, monkeypatch):
    """Engines that choose K share what they measure; texts do not depend on K."""
    measured = []
    step_seconds = Batch.step_seconds

    def noting(self, k):
        measured.append((len(self.rows), self.slots, k))
        return step_seconds(self, k)

    monkeypatch.setattr(Batch, "step_seconds", noting)
    several = engine(max_batch=2, adaptive_k=True, step_times=tmp_path)
    wanted = [Request(prompt=[3, i], max_new_tokens=30, stop_ids=()) for i in range(2)]
    answers = texts(several.run(wanted))
    assert answers == texts(engine(1).run(wanted))
    of_each_k = {k: sum(k == other for *_, other in measured) for *_, k in measured}
    assert set(of_each_k) == {0, 1, 3} and set(of_each_k.values()) == {1 + ROUNDS}
    one = next(tmp_path.glob("*.json")).read_text()
    assert '"threads": "2"' in one


def test_engines_without_threads(alone):
    """A pool takes no more work once the main thread has ended; another thread decodes on."""
    several = engine()
    several._threads.shutdown()
    assert texts(several.run(requests(23))) == alone
    assert not several._engine_of


def test_options_are_those_of_an_engine():
    named = set(inspect.signature(Engine).parameters)
    models = {"target", "drafter", "draft_params"}
    assert named - models - {"max_batch", "num_threads"} == set(EngineOptions.__annotations__)


def test_nothing_half_done_is_long():
    """A process that is interrupted waits for the steps that are under way."""
    several = engine()
    assert [e.max_steps for e in several.engines] == [MOST_STEPS] * 2
    several.max_steps = 3
    assert [e.max_steps for e in several.engines] == [3, 3]
    several.max_steps = 10_000
    assert [e.max_steps for e in several.engines] == [MOST_STEPS] * 2


def test_threads_are_on_the_callers_device():
    """`jax.default_device` is a context of one thread."""
    device = jax.devices("cpu")[-1]
    seen = []
    several = engine(max_batch=2)
    for each in several.engines:
        step = each.step
        each.step = lambda step=step: (seen.append(jnp.zeros(1).devices()), step())[1]
    with jax.default_device(device):
        list(several.run(requests(2)))
    assert seen and all(devices == {device} for devices in seen)


def test_threads_have_the_callers_context():
    """`disable_kernels` and the like."""
    word = contextvars.ContextVar("word", default="none")
    seen = []
    several = engine(max_batch=2)
    for each in several.engines:
        step = each.step
        each.step = lambda step=step: (seen.append(word.get()), step())[1]
    word.set("mine")
    list(several.run(requests(2)))
    assert set(seen) == {"mine"}


def test_rows_wait_for_requests_in_the_queue(monkeypatch):
    """A batch does not become smaller, and then larger again, while requests wait."""
    sizes = []
    shrink = Batch.shrink

    def noting(self):
        shrink(self)
        sizes.append((len(self.rows), several.num_waiting))

    monkeypatch.setattr(Batch, "shrink", noting)
    several = engine(max_batch=4)
    wanted = [Request(prompt=[i], max_new_tokens=20 + 7 * i, stop_ids=()) for i in range(12)]
    assert len(list(several.run(wanted))) == 12
    # a batch whose rows were all done at once may be empty for a moment
    assert all(num_rows in (0, 2) for num_rows, waiting in sizes if waiting > several.max_batch)
    assert (1, 0) in sizes


def test_programs_of_prompts_are_known_after_they_were_read():
    """All chunks share a program where the caches do not grow. No other test has such chunks."""
    one = engine(1, prefill_chunk=11)
    list(one.run([Request(prompt=[1] * 29, max_new_tokens=2)]))
    names = [program for program in first_call._called if program[1] == one.spec]
    kinds = collections.Counter(name[0] for name in names)
    assert kinds == {"empty": 1, "read_chunk": 1, "first_tokens": 1, "begin": 1}


def test_how_many(monkeypatch):
    target, head = tiny.pair("peagle", **CONTEXT)
    drafter = make_drafter(head, 3, "peagle")
    monkeypatch.setattr(parallel_engine, "num_cores", lambda: 3)

    def threads(max_batch=8, drafter=drafter):
        return default_threads(target, drafter, head.params, max_batch)

    assert threads() == 3 and threads(2) == 2 and threads(1) == 1
    assert threads(drafter=None) == 3
    assert threads(drafter=SomebodysOwn()) == 1
    monkeypatch.setattr(parallel_engine, "num_cores", lambda: 64)
    assert threads() == 4
    monkeypatch.setattr(parallel_engine, "platform", lambda: "gpu")
    assert threads() == 1
    monkeypatch.undo()
    num_bytes = sum(x.nbytes for x in jax.tree.leaves((target.params, head.params)))
    monkeypatch.setattr(parallel_engine, "num_cores", lambda: 2)
    monkeypatch.setattr(parallel_engine, "MOST_WEIGHT_BYTES", num_bytes)
    assert threads() == 2
    monkeypatch.setattr(parallel_engine, "MOST_WEIGHT_BYTES", num_bytes - 1)
    assert threads() == 1


def test_what_cannot_be_asked_for(monkeypatch):
    target = tiny.target(**CONTEXT)
    with pytest.raises(InputError, match="num_threads"):
        make_engine(target, num_threads=0)
    with pytest.raises(InputError, match="max_batch"):
        make_engine(target, max_batch=0)
    with pytest.raises(InputError, match="num_threads"):
        generate(target, None, [[1], [2]], num_threads=-1)
    with monkeypatch.context() as patch:
        patch.setattr(parallel_engine, "mesh_of", lambda params: "a mesh")
        assert default_threads(target, None, None, 8) == 1
        with pytest.raises(InputError, match="on several devices"):
            make_engine(target, num_threads=2)
    several = make_engine(target, max_batch=2, num_threads=2)
    with pytest.raises(InputError, match="request 0"):
        several.add(Request(prompt=[], max_new_tokens=3))
    assert not several.has_work
