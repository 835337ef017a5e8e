"""Requests that wait, that cannot be read, or that are not wanted any more."""

import dataclasses
import inspect
import threading

import jax
import pytest
import tiny
from test_engine import CONTEXT, Letters, alone, make_engine, small_sizes

from peagle_jax.decode import engine as engine_module
from peagle_jax.decode import growth
from peagle_jax.decode.generate import generate
from peagle_jax.decode.requests import Request
from peagle_jax.types import InputError

__all__ = ["small_sizes"]  # a fixture, which every test here uses


def run(server, requests):
    """(answers by number, slots after each step) of requests that are all there at once."""
    for request in requests:
        server.add(request)
    answers, slots = {}, []
    while server.has_work:
        for output in server.step():
            answers[output.request_id] = output.answer
        slots.append(server._batch.slots)
    return answers, slots


def test_slots_follow_what_is_in_use_where_others_wait():
    """One long request, then short ones: the batch is never empty, and its queue neither."""
    requests = [Request(prompt=[5] * 300, max_new_tokens=9)]
    requests += [Request(prompt=[i, 3], max_new_tokens=8 + i % 5) for i in range(1, 14)]
    server = make_engine(3, max_batch=2, max_steps=1)
    answers, slots = run(server, requests)
    assert [answers[i] for i in range(14)] == [alone(request, 3) for request in requests]
    long = [i for i, size in enumerate(slots) if size >= 300]
    assert long and set(slots[long[-1] + 1 :]) <= {0, 32, 64}
    assert len(slots) - long[-1] > 6  # most of the others came after it


def test_spare_rows_leave_as_soon_as_nobody_waits_for_them():
    """Not only where a request is done: the one that waited may have gone elsewhere."""
    server = make_engine(None, max_batch=4, max_steps=1)
    server.others_wait = True
    for i, length in enumerate((60, 4, 4, 4)):
        server.add(Request(prompt=[i + 1, 3], max_new_tokens=length, stop_ids=()))
    while server.num_running != 1 or server.num_waiting:
        server.step()
    server.step()
    assert len(server._batch.rows) == 4
    server.others_wait = False
    server.step()
    assert len(server._batch.rows) == 1


def test_the_host_reads_each_token_once():
    """Lists of a long answer that streams are not made anew in every step."""
    server = make_engine(3, max_batch=2)
    asked = Request(prompt=[5, 3], max_new_tokens=40, stop_ids=(), logprobs=True)
    server.add(asked)
    number = server.add(dataclasses.replace(asked, stream=True))
    answers, streamed, lists = {}, [], set()
    while server.has_work:
        for output in server.step():
            if output.request_id == number:
                streamed += output.new_token_ids
            if output.answer is not None:
                answers[output.request_id] = output.answer
        for row in filter(None, server._batch.rows):
            if row.id == number:
                lists.add(id(row.written.token_ids))
                assert row.written.token_ids == streamed
                row.written.logprobs[0] = 0.5  # which no later step reads again
    one, other = answers[0], answers[number]
    assert len(lists) == 1
    assert streamed == other.output_token_ids == one.output_token_ids and len(streamed) == 40
    assert other.is_draft == one.is_draft and len(one.is_draft) == 40 and any(one.is_draft)
    assert other.logprobs == [0.5, *one.logprobs[1:]] and len(one.logprobs) == 40


def test_other_threads_add_and_cancel_while_the_queue_is_looked_at():
    server = make_engine(None, max_batch=1)
    request = Request(prompt=[3], max_new_tokens=1)
    failures = []

    def add():
        try:
            for _ in range(400):
                server.cancel(server.add(request))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    answered = 0
    while any(thread.is_alive() for thread in threads):
        answered += len(server._leave_queue())
        server._waiting.forget_cancelled([])
    answered += len(server._leave_queue())
    assert not failures and answered == 800 and not server.has_work


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: Out of memory", "a bug"])
@pytest.mark.parametrize("place", [(engine_module, "next_chunk"), (growth, "resize")])
def test_prompts_that_cannot_be_read_fail_alone(monkeypatch, place, error):
    """Of the others none is lost; what is no lack of memory is raised as well.

    It fails while the prompt is read, or while the batch grows for what was read.
    """
    module, name = place
    server = make_engine(3, max_batch=2)
    requests = [Request(prompt=[3, 9], max_new_tokens=30), Request(prompt=[8], max_new_tokens=4)]
    first = server.add(requests[0])
    server.max_steps = 2
    server.step()
    works = getattr(module, name)

    def fails(*_):
        monkeypatch.setattr(module, name, works)
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(module, name, fails)
    second = server.add(requests[1])
    if error == "a bug":
        with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
            server.step()
    third = server.add(requests[1])
    answers = {}
    while server.has_work:
        answers |= {o.request_id: o.answer for o in server.step() if o.answer is not None}
    assert answers[second].finish_reason == "error" and error in answers[second].error
    assert answers[first] == alone(requests[0], 3)
    assert answers[third] == alone(requests[1], 3)


