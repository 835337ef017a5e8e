"""Penalties, biases and log-probabilities: as transformers computes them, with and without drafts.

tests/decode/test_sampling.py has the distribution of sampled texts.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)

from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.penalties import penalize, penalties_of
from peagle_jax.decode.requests import Request
from peagle_jax.decode.sampling import probabilities, sampling_params
from peagle_jax.train.attention import PackedCausal
from peagle_jax.types import InputError

V = 41
PENALTIES = {
    "repetition_penalty": 1.7,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.9,
    "logit_bias": {7: 3.5, 30: -100.0},
}


def by_transformers(request: Request, answer: list[int], logits: np.ndarray) -> np.ndarray:
    """The penalized logits [V] after an answer; presence and frequency by hand."""
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    for token, value in (request.logit_bias or {}).items():
        scores[0, token] += value
    ids = torch.tensor([[*request.prompt, *answer]])
    scores = RepetitionPenaltyLogitsProcessor(request.repetition_penalty)(ids, scores)
    for token in answer:
        scores[0, token] -= request.frequency_penalty
    for token in set(answer):
        scores[0, token] -= request.presence_penalty
    if request.min_tokens:
        start, eos = len(request.prompt), list(request.stop_ids or ())
        scores = MinNewTokensLengthLogitsProcessor(start, request.min_tokens, eos)(ids, scores)
    return scores[0].numpy()


@jax.jit
def forward(params, tokens):
    module = tiny.target().bind(params)
    positions = jnp.arange(tokens.shape[1])[None]
    out, _ = module(tokens, positions, PackedCausal(jnp.zeros_like(tokens)), None)
    return module.compute_logits(out.hidden[0])


def target_logits(tokens: list[int]) -> np.ndarray:
    """The target's logits [T, V], by a forward without a cache."""
    padded = np.zeros((1, 32), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward(tiny.target().params, padded), np.float64)[: len(tokens)]


def test_penalized_logits():
    rng = np.random.default_rng(4)
    requests = [
        Request(prompt=[3, 14, 3], **PENALTIES),
        Request(prompt=[9]),
        Request(prompt=[1, 2], presence_penalty=-1.5, min_tokens=3, stop_ids=[4, 40]),
        Request(prompt=[1, 2], min_tokens=3, stop_ids=[4, 40], **PENALTIES),
    ]
    answers = [[5, 5, 7], [9, 9], [2, 4, 4], [2, 4]]
    logits = rng.normal(size=(4, 1, V)).astype(np.float32) * 3
    counts = np.array([np.bincount(answer, minlength=V) for answer in answers])[:, None]
    stop_ids = np.array([[-1, -1], [-1, -1], [4, 40], [4, 40]])
    got = penalize(jnp.asarray(logits), jnp.asarray(counts), penalties_of(requests, V), stop_ids)
    assert np.isneginf(got[3, 0]).nonzero()[0].tolist() == [4, 40] and np.isfinite(got[:3]).all()
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        want = by_transformers(request, answer, logits[i, 0])
        np.testing.assert_allclose(got[i, 0], want, rtol=1e-6, atol=1e-6)
    assert penalties_of(requests[1:2], V) is None


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.3, 1.0])
def test_min_p(min_p):
    logits = np.random.default_rng(5).normal(size=(4, V)).astype(np.float32) * 2
    got = probabilities(jnp.asarray(logits), sampling_params(4, 0.7, 0, 1.0, range(4), min_p))
    scaled = torch.tensor(logits / 0.7)
    want = torch.softmax(MinPLogitsWarper(min_p)(None, scaled) if min_p else scaled, dim=-1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert (np.asarray(got) > 0).sum() == (want.numpy() > 0).sum()


def answers_of(requests: list[Request], k: int | None, method: str | None = None):
    """The answers of an engine, in order."""
    head = tiny.head()
    drafter, params = (None, None) if k is None else (make_drafter(head, k, method), head.params)
    answers = dict(Engine(tiny.target(), drafter, params, max_batch=3).run(requests))
    return [answers[i] for i in range(len(requests))]


REQUESTS = [
    Request(prompt=[3, 14, 15], max_new_tokens=25, stop_ids=(), **PENALTIES),
    Request(prompt=[9, 2, 6], max_new_tokens=21, stop_ids=()),
    Request(prompt=[8], max_new_tokens=25, frequency_penalty=1.9, logprobs=True),
    Request(prompt=[4, 6], max_new_tokens=18, logit_bias={11: 100.0}),
]


@pytest.mark.parametrize("k, method", [(None, None), (4, "peagle"), (3, "eagle3")])
def test_greedy_answers(k, method):
    """Beside a loop over whole forwards and transformers' penalties; others are not changed."""
    for request, answer in zip(REQUESTS, answers_of(REQUESTS, k, method), strict=True):
        want: list[int] = []
        for _ in range(request.max_new_tokens):
            logits = target_logits([*request.prompt, *want])[-1]
            want.append(int(by_transformers(request, want, logits).argmax()))
        assert answer.output_token_ids == want
    # what penalties and biases are for
    assert set(answer.output_token_ids) == {11}


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(ord("A") + token) for token in token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "min_p": 1.0},
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.9},
        {"frequency_penalty": 0.9},
        {"logit_bias": {7: 3.5, 30: -100.0}},
        {"logprobs": True},
        {"min_tokens": 9, "stop_ids": "an early token"},
        {"tokenizer": Letters()},
        {"tokenizer": Letters(), "stop": "an answer's own"},
    ],
)
def test_every_option_of_generate_reaches_its_requests(options):
    """What it answers is what an engine answers to such requests, and not what none would have."""
    prompts, limits = [[3, 14, 15], [8]], {"max_new_tokens": 25, "stop_ids": ()}
    options = dict(options)
    alike = {"num_threads": 1}  # other sums have other last bits of log-probabilities

    def answers(**changed):
        return generate(
            tiny.target(), tiny.head(), prompts, k=4, seed=3, **limits, **alike, **changed
        )

    plain = answers()
    if "stop" in options:
        options["stop"] = Letters().decode(plain[0].output_token_ids[9:12])
    if "stop_ids" in options:
        limits["stop_ids"] = (plain[0].output_token_ids[2],)
        del options["stop_ids"]
        plain = answers()
        assert plain[0].num_tokens <= 3
    tokenizer = options.get("tokenizer")
    asked = {name: value for name, value in options.items() if name != "tokenizer"}
    drafter, params = make_drafter(tiny.head(), 4), tiny.head().params
    engine = Engine(tiny.target(), drafter, params, max_batch=2, tokenizer=tokenizer)
    requests = [
        Request(prompt=prompt, seed=3 + i, **limits, **asked) for i, prompt in enumerate(prompts)
    ]
    want = dict(engine.run(requests))
    got = answers(**options)
    assert got == [want[0], want[1]]
    if "temperature" not in options:  # a token whose share is the largest one is the greedy one
        assert got != plain
    else:
        assert got[0].output_token_ids == plain[0].output_token_ids


