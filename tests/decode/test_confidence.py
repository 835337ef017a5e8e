"""A confidence head that chooses K: what it expects, what the chooser makes of it, and refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from pipelines.test_calibration import NEW, PROMPTS, agreeing_pair
from scipy import special

from peagle_jax.decode import loop
from peagle_jax.decode.adaptive_k import KChooser
from peagle_jax.decode.confidence import has_confidence, survival_chances
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.prefill import num_positions, prefill, run_to_end
from peagle_jax.decode.requests import Request
from peagle_jax.decode.rows import Row, row_options
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.draft.confidence import Calibration
from peagle_jax.pipelines import calibration
from peagle_jax.types import InputError, Model

K = 3
CALIBRATION = Calibration(((0.7, 0.5), (1.2, -0.5), (0.1, 0.3)), ((0.2, -1.0),))


def calibrated(markov_rank=None) -> tuple[Model, Model]:
    target, head = agreeing_pair(markov_rank)
    changed = dataclasses.replace(head.config, confidence_calibration=CALIBRATION)
    like = tiny.head(confidence=True, markov_rank=markov_rank, confidence_calibration=CALIBRATION)
    assert like.config == changed
    return target, Model(changed, like.graph, head.params)


def test_what_a_step_is_expected_to_accept():
    """Each row by its own temperature; rows that are done count no more."""
    _, head = calibrated()
    drafter = make_drafter(head, K)
    logits = np.random.default_rng(0).normal(size=(2, K))
    scaled = special.expit(np.array([0.7, 1.2, 0.1]) * logits + np.array([0.5, -0.5, 0.3]))
    greedy = np.cumprod(scaled, axis=1)
    sampled = np.cumprod(special.expit(0.2 * logits - 1), axis=1)
    given = jnp.asarray(logits, jnp.float32)
    np.testing.assert_allclose(survival_chances(drafter, given, None), greedy, rtol=1e-5)
    mixed = sampling_params(2, [0.0, 0.9], 0, 1.0, [1, 2])
    found = survival_chances(drafter, given, mixed)
    np.testing.assert_allclose(found, [greedy[0], sampled[1]], rtol=1e-5)
    damaged = given.at[:, 1].set(jnp.nan)
    found = survival_chances(drafter, damaged, None)
    np.testing.assert_allclose(found, np.where([True, False, False], greedy, 0), rtol=1e-5)
    rates = dataclasses.replace(drafter, synthetic_rates=(0.5,) * K)
    others = make_drafter(tiny.head(), K), make_drafter(tiny.head(confidence=True), K), None
    assert has_confidence(drafter) and not any(map(has_confidence, (rates, *others)))


@pytest.mark.parametrize("markov_rank", [None, 4])
def test_the_engine_counts_what_its_head_expects(markov_rank, tmp_path, monkeypatch):
    """Step for step what calibration collects, with the answers of plain decoding."""
    target, head = calibrated(markov_rank)
    seen = calibration.collect(target, head, PROMPTS, k=K, kind="greedy", max_new_tokens=NEW)
    observed = []

    def observe(self, num_steps, num_drafts, accepted, expected):
        self.steps_left -= num_steps
        observed.append((num_drafts, accepted, expected))

    monkeypatch.setattr(KChooser, "observe", observe)
    monkeypatch.setattr(KChooser, "choose", lambda self, seconds: K)
    drafter = make_drafter(head, K)
    engine = Engine(
        target, drafter, head.params, adaptive_k=True, step_times=tmp_path, max_batch=4, max_steps=4
    )
    engine.chooser.steps_left = 10**6
    monkeypatch.setattr(engine._step_times, "get", lambda ks, *_: dict.fromkeys(ks, 1.0))
    requests = [Request(prompt=p, max_new_tokens=NEW) for p in PROMPTS]
    answers = dict(engine.run(requests))
    plain = generate(target, None, PROMPTS, max_new_tokens=NEW)
    assert [answers[i].output_token_ids for i in range(3)] == [a.output_token_ids for a in plain]
    num_drafts, accepted, expected = (sum(x) for x in zip(*observed, strict=True))
    assert num_drafts == len(seen.num_accepted)
    np.testing.assert_array_equal(accepted, calibration.accepted_positions(seen).sum(axis=0))
    wanted = np.cumprod(calibration.confidences(seen, CALIBRATION.greedy), axis=1).sum(axis=0)
    np.testing.assert_allclose(expected, wanted, rtol=1e-4)
    assert np.abs(expected - accepted).max() > 0.5


def test_the_chooser_goes_by_what_is_expected():
    """What drafting has lost is counted by what was accepted, whatever was expected."""
    seconds = {0: 1.0, 1: 1.1, 3: 1.3}
    chosen, lost = {}, {}
    for name, expected in (("much", [90.0, 85.0, 80.0]), ("little", [20.0, 3.0, 0.0])):
        chooser = KChooser(3)
        chooser.choose(seconds)
        chooser.k = 3
        accepted = np.array([50, 30, 10])
        chooser.observe(100, 100, accepted, np.array(expected))
        survival = chooser.survival.chances(3)
        chosen[name], lost[name] = survival, chooser._lost
        counted = KChooser(3)
        counted.choose(seconds)
        counted.k = 3
        counted.observe(100, 100, accepted)
        assert counted._lost == chooser._lost
        assert not np.allclose(counted.survival.chances(3), survival)
    assert (chosen["much"] > chosen["little"]).all()


def test_without_calibration_it_chooses_nothing(tmp_path):
    _, head = agreeing_pair()
    drafter = make_drafter(head, K)
    words = "adaptive_k: a confidence head must be calibrated .*; got one that is not; run peagle"
    with pytest.raises(InputError, match=words):
        Engine(tiny.target(5), drafter, head.params, adaptive_k=True)
    with pytest.raises(InputError, match=words):
        generate(tiny.target(5), head, [[1]], k="auto", max_new_tokens=8)
    Engine(tiny.target(5), drafter, head.params)  # nobody asks it
    one_by_one = make_drafter(head, K, "eagle3")  # nor does this way of drafting
    Engine(tiny.target(5), one_by_one, head.params, adaptive_k=True, step_times=tmp_path)


@pytest.mark.parametrize("markov_rank", [None, 4])
def test_the_head_runs_once_for_drafts_and_confidences(markov_rank):
    """A step with confidences costs hardly more operations than one that nobody asks for them."""
    flops = {}
    for name, pair in {"with": calibrated(markov_rank), "not": agreeing_pair(markov_rank)}.items():
        spec, params, options, state = first_state(*pair, lookback=K + 1)
        leaves, tree = jax.tree.flatten((*params, options, state))
        step = jax.jit(functools.partial(step_of_leaves, spec, tree))
        flops[name] = step.lower(leaves).compile().cost_analysis()["flops"]
    assert flops["not"] < flops["with"] < 1.05 * flops["not"]


def step_of_leaves(spec, tree, leaves):
    return loop.step(spec, *jax.tree.unflatten(tree, leaves))


def test_nobody_else_carries_a_count():
    """The state has one where a calibrated confidence head is asked to choose K."""
    assert first_state(*calibrated(), lookback=K + 1)[-1].num_expected_per_pos.shape == (1, K)
    for pair, lookback in (
        (calibrated(), 0),
        (agreeing_pair(), K + 1),
        ((tiny.target(5), tiny.head()), K + 1),
    ):
        assert first_state(*pair, lookback)[-1].num_expected_per_pos is None


def first_state(target, head, lookback):
    """The arguments of a first step."""
    drafter = make_drafter(head, K)
    spec = DecodeSpec(target.graph, target.config, drafter, sample_drafts=True, lookback=lookback)
    options = row_options([Row(0, Request(prompt=[1, 2]), {})], 41)
    prompts, lengths = np.array([[1, 2]], np.int32), np.array([2], np.int32)
    params, slots = (target.params, head.params), num_positions(spec, 2)
    state = run_to_end(prefill(spec, slots, *params, prompts, lengths, options))
    return spec, params, options, state
