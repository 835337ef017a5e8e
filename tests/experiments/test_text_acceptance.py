"""Expected acceptance along a text: against decoding, step by step and on average."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from experiments import text_acceptance
from peagle_jax.decode.generate import generate
from peagle_jax.types import Model

K, PROMPT, NEW = 4, 7, 40
EAGLE3 = {"mask_token": None, "num_depths": 3, "norm_output": True}
MARKOV = {"markov_rank": 3, "markov_kind": "rnn"}
HEADS = {
    "shared": ("peagle", {}),
    "low rank, window": ("peagle", {"placeholder_hidden": "per_depth", "windows": (5, None)}),
    "markov": ("peagle", MARKOV),
    "reduced": ("peagle", {"draft_vocab": 17}),
    "bidirectional": ("peagle", {"placeholder_attention": "bidirectional"}),
    "injected": ("peagle", {"placeholder_context": "injected"}),
    "eagle3": ("eagle3", EAGLE3),
    "eagle": ("eagle", {}),
}


@functools.cache
def agreeing_pair(name: str) -> tuple[Model, Model]:
    """A target and a head that write one of two tokens mostly, so that drafts are accepted."""
    method, changes = HEADS[name]
    models = (
        list(tiny.pair(method, 4)) if method == "eagle" else [tiny.target(5), tiny.head(**changes)]
    )
    scaled = []
    for model in models:
        kernel = model.params["lm_head"]["kernel"]
        ids = np.arange(kernel.shape[1])
        if "d2t" in model.params:
            ids = ids + np.asarray(model.params["d2t"])
        kernel = jnp.where(ids >= 2, 0, 2 * kernel)
        lm_head = {"lm_head": {"kernel": kernel}}
        scaled.append(Model(model.config, model.graph, model.params | lm_head))
    return scaled[0], scaled[1]


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(3).integers(0, 41, (count, PROMPT)).tolist()


def texts_of(target: Model, count: int, temperature: float) -> list[list[int]]:
    """Prompts, and what the target writes behind them without a head."""
    given = prompts(count)
    options = {"max_new_tokens": NEW, "stop_ids": (), "temperature": temperature}
    answers = generate(target, None, given, **options, seed=[100 + i for i in range(count)])
    return [[*ids, *a.output_token_ids] for ids, a in zip(given, answers, strict=True)]


@pytest.mark.parametrize(
    ("name", "k"), [*((name, K) for name in HEADS), ("shared", 1), ("eagle3", 1)]
)
def test_greedy_steps_are_those_of_decoding(name, k):
    target, head = agreeing_pair(name)
    texts = texts_of(target, 6, 0.0)
    chances = text_acceptance.chances_of_text(target, head, np.array(texts), k, 0.0, False)
    assert chances.shape == (6, PROMPT + NEW - 2, k) and set(np.unique(chances)) <= {0.0, 1.0}
    totals = np.zeros(k)
    for text, chance in zip(texts, chances, strict=True):
        accepted, place = [], PROMPT - 1
        while place + k <= len(chance):
            accepted.append(int(np.cumprod(chance[place]).sum()))
            place += accepted[-1] + 1
        per_position = [sum(a > d for a in accepted) for d in range(k)]
        new = 1 + sum(accepted) + len(accepted)  # so that decoding ends with the last of these
        options = {"k": k, "max_new_tokens": new, "stop_ids": (), "method": HEADS[name][0]}
        (answer,) = generate(target, head, [text[:PROMPT]], **options)
        assert (answer.num_drafts, answer.num_accepted_per_pos) == (len(accepted), per_position)
        num_drafts, counts = text_acceptance.expected_counts(chance.astype(float), PROMPT - 1)
        assert num_drafts == len(accepted) and counts.tolist() == per_position
        totals += per_position
    assert (totals[:3] > 0).all(), "nothing was accepted, so that nothing was shown"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sample_drafts"), [("markov", True), ("eagle3", True), ("reduced", False)]
)
def test_sampled_acceptance_is_that_of_decoding_on_average(name, sample_drafts):
    """The texts differ, so this holds within their noise: four standard errors."""
    target, head = agreeing_pair(name)
    count, temperature = 192, 1.6
    expected = text_acceptance.expected_acceptance(
        target, head, texts_of(target, count, temperature), PROMPT, K, temperature, sample_drafts
    )
    options = {"k": K, "max_new_tokens": NEW, "stop_ids": (), "temperature": temperature}
    drawn = generate(
        target,
        head,
        prompts(count),
        **options,
        method=HEADS[name][0],
        sample_drafts=sample_drafts,
        seed=list(range(count)),
    )
    ours = per_step(expected)
    theirs = per_step(
        [
            {"num_drafts": a.num_drafts, "num_accepted_per_pos": a.num_accepted_per_pos}
            for a in drawn
        ]
    )
    for position in range(K):
        (mean, error), (drawn_mean, drawn_error) = ours[position], theirs[position]
        assert abs(mean - drawn_mean) < 4 * np.hypot(error, drawn_error)
    assert ours[0][0] > 0.03, "nothing was accepted, so that nothing was shown"
    if sample_drafts:
        assert ours[0][1] < theirs[0][1], "computed numbers must be less noisy than drawn ones"


def per_step(counts: list[dict]) -> list[tuple[float, float]]:
    """Of each position, the share of all steps that accepted it, and its standard error."""
    drafts = np.array([c["num_drafts"] for c in counts])
    accepted = np.array([c["num_accepted_per_pos"] for c in counts])
    share = accepted.sum(0) / drafts.sum()
    residuals = accepted - share * drafts[:, None]
    errors = np.sqrt((residuals**2).sum(0)) / drafts.sum()
    return list(zip(share, errors, strict=True))


def test_expected_counts_are_those_of_all_ways_to_accept():
    """Every way, by enumeration: which drafts are accepted at every place."""
    n, k, first = 7, 2, 1
    chances = np.random.default_rng(0).uniform(0.1, 0.9, (n, k))
    total, accepted = 0.0, np.zeros(k)
    places = range(first, n - k + 1)
    for lengths in itertools.product(range(k + 1), repeat=len(places)):
        chance = 1.0
        for place, length in zip(places, lengths, strict=True):
            chance *= np.prod(chances[place, :length])
            chance *= 1 - chances[place, length] if length < k else 1.0
        place = first
        while place in places:
            length = lengths[place - first]
            total += chance
            accepted[:length] += chance
            place += length + 1
    num_drafts, counts = text_acceptance.expected_counts(chances, first)
    np.testing.assert_allclose([num_drafts, *counts], [total, *accepted], rtol=1e-12)


def test_a_longer_text_does_not_change_what_comes_before():
    target, head = agreeing_pair("shared")
    texts = np.array(texts_of(target, 1, 1.0))
    whole = text_acceptance.chances_of_text(target, head, texts, K, 1.0, True)
    part = text_acceptance.chances_of_text(target, head, texts[:, :-9], K, 1.0, True)
    usable = part.shape[1] - K + 1
    np.testing.assert_allclose(part[:, :usable], whole[:, :usable], atol=1e-5)


def test_chances_at_all_places_of_a_text():
    chances = np.random.default_rng(5).random((9, 3))
    found = text_acceptance.mean_chances(chances, 2)
    # steps that begin at 2 .. 6: those behind have drafts beyond the text's end
    np.testing.assert_allclose(found, sum(chances[i] for i in range(2, 7)) / 5)


def test_known_drafts_change_the_drafts_behind_the_first():
    target, head = agreeing_pair("shared")
    texts = np.array(texts_of(target, 3, 0.7))
    usual, known = (
        text_acceptance.chances_of_text(target, head, texts, K, 0.7, True, drafts_known)
        for drafts_known in (False, True)
    )
    np.testing.assert_allclose(usual[..., 0], known[..., 0], atol=1e-6)
    assert (np.abs(usual - known)[:, :-K, 1:].max(axis=(0, 1)) > 1e-3).all()
    # only what lies between an anchor and its draft is told: later tokens change nothing
    changed = texts.copy()
    changed[:, 20:] = (changed[:, 20:] + 1) % 41
    again = text_acceptance.chances_of_text(target, head, changed, K, 0.7, True, True)
    np.testing.assert_allclose(known[:, : 20 - 1 - K], again[:, : 20 - 1 - K], atol=1e-5)
