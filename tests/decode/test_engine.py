"""Continuous batching: each request is answered as if it were alone, whatever is beside it."""

import dataclasses

import numpy as np
import pytest
import tiny

from peagle_jax.decode import batch, growth, memory, parallel_engine
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.engine_checks import check_at_least_1
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.requests import Request
from peagle_jax.types import InputError

CONTEXT = {"context": 640}


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def decode(self, token_ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(ord("A") + i) for i in token_ids)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Caches that grow, and batches that shrink, with few tokens."""
    monkeypatch.setattr(growth, "FIRST_SLOTS", 32)
    monkeypatch.setattr(batch, "MIN_TOKENS_LEFT", 2)


def make_engine(k: int | None = 3, method: str | None = None, **options) -> Engine:
    """An engine of tiny models; without a head where `k` is None."""
    target, head = tiny.pair(method, **CONTEXT)
    if k is None:
        return Engine(target, **options)
    return Engine(target, make_drafter(head, k, method), head.params, **options)


def random_requests(count: int, seed: int, longest: int = 60) -> list[Request]:
    """Requests of any length, greedy and sampled, with and without stop tokens."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        sampled = i % 3 == 1
        requests.append(
            Request(
                prompt=rng.integers(0, 40, rng.integers(1, longest)).tolist(),
                max_new_tokens=int(rng.integers(1, 40)),
                temperature=0.8 if sampled else 0.0,
                top_k=5 if i % 6 == 1 else 0,
                seed=1000 + i,
                stop_ids=[7, 21, 33, 2, 5] if i % 4 == 3 else (),
            )
        )
    return requests


def odd(**values) -> Request:
    """A request with values that no type checker lets through, as a server's clients may send."""
    request = Request(prompt=[1], seed=0)
    for name, value in values.items():
        object.__setattr__(request, name, value)
    return request


def alone(request: Request, k: int | None, method: str | None = None):
    """The answer of `generate`, in a batch of one."""
    target, head = tiny.pair(method, **CONTEXT)
    (answer,) = generate(
        target,
        None if k is None else head,
        [request.prompt],
        k=k,
        method=method,
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed or 0,
        stop_ids=request.stop_ids,
    )
    return answer


@pytest.mark.parametrize("k, method", [(None, None), (3, "peagle"), (2, "eagle3"), (2, "eagle")])
def test_a_request_is_answered_as_if_it_were_alone(k, method):
    requests = random_requests(22, seed=5)
    server = make_engine(k, method, max_batch=4, prefill_chunk=24)
    answers = dict(server.run(requests))
    assert sorted(answers) == list(range(len(requests)))
    for i, request in enumerate(requests):
        # text is None in both: neither has a tokenizer
        assert answers[i] == alone(request, k, method), i
    assert {answer.finish_reason for answer in answers.values()} == {"stop", "length"}
    assert not server.has_work and server.num_running == 0
    # one program for each size: at most 3 of rows, 4 of slots, 3 ways to sample
    decodes = {program for program in server.stats.programs if program[0] == "decode"}
    assert {program[1] for program in decodes} == {1, 2, 4}
    assert {program[3] for program in decodes} == {"greedy", "sampled", "filtered"}
    prefills = {program for program in server.stats.programs if program[0] == "prefill"}
    assert {program[3] for program in prefills} <= {24} and len(decodes) < 30
    first = server.stats.programs - decodes - prefills
    assert {program[3] for program in first} == {"greedy", "sampled", "filtered"}


@pytest.mark.parametrize("k, method", [(None, None), (3, "peagle"), (2, "eagle3")])
def test_a_prompt_of_several_requests_is_read_once(k, method):
    prompts = [list(range(1, 31)), [9, 8, 7]]
    requests = [
        Request(prompt=prompts[place], max_new_tokens=12, temperature=0.8 * (i > 1), seed=70 + i)
        for i, place in enumerate([0, 1, 0, 0, 1])
    ]
    server = make_engine(k, method, max_batch=8, prefill_chunk=24)
    answers = dict(server.run(requests))
    for i, request in enumerate(requests):
        assert answers[i] == alone(request, k, method), i
    assert len({tuple(answers[i].output_token_ids) for i in (0, 2, 3)}) == 3
    prefills = {program for program in server.stats.programs if program[0] == "prefill"}
    assert {program[1] for program in prefills} == {2} and server.stats.num_chunks == 2
    firsts = {program for program in server.stats.programs if program[0] == "first tokens"}
    assert {program[1] for program in firsts} == {8}