@pytest.mark.parametrize("k, method", [(None, None), (4, "peagle"), (3, "eagle3")])
def test_no_stop_token_before_the_least_number_of_tokens(k, method):
    """Beside a loop over whole forwards; the answer ends with the first stop token behind it."""
    stop_ids = answers_of(REQUESTS[1:2], k, method)[0].output_token_ids[:6:2]
    ends = []
    for min_tokens in (1, 4, 20):
        request = dataclasses.replace(REQUESTS[1], stop_ids=stop_ids, min_tokens=min_tokens)
        (answer,) = answers_of([request], k, method)
        want: list[int] = []
        while len(want) < request.max_new_tokens:
            logits = target_logits([*request.prompt, *want])[-1]
            want.append(int(by_transformers(request, want, logits).argmax()))
            if want[-1] in stop_ids:
                break
        assert answer.output_token_ids == want
        assert answer.num_tokens > min_tokens
        ends.append(answer.finish_reason)
    assert "stop" in ends


def test_several_answers_to_a_prompt():
    """Each is that of its own seed, in the order of the prompts."""
    prompts, options = [[3, 14, 15], [8]], {"temperature": 0.9, "max_new_tokens": 12}
    models = tiny.target(), tiny.head()

    def alone(prompt, seed):
        return generate(*models, [prompt], k=4, seed=seed, **options)[0].output_token_ids

    for seed, seeds in ((5, [5, 6, 7, 8, 9, 10]), ([40, 60], [40, 41, 42, 60, 61, 62])):
        answers = generate(*models, prompts, k=4, n=3, seed=seed, max_batch=4, **options)
        asked = [prompts[0]] * 3 + [prompts[1]] * 3
        assert [answer.prompt_token_ids for answer in answers] == asked
        want = [alone(*pair) for pair in zip(asked, seeds, strict=True)]
        assert [answer.output_token_ids for answer in answers] == want
        assert len(set(map(tuple, want))) == 6
    assert len(generate(*models, prompts, k=4, n=2, seed=None, **options)) == 4


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"n": 0, "temperature": 1.0}, "n: must be a whole number of 1 or more; got 0; use 1"),
        ({"n": 2}, "n: answers of one prompt differ by sampling; got 2, at temperature 0.0; use n"),
        ({"n": 2, "temperature": 1.0, "seed": [1, 2]}, "one seed for each of 1 prompts"),
        ({"n": 2, "temperature": 1.0, "seed": [1.5]}, "seed: must be whole numbers; got 1.5"),
        ({"min_tokens": 4, "max_new_tokens": 3}, "min_tokens: must lie in 0..max_new_tokens, 3"),
        ({"min_tokens": -1}, "min_tokens: must lie in 0..max_new_tokens, 7; got -1"),
    ],
)
def test_mistakes_of_lengths_and_numbers(options, rule):
    with pytest.raises(InputError, match=rule):
        inspect.unwrap(generate)(tiny.target(), None, [[1]], **{"max_new_tokens": 7, **options})


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("k", [None, 4])
def test_logprobs(k, temperature):
    """Of the target alone, before penalties and temperature."""
    requests = [dataclasses.replace(r, temperature=temperature, seed=3) for r in REQUESTS]
    for request, answer in zip(requests, answers_of(requests, k), strict=True):
        if not request.logprobs:
            assert answer.logprobs is None
            continue
        tokens = [*request.prompt, *answer.output_token_ids]
        logits = target_logits(tokens[:-1])[len(request.prompt) - 1 :]
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        want = logprobs[np.arange(len(logits)), answer.output_token_ids]
        np.testing.assert_allclose(answer.logprobs, want, atol=2e-5)
        assert len(answer.logprobs) == request.max_new_tokens


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"min_p": 1.5}, "min_p: must lie in 0..1; got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: must be above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty: must lie in -2..2; got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: must lie in -2..2; got nan"),
        ({"logit_bias": {41: 1.0}}, "logit_bias: token ids must lie in 0..40; got 41"),
        ({"logit_bias": {4: 101.0}}, "logit_bias of token 4: must lie in -100..100"),
    ],
)
def test_mistakes(options, rule):
    with pytest.raises(InputError, match=rule):
        Engine(tiny.target()).add(Request(prompt=[1], max_new_tokens=3, **options))
