"""Of ten thousand requests, some cancelled and some that give NaN, none is lost or mixed up."""

import collections

import jax
import numpy as np
import pytest
import tiny

from peagle_jax.decode.base_engine import BaseEngine
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.decode.requests import Generation, Request

NUM_REQUESTS, NUM_DISTINCT, CANCEL_EVERY, FAIL_EVERY = 10_000, 60, 7, 12


def distinct_requests(bad_token: int) -> list[Request]:
    """Greedy and sampled ones, with stop tokens and without; one in twelve must give NaN."""
    rng = np.random.default_rng(11)
    others = np.delete(np.arange(41), bad_token)
    requests = []
    for i in range(NUM_DISTINCT):
        prompt = rng.choice(others, rng.integers(1, 40)).tolist()
        requests.append(
            Request(
                prompt=[*prompt, bad_token, 3] if i % FAIL_EVERY == 5 else prompt,
                max_new_tokens=int(rng.integers(1, 40)),
                temperature=0.8 if i % 3 == 1 else 0.0,
                seed=1000 + i,
                stop_ids=[7, 21, 33] if i % 4 == 3 else (),
                logit_bias={bad_token: -100.0},
            )
        )
    return requests


def serve(engine: BaseEngine, requests: list[Request], count: int, check) -> None:
    """Keeps two dozen of `count` requests in an engine, and cancels every seventh after a step."""
    under_way: dict[int, int] = {}
    sent, to_cancel = 0, collections.deque[int]()
    while sent < count or engine.has_work:
        while sent < count and len(under_way) < 24:
            number = engine.add(requests[sent % len(requests)])
            under_way[number] = sent
            if sent % CANCEL_EVERY == 3:
                to_cancel.append(number)
            sent += 1
        for output in engine.step():
            if output.answer is not None:
                check(under_way.pop(output.request_id), output.answer)
        while to_cancel:
            engine.cancel(to_cancel.popleft())
    assert not under_way


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [1, 2])
def test_ten_thousand_requests(num_threads):
    """Beside them answers are what they are alone, and nothing is kept."""
    target, head = tiny.target(context=640), tiny.head(context=640, draft_vocab=30)
    # a draft of the bad token would fail its row, although it is not accepted
    (bad_token, *_) = set(range(41)) - set((np.arange(30) + head.params["d2t"]).tolist())
    requests = distinct_requests(bad_token)
    drafter = make_drafter(head, 3)
    sound = make_engine(target, drafter, head.params, max_batch=8, num_threads=1)
    want = dict(sound.run(requests))
    engine = make_engine(
        tiny.with_embedding(target, bad_token, np.nan),
        drafter,
        head.params,
        max_batch=8,
        num_threads=num_threads,
        max_steps=4,
    )
    reasons: collections.Counter[str] = collections.Counter()
    num_arrays = []

    def check(place: int, answer: Generation) -> None:
        request, right = requests[place % NUM_DISTINCT], want[place % NUM_DISTINCT]
        reasons[answer.finish_reason] += 1
        assert answer.prompt_token_ids == request.prompt
        tokens = answer.output_token_ids
        if answer.finish_reason == "cancelled":
            assert place % CANCEL_EVERY == 3
            if bad_token not in request.prompt:
                assert tokens == right.output_token_ids[: len(tokens)]
        elif bad_token in request.prompt:
            assert answer.finish_reason == "error" and "NaN" in (answer.error or "")
            assert not tokens
        else:
            assert answer == right, place

    for _ in range(2):
        serve(engine, requests, NUM_REQUESTS // 2, check)
        num_arrays.append(len(jax.live_arrays()))  # nothing is under way
    assert reasons.total() == NUM_REQUESTS
    assert reasons["error"] >= NUM_REQUESTS // FAIL_EVERY * (CANCEL_EVERY - 1) // CANCEL_EVERY
    assert reasons["cancelled"] > NUM_REQUESTS // 20 and reasons["stop"] > NUM_REQUESTS // 20
    assert num_arrays[1] <= num_arrays[0]