@pytest.mark.parametrize("lengths", [[60, *[5] * 7], [*[5] * 7, 60], [120, *[10] * 7]])
def test_short_prompts_of_any_length_enter_together(lengths):
    """Else rows would be free while the others are decoded to their end, to save little padding."""
    memory = make_engine(max_batch=8)._memory
    requests = [Request(prompt=[1] * length, max_new_tokens=9) for length in lengths]
    assert memory.num_allowed(requests, [], 0) == 8
    long = [Request(prompt=[1] * length, max_new_tokens=9) for length in [500, *[10] * 7]]
    assert memory.num_allowed(long, [], 0) < 8


def test_greedy_answers_are_the_models_own():
    """Beside the oracle that has neither cache nor loop."""
    requests = [r for r in random_requests(9, seed=8, longest=20) if r.temperature == 0]
    requests = [dataclasses.replace(r, stop_ids=()) for r in requests]
    answers = dict(make_engine(4, max_batch=3).run(requests))
    for i, request in enumerate(requests):
        prompt = tuple(request.prompt)
        assert answers[i].output_token_ids == tiny.greedy(prompt, request.max_new_tokens)


def test_rows_and_slots_follow_what_is_in_use():
    """A long request among short ones: rows and slots that it needed are given up."""
    server = make_engine(3, max_batch=4)
    shapes = []
    for i, new in enumerate((9, 12, 200, 30)):
        server.add(Request(prompt=[i + 1, 3], max_new_tokens=new))
    while server.has_work:
        server.step()
        if len(shapes) == 3:
            server.add(Request(prompt=[9, 9], max_new_tokens=60))
        shapes.append((len(server._batch.rows), server._batch.slots))
    rows, slots = zip(*shapes, strict=True)
    assert rows[0] == 4 and 1 in rows and rows[-1] == 0  # nothing is held in the end
    assert slots[0] <= 64
    assert max(program[2] for program in server.stats.programs) == 224
    # a row that leaves takes its slots along
    server.stats.programs.clear()
    server.add(Request(prompt=[5] * 150, max_new_tokens=4))
    server.add(Request(prompt=[5], max_new_tokens=60))
    sizes = []
    while server.has_work:
        server.step()
        sizes.append(server._batch.slots)
    assert max(program[2] for program in server.stats.programs) >= 154 and 0 < sizes[-2] <= 96


def test_streams():
    requests = random_requests(7, seed=2)
    sizes = dict(max_batch=4, prefill_chunk=24)  # whose programs other tests compile, too
    want = dict(make_engine(3, "peagle", **sizes).run(requests))
    server = make_engine(3, "peagle", **sizes)
    for i, request in enumerate(requests):
        server.add(dataclasses.replace(request, stream=i % 2 == 0))
    parts: dict[int, list[list[int]]] = {i: [] for i in range(7)}
    answers = {}
    while server.has_work:
        for output in server.step():
            assert output.request_id not in answers  # nothing follows the last output
            parts[output.request_id].append(output.new_token_ids)
            if output.answer is not None:
                answers[output.request_id] = output.answer
    assert answers == want
    for i, answer in want.items():
        assert sum(parts[i], []) == answer.output_token_ids
        if i % 2:
            assert len(parts[i]) == 1
        elif answer.num_drafts > 1:
            assert len(parts[i]) >= answer.num_drafts


@pytest.mark.parametrize("moment", ["waiting", "entering", "running"])
def test_cancel(moment):
    requests = [
        Request(prompt=[4] * 20, max_new_tokens=30),
        Request(prompt=[4, 5] * 20, max_new_tokens=31),
        Request(prompt=[6], max_new_tokens=32),
    ]
    server = make_engine(3, max_batch=2, prefill_chunk=8, max_steps=2)
    ids = [server.add(request) for request in requests]
    outputs = []
    if moment != "waiting":
        outputs += server.step()
    while moment == "running" and server.num_running < 2:
        outputs += server.step()
    victim = ids[2] if moment == "waiting" else ids[0]
    server.cancel(victim)
    server.cancel(victim)
    server.cancel(99)  # unknown
    while server.has_work:
        outputs += server.step()
    server.cancel(ids[1])  # done
    answers = {o.request_id: o.answer for o in outputs if o.answer is not None}
    assert sorted(answers) == ids
    assert answers[victim].finish_reason == "cancelled"
    whole = alone(requests[victim], 3).output_token_ids
    length = len(answers[victim].output_token_ids)
    assert length < len(whole) and answers[victim].output_token_ids == whole[:length]
    assert (length > 0) == (moment != "waiting")
    for i in set(ids) - {victim}:
        assert answers[i] == alone(requests[i], 3)
    server.step()
    assert not server._waiting._cancelled


