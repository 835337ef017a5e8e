"""What fails in an engine fails alone: no request is lost, and none stays for ever."""

import asyncio
import itertools

import jax
import numpy as np
import pytest
from test_engine import Letters, alone, make_engine, small_sizes

from peagle_jax.decode import growth, memory, sampling
from peagle_jax.decode.requests import Request
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.decode.serving import AsyncEngine
from peagle_jax.types import InputError

__all__ = ["small_sizes"]  # a fixture, which every test here uses


def finish(server) -> dict:
    """Steps until nothing is left: answers by number."""
    answers = {}
    while server.has_work:
        answers |= {o.request_id: o.answer for o in server.step() if o.answer is not None}
    return answers


@pytest.mark.parametrize("number", [0, 2, 11])
def test_a_batch_that_is_half_moved_is_given_up(monkeypatch, number):
    """Arrays are moved one by one, and the old ones freed: rows cannot go on after a failure."""
    server = make_engine(3, max_batch=2, max_steps=2)
    first = server.add(Request(prompt=[3, 9], max_new_tokens=30))
    server.step()
    resized, calls = growth._resized, itertools.count()

    def fails(*arguments):
        if next(calls) == number:
            monkeypatch.setattr(growth, "_resized", resized)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")
        return resized(*arguments)

    monkeypatch.setattr(growth, "_resized", fails)
    request = Request(prompt=[8], max_new_tokens=4)
    second, third = server.add(request), server.add(Request(prompt=[5], max_new_tokens=6))
    answers = finish(server)
    assert "RESOURCE_EXHAUSTED" in answers[second].error
    assert answers[third] == alone(Request(prompt=[5], max_new_tokens=6), 3)
    if number:
        assert answers[first].finish_reason == "error" and "memory" in answers[first].error
    else:
        assert answers[first] == alone(Request(prompt=[3, 9], max_new_tokens=30), 3)
    assert dict(server.run([request])) == {0: alone(request, 3)}