def test_a_prompt_that_nobody_wants_is_not_read_to_its_end():
    server = make_engine(3, max_batch=2, prefill_chunk=8, max_steps=1)
    number = server.add(Request(prompt=[4] * 400, max_new_tokens=30))
    server.step()
    server.cancel(number)
    (output,) = server.step()
    assert output.answer.finish_reason == "cancelled" and output.answer.output_token_ids == []
    assert not server.has_work and server.stats.num_chunks < 4
    request = Request(prompt=[8], max_new_tokens=4)
    assert run(server, [request])[0] == {number + 1: alone(request, 3)}


def test_without_a_seed_equal_requests_get_different_answers():
    request = Request(prompt=[3, 9], max_new_tokens=12, temperature=1.5)
    answers, _ = run(make_engine(3, max_batch=4), [request] * 4)
    texts = [tuple(answers[i].output_token_ids) for i in range(4)]
    assert len(set(texts)) == 4
    # and the same ones in the next process: the seed is the request's number
    seeded = [dataclasses.replace(request, seed=i) for i in range(4)]
    again, _ = run(make_engine(3, max_batch=4), seeded)
    assert [tuple(again[i].output_token_ids) for i in range(4)] == texts


def test_one_stop_string_is_no_list_of_letters():
    whole = alone(Request(prompt=[3, 14, 15], max_new_tokens=60), 3)
    text = Letters().decode(whole.output_token_ids, skip_special_tokens=True)
    stop = text[17:20]
    server = make_engine(3, max_batch=2, tokenizer=Letters())
    request = Request(prompt=[3, 14, 15], max_new_tokens=60, stop=stop)
    assert request.stop == (stop,)
    answers, _ = run(server, [request, dataclasses.replace(request, stop=None)])
    assert answers[0].text == text[: text.index(stop)] and answers[0].finish_reason == "stop"
    assert answers[1].text == text


def test_prompts_that_wait_for_a_place():
    target, head = tiny.pair(None, **CONTEXT)
    prompts = [[i, 3, 2 * i] for i in range(1, 8)]
    options = {"k": 3, "max_new_tokens": 9, "temperature": 1.0, "seed": 40}
    want = generate(target, head, prompts, **options)
    assert generate(target, head, prompts, **options, max_batch=2) == want
    with pytest.raises(InputError, match="max_batch: must be 1 or more; got 0"):
        generate(target, head, prompts, **options, max_batch=0)


def test_what_waits_needs_no_memory(monkeypatch):
    """More prompts than fit are refused, unless they are decoded one after another."""
    target, head = tiny.pair(None, **CONTEXT)
    probe = make_engine(3, max_batch=2)
    two = probe._memory.size(2, 96)
    monkeypatch.setattr("peagle_jax.decode.memory.free_bytes", lambda device: two)
    prompts = [[i] for i in range(1, 6)]
    with pytest.raises(InputError, match="max_batch"):
        generate(target, head, prompts, k=3, max_new_tokens=60, num_threads=1)
    answers = generate(target, head, prompts, k=3, max_new_tokens=60, num_threads=1, max_batch=2)
    assert [len(answer.output_token_ids) for answer in answers] == [60] * 5


def test_trees_have_a_most_nodes():
    with pytest.raises(InputError, match="num_tree_nodes: at most 256 drafts in a tree"):
        make_engine(3, max_batch=1, num_tree_nodes=257)
    # of all paths the scores are computed in every step: K counts, too
    with pytest.raises(InputError, match=r"at most 100,000 paths .* with 256 nodes and K = 11"):
        make_engine(11, max_batch=1, num_tree_nodes=256)


def test_long_prompts_are_read_in_chunks_unless_somebody_asks_otherwise():
    """In one forward every query would be multiplied with every key, also with those after it."""
    for function in (generate, engine_module.Engine):
        assert inspect.signature(function).parameters["prefill_chunk"].default == 512