def with_bad_token(token: int, value: float):
    """The target, of which one token's embedding is not finite."""
    return tiny.with_embedding(tiny.target(**CONTEXT), token, value)


def test_nan_fails_one_request_alone():
    prompts = {0: [3, 9], 2: [8]}
    want = {i: alone(Request(prompt=p, max_new_tokens=20), None) for i, p in prompts.items()}
    used = {3, 9, 8}.union(*(answer.output_token_ids for answer in want.values()))
    bad = max(set(range(41)) - used)
    # without drafts: one of the bad token would fail its row, although it is not accepted
    server = Engine(with_bad_token(bad, np.nan), max_batch=2)
    prompts[1] = [3, bad, 4]
    requests = [Request(prompt=prompts[i], max_new_tokens=20) for i in range(3)]
    answers = dict(server.run(requests))
    assert answers[1].finish_reason == "error" and "NaN" in answers[1].error
    assert answers[1].output_token_ids == []
    for i in want:
        assert answers[i] == want[i]


def test_nan_in_the_midst_of_an_answer():
    """The answer keeps what was written before."""
    request = Request(prompt=[3, 14, 15], max_new_tokens=20)
    whole = alone(request, 3).output_token_ids
    first = next(i for i in range(4, 20) if whole[i] not in [*request.prompt, *whole[:i]])
    broken, head = with_bad_token(whole[first], np.inf), tiny.head(**CONTEXT)
    for drafter in (None, head):
        k = 3 if drafter else None
        (answer,) = generate(broken, drafter, [request.prompt], k=k, max_new_tokens=20)
        assert answer.finish_reason == "error"
        assert answer.output_token_ids == whole[: len(answer.output_token_ids)]
        # the bad token is written, and fails where it is read
        lost = first + 1 - len(answer.output_token_ids)
        assert lost == 0 if drafter is None else 0 <= lost <= 3


def test_bad_requests_are_answered_and_the_others_go_on():
    good = Request(prompt=[3, 9], max_new_tokens=5)
    bad = {
        1: (Request(prompt=[], max_new_tokens=5), "must have at least one token"),
        2: (Request(prompt=[41], max_new_tokens=5), "token ids must lie in 0..40"),
        3: (Request(prompt=[1], max_new_tokens=640), "context of 640 tokens"),
        4: (Request(prompt=[1], max_new_tokens=0), "max_new_tokens: must be 1 or more"),
        5: (
            Request(prompt=[1], max_new_tokens=5, temperature=-1.0),
            "temperature: must be 0 or more",
        ),
        6: (Request(prompt=[1], max_new_tokens=5, seed=-1), "seed: must lie in"),
        7: (
            Request(prompt=[1], max_new_tokens=5, stop_ids=[50]),
            "stop_ids: token ids must lie in 0..40",
        ),
        8: (Request(prompt=[1], max_new_tokens=5, stop=["end"]), "stop strings need a tokenizer"),
        9: (Request(prompt=[1], max_new_tokens=95), "must fit the cache of 90 slots"),
        11: (odd(prompt="text"), "a prompt is token ids; got str; encode it"),
        12: (odd(prompt=[1, 2.5], repetition_penalty=1.1), "prompt must be a whole number"),
        13: (odd(max_new_tokens=5.0), "max_new_tokens must be a whole number"),
        14: (odd(temperature=None), "temperature must be a number; got None"),
        15: (odd(stop_ids=["a"]), "a stop token must be a whole number; got 'a'"),
        16: (odd(seed=1.5), "seed must be a whole number; got 1.5"),
        17: (odd(top_k="4"), "top_k must be a whole number; got '4'"),
        18: (odd(logit_bias={3: "x"}), "logit_bias of token 3: must be a number"),
        19: (odd(prompt={1, 2}), "a prompt is token ids; got set"),
        20: (odd(stop_ids=5), "stop_ids is a list of token ids; got int"),
        21: (odd(logit_bias=[3]), "logit_bias maps token ids to numbers; got list"),
        22: (odd(prompt=7), "a prompt is token ids; got int"),
        24: (odd(max_new_tokens=None), "max_new_tokens must be a whole number; got None"),
        25: (odd(top_k=None), "top_k must be a whole number; got None"),
        26: (odd(stop=5), "stop is a list of strings; got int"),
        27: (odd(temperature=10**400), "temperature must be a number; got 1000"),
        28: (odd(temperature=1e39), "temperature: must be 0 or more, and finite; got 1e+39"),
        29: (odd(top_p=1e-46), "top_p: must lie above 0, up to 1; got 1e-46"),
        30: (odd(repetition_penalty=1e-46), "repetition_penalty: must be above 0"),
        31: (odd(logprobs=5), "logprobs is True or False"),
    }
    requests = [bad[i][0] if i in bad else good for i in range(33)]
    server = make_engine(3, max_batch=2, cache_size=90)
    answers = dict(server.run(requests))
    assert sorted(answers) == list(range(33))
    for i, answer in answers.items():
        if i in bad:
            assert answer.finish_reason == "error" and bad[i][1] in answer.error, answer.error
            assert "\n" not in answer.error
        else:
            assert answer == alone(good, 3)
    with pytest.raises(InputError, match="stop: must have at least one character"):
        make_engine(3, tokenizer=Letters()).add(Request(prompt=[1], stop=[""]))
    # only bad ones: nothing is waited for
    assert [a.finish_reason for _, a in make_engine(3).run([bad[1][0]] * 20)] == ["error"] * 20
    for option in ("max_batch", "prefill_chunk", "max_steps"):
        with pytest.raises(InputError, match=f"{option}: must be 1 or more; got 0"):
            make_engine(3, **{option: 0})
        with pytest.raises(InputError, match=f"{option}: must be a whole number; got 1.5"):
            check_at_least_1(option, 1.5, 8)