def test_decoding_that_lacks_memory_answers_with_what_there_is(monkeypatch):
    server = make_engine(3, max_batch=2, max_steps=2)
    request = Request(prompt=[3, 9], max_new_tokens=60, stream=True)
    number = server.add(request)
    seen = [token for output in server.step() for token in output.new_token_ids]

    def fails(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(server._batch, "decode", fails)
    (output,) = server.step()
    monkeypatch.undo()
    tokens = alone(request, 3).output_token_ids
    answer = output.answer
    assert output.request_id == number and answer.finish_reason == "error"
    assert answer.error == "decoding failed: RESOURCE_EXHAUSTED: Out of memory"
    assert seen and answer.output_token_ids == tokens[: answer.num_tokens]
    assert seen + output.new_token_ids == answer.output_token_ids and not server.has_work


def test_a_program_that_failed_by_itself_loses_its_rows_alone(monkeypatch):
    """XLA may say so only when results are asked for: they are there, and cannot be read."""
    server = make_engine(3, max_batch=2, max_steps=2)
    number = server.add(Request(prompt=[3, 9], max_new_tokens=30))
    server.step()

    class Failed:
        """What a failed program leaves, as far as the engine looks at it."""

        def is_deleted(self):
            return False

        def block_until_ready(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 9 bytes")

    def fails(*_):
        server._batch._state = Failed()
        server._batch._numbers = None
        return Failed().block_until_ready()

    monkeypatch.setattr(server._batch, "_take_steps", fails)
    (output,) = server.step()
    monkeypatch.undo()
    assert output.request_id == number and "Out of memory" in output.answer.error
    request = Request(prompt=[8], max_new_tokens=4)
    assert dict(server.run([request])) == {0: alone(request, 3)}


@pytest.mark.parametrize("name", ["put_row", "_keys"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("none left")])
def test_requests_that_do_not_become_rows_are_answered(monkeypatch, name, error):
    """Whatever fails between the last chunk and the first step."""
    server = make_engine(3, max_batch=2, max_steps=2)
    request = Request(prompt=[3, 9], max_new_tokens=30, temperature=0.5, seed=1)
    first = server.add(request)
    server.step()
    module = growth if name == "put_row" else sampling
    works, calls = getattr(module, name), itertools.count()

    def fails(*arguments):
        # the keys of the prompt that is read are made first, and those of the rows after it
        if name == "_keys" and not next(calls):
            return works(*arguments)
        monkeypatch.setattr(module, name, works)
        raise error

    monkeypatch.setattr(module, name, fails)
    second = server.add(Request(prompt=[8], max_new_tokens=4, temperature=0.5, seed=2))
    answers = {}
    for _ in range(99):
        try:
            answers |= finish(server)
        except KeyboardInterrupt:
            continue
        break
    assert answers[second].finish_reason == "error" and not server.has_work
    assert answers[first] == alone(request, 3)


def test_prompts_that_cannot_be_prepared_are_answered(monkeypatch):
    server = make_engine(3, max_batch=2)

    def fails(_):
        raise MemoryError("no room for penalties")

    monkeypatch.setattr(server, "_reading", fails)
    number = server.add(Request(prompt=[3]))
    assert "no room for penalties" in finish(server)[number].error


def test_what_rows_hold_is_not_free_for_prompts(monkeypatch):
    """A request that needs less than the rows have waits for what its prompt takes beside them."""
    server = make_engine(None, max_batch=4, max_steps=1)
    for i in range(3):
        server.add(Request(prompt=[i + 1] * 100, max_new_tokens=4 + 40 * (i == 1)))
    while not server.num_running:
        server.step()
    short = server.add(Request(prompt=[9], max_new_tokens=3))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    order = []
    while server.has_work:
        order += [o.request_id for o in server.step() if o.answer is not None]
    assert order[-1] == short and len(order) == 4


def test_answers_that_were_ready_survive_what_fails_after_them(monkeypatch):
    server = make_engine(3, max_batch=2, max_steps=1)
    short = Request(prompt=[3, 9], max_new_tokens=1)
    first, second = server.add(short), server.add(Request(prompt=[8], max_new_tokens=30))

    def fails(_):
        raise ValueError("a bug")

    monkeypatch.setattr(server._batch, "decode", fails)
    with pytest.raises(ValueError, match="a bug"):
        server.step()
    monkeypatch.undo()
    answers = finish(server)
    assert answers[first] == alone(short, 3)
    assert answers[second] == alone(Request(prompt=[8], max_new_tokens=30), 3)


class Undecodable(Letters):
    """Panics where an answer has a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def decode(self, token_ids, skip_special_tokens):
        if self.token in token_ids:
            raise PanicException("index out of bounds\nnote: run with RUST_BACKTRACE=1")
        return super().decode(token_ids, skip_special_tokens)


class PanicException(BaseException):
    """As pyo3 has one."""


@pytest.mark.parametrize("stop", [(), ("??",)])
def test_a_tokenizer_that_panics_fails_one_answer(stop):
    requests = [Request(prompt=[i], max_new_tokens=9, stop=stop) for i in range(1, 5)]
    plain = [alone(request, 3).output_token_ids for request in requests]
    bad = next(t for t in plain[1] if all(t not in x for i, x in enumerate(plain) if i != 1))
    server = make_engine(3, max_batch=4, tokenizer=Undecodable(bad))
    answers = dict(server.run(requests))
    for i, answer in answers.items():
        assert (answer.finish_reason == "error") == (i == 1)
        assert answer.output_token_ids == plain[i][: answer.num_tokens]
    assert answers[1].error == "the tokenizer cannot decode: index out of bounds"


def test_an_asyncio_listener_learns_of_a_panic():
    engine = make_engine(3, max_batch=2)

    def panics():
        raise PanicException("gone")

    engine.step = panics

    async def listen():
        async with AsyncEngine(engine) as server:
            async for _ in server.stream(Request(prompt=[3])):
                raise AssertionError("nothing comes")

    with pytest.raises(RuntimeError, match="the engine stopped before the answer was done"):
        asyncio.run(asyncio.wait_for(listen(), 20))


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"stop": [5]}, "stop: must be strings; got 5"),
        ({"stop": [b"x"]}, "stop: must be strings; got b'x'"),
        ({"logit_bias": {5.0: 1.0}}, "logit_bias: token ids must be whole numbers"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias: token ids must be whole numbers"),
    ],
)
def test_requests_that_could_not_be_decoded_are_refused(wrong, error):
    server, request = make_engine(3, tokenizer=Letters()), Request(prompt=[3], seed=1)
    for name, value in wrong.items():
        object.__setattr__(request, name, value)  # users have nobody who checks types
    with pytest.raises(InputError, match=error):
        server.add(request)
    assert not server.has_work


def test_a_top_k_beyond_32_bits_keeps_every_token():
    sampling = sampling_params(3, 0.7, [2**32 + 1, 10**20, 5], 1.0, [1, 2, 3])
    assert sampling.top_k.tolist() == [2**31 - 1, 2**31 - 1, 5]


def test_the_smallest_temperatures_decode_greedily():
    """Quotients by them are not finite. As in vLLM, 1e-5 is the first that samples."""
    assert sampling_params(2, [1e-6, 3e-38], 0, 1.0, [1, 2]) is None
    sampling = sampling_params(2, [9e-6, 2e-5], 0, 1.0, [1, 2])
    assert sampling.temperature.tolist() == [0, np.float32(2e-5)]


@pytest.mark.parametrize("k", [None, 3])
def test_caches_are_counted_as_they_are(k):
    """Those of sliding layers are rings of a fixed size, and the head's are as many rows."""
    server = make_engine(k, max_batch=4, prefill_chunk=8, sliding_cache=True, max_steps=1)
    for i in range(3):
        server.add(Request(prompt=[i + 1] * (1 + 20 * i), max_new_tokens=30))
    while not server.num_running:
        server.step()
    state = server._batch.state
    groups = [*state.cache.groups, *(state.draft.cache.groups if k else ())]
    arrays = [x for group in groups for x in (*group.k, *group.v)]
    lengths = sum(x.nbytes for x in jax.tree.leaves(state.draft.cache)) - sum(
        x.nbytes for group in groups[len(state.cache.groups) :] for x in (*group.k, *group.v)
    )
    assert server._held_by_rows() == sum(x.nbytes for x in arrays) + lengths


def test_a_long_request_enters_with_as_many_rows_as_were_counted(monkeypatch):
    """Seven short ones have eight rows; the long one behind them needs two, and more slots."""
    server = make_engine(None, max_batch=8, max_steps=1)
    for i in range(7):
        server.add(Request(prompt=[i + 1], max_new_tokens=4 + 30 * (i == 3)))
    server.step()
    long = server.add(Request(prompt=[5] * 500, max_new_tokens=9))
    read, held = server._memory.size(1, 512), server._held_by_rows
    most = server._memory.size(2, 512) + read
    monkeypatch.setattr(memory, "free_bytes", lambda device: most - held())
    rows, answers = [], {}
    while server.has_work:
        answers |= {o.request_id: o.answer for o in server.step() if o.answer is not None}
        if server._batch.slots > 256:
            rows.append(len(server._batch.rows))
    assert rows and max(rows) <= 2
    assert answers[long] == alone(Request(prompt=[5] * 500, max_new_tokens=9), None)
    assert answers[3] == alone(Request(prompt=[4], max_new_tokens=34), None)


def test_ctrl_c_while_a_step_is_timed_leaves_rows_as_they_are(tmp_path):
    server = make_engine(3, adaptive_k=True, step_times=tmp_path)
    number = server.add(Request(prompt=[3], max_new_tokens=50))
    take_steps = server._batch._take_steps

    def interrupted(*_):
        server._batch._take_steps = take_steps
        raise KeyboardInterrupt

    server._batch._take_steps = interrupted
    with pytest.raises(KeyboardInterrupt):
        server.step()
    want = alone(Request(prompt=[3], max_new_tokens=50), 3)
    assert finish(server)[number].output_token_ids == want.output_token_ids