def test_a_prompt_is_copied():
    want = alone(Request(prompt=[3, 14, 15], max_new_tokens=9), 3)
    prompt = [3, 14, 15]
    server = make_engine(3)
    server.add(Request(prompt=prompt, max_new_tokens=9))
    prompt[:] = [1]
    answers = []
    while server.has_work:
        answers += [output.answer for output in server.step()]
    assert answers == [want]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_run_does_not_swallow_what_others_asked(num_threads):
    target, head = tiny.pair(None, **CONTEXT)
    models = target, make_drafter(head, 3), head.params
    server = parallel_engine.make_engine(*models, max_batch=2, num_threads=num_threads)
    mine, other = (Request(prompt=[i], max_new_tokens=9, seed=0) for i in (3, 4))
    number = server.add(mine)
    assert dict(server.run([other])) == {0: alone(other, 3)}
    outputs = []
    while server.has_work:
        outputs += server.step()
    assert [(output.request_id, output.answer) for output in outputs] == [(number, alone(mine, 3))]
    # what a loop left is nobody's any more
    answers = server.run([mine, dataclasses.replace(other, max_new_tokens=500)])
    next(answers)
    answers.close()
    assert dict(server.run([other, mine])) == {0: alone(other, 3), 1: alone(mine, 3)}
    assert not server.has_work


def test_who_stops_listening_leaves_nothing_behind():
    requests = random_requests(6, seed=4)
    want = dict(make_engine(3).run(requests))
    server = make_engine(3, max_batch=2)
    answers = server.run(requests)
    next(answers)
    answers.close()
    outputs = []
    while server.has_work:
        outputs += server.step()
    assert outputs and {output.answer.finish_reason for output in outputs} == {"cancelled"}
    assert dict(server.run(requests)) == want


def test_requests_wait_for_memory(monkeypatch):
    """Where only one fits, the others enter one by one."""
    server = make_engine(3, max_batch=4, max_steps=5)
    one = server._memory.size(1, 64)
    free = int(1.5 * one)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free - server._held_by_rows())
    requests = [Request(prompt=[i + 1], max_new_tokens=40) for i in range(5)]
    most = 0
    answers = {}
    for request in requests:
        server.add(request)
    while server.has_work:
        for output in server.step():
            answers[output.request_id] = output.answer
        most = max(most, server.num_running)
    assert most == 1
    assert [answers[i] for i in range(5)] == [alone(r, 3) for r in requests]
