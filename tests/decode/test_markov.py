"""Drafting with a Markov head: what the drafts are drawn from, and what a new one leaves as it was.

Every draft of every step is in test_drafting.py, sampled text in test_sampling.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from scipy import special, stats

from peagle_jax.decode.draft_tokens import MARKOV_UNROLL
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.draft.head import DraftHead
from peagle_jax.draft.init import init_from_head
from peagle_jax.draft.markov import KINDS
from peagle_jax.types import DraftState, InputError, Model
from peagle_jax.weights import flatten_params

TEMPERATURE, ROWS, K = 0.8, 4000, 3


def untrained(**changes) -> Model:
    """A new head, as training makes it."""
    config = tiny.head_config(**changes)
    return Model.from_module(DraftHead(config, rngs=nnx.Rngs(7)), config)


def with_new_markov(head: Model, **changes) -> Model:
    new = untrained(**changes, markov_rank=4)
    return init_from_head(new, head, "head")


def first_drafts(head: Model, k: int, sampling) -> tuple:
    """The drafts of two rows behind one committed token, and their logits."""
    drafter, rng = make_drafter(head, k), np.random.default_rng(1)
    aux = rng.normal(size=(2, 1, head.config.sizes.aux_dim))
    aux = jnp.asarray(np.repeat(aux, k + 1, axis=1), jnp.float32)
    state = DraftState(drafter.init(2, 64), sampling)
    tokens, count = jnp.asarray([[7] * (k + 1), [9] * (k + 1)]), jnp.ones(2, jnp.int32)
    return jax.jit(drafter.step)(head.params, state, tokens, aux, count)[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_markov_head_changes_no_draft(kind):
    head = tiny.head(draft_vocab=17)
    warm = with_new_markov(head, draft_vocab=17, markov_kind=kind)
    old = dict(flatten_params(head.params))
    for path, x in flatten_params(warm.params):
        assert path.startswith("markov.") or np.array_equal(x, old[path]), path
    fresh = {k: v for k, v in untrained(draft_vocab=17).params.items()}
    other = untrained(draft_vocab=17, markov_rank=4).params
    assert all(
        map(np.array_equal, jax.tree.leaves(fresh), jax.tree.leaves({**other, "markov": {}}))
    )
    for sampling in (None, sampling_params(2, 0.9, 0, 1.0, [3, 4])):
        (drafts, logits), (same_drafts, same_logits) = (
            first_drafts(model, 4, sampling) for model in (head, warm)
        )
        assert np.array_equal(drafts, same_drafts) and len(np.unique(drafts)) > 2
        assert sampling is None or np.array_equal(logits, same_logits)


def test_a_markov_head_is_taken_over_or_refused():
    trained = tiny.head(markov_rank=4, markov_kind="gated")
    same = init_from_head(untrained(markov_rank=4, markov_kind="gated"), trained, "head")
    for (path, x), (_, y) in zip(
        flatten_params(same.params), flatten_params(trained.params), strict=True
    ):
        assert np.array_equal(x, y), path
    for changes in ({}, {"markov_rank": 4}, {"markov_rank": 5, "markov_kind": "gated"}):
        with pytest.raises(InputError, match="one of rank 4, gated; set markov: {rank: 4, kind: g"):
            init_from_head(untrained(**changes), trained, "head")


def test_drafts_are_drawn_from_the_logits_that_are_returned():
    """With the bias of the draft before: enumerated over all drafts of a small vocabulary."""
    head = tiny.head(
        **{"vocab": 5, "draft_vocab": 4, "target_dim": 16, "mask_token": 4, "markov_rank": 2}
    )
    drafter, params = make_drafter(head, K), head.params
    rng = np.random.default_rng(2)
    aux = np.tile(rng.normal(size=(1, 1, head.config.sizes.aux_dim)), (ROWS, K + 1, 1))
    sampling = sampling_params(ROWS, TEMPERATURE, 0, 1.0, range(ROWS))
    tokens, count = jnp.full((ROWS, K + 1), 3), jnp.ones(ROWS, jnp.int32)

    def draft(params):
        state = DraftState(drafter.init(ROWS, 8), sampling)
        aux_hidden_states = jnp.asarray(aux, jnp.float32)
        return drafter.step(params, state, tokens, aux_hidden_states, count)[:2]

    drafts, logits = map(np.asarray, jax.jit(draft)(params))
    plain = {**params, "markov": jax.tree.map(jnp.zeros_like, params["markov"])}
    _, without = map(np.asarray, jax.jit(draft)(plain))
    markov = jax.tree.map(np.asarray, params["markov"])
    bias = markov["w1"]["table"] @ markov["w2"]["kernel"]  # [previous, draft id]
    ids = np.arange(4) + np.asarray(params["d2t"])
    previous = np.concatenate([np.full((ROWS, 1), 3), drafts[:, :-1]], axis=1)
    np.testing.assert_allclose(logits[..., ids], without[..., ids] + bias[previous], atol=1e-5)
    assert np.isneginf(np.delete(logits, ids, axis=-1)).all()
    assert np.abs(bias[ids[0]] - bias[ids[1]]).max() > 0.1
    for position in range(K):
        for token in np.unique(previous[:, position]):
            rows = np.flatnonzero(previous[:, position] == token)
            p = special.softmax(logits[rows[0], position].astype(np.float64) / TEMPERATURE)
            observed = np.bincount(drafts[rows, position], minlength=5)[ids]
            expected = len(rows) * p[ids]
            assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_a_long_chain_is_drafted_in_turn():
    """More drafts than a program writes out are a loop, and the same."""
    head = tiny.head(markov_rank=3, num_depths=None)
    few, many = (first_drafts(head, k, None)[0] for k in (5, MARKOV_UNROLL + 2))
    assert np.array_equal(many[:, :5], few) and many.shape == (2, MARKOV_UNROLL + 2)


def test_a_head_that_drafts_one_by_one_has_none():
    with pytest.raises(InputError, match="for heads that draft in parallel; got a head without"):
        untrained(mask_token=None, markov_rank=4)
    with pytest.raises(InputError, match=r"must lie in 1\.\.17, the draft vocabulary; got 18"):
        untrained(draft_vocab=17, markov_rank=18)
    assert dataclasses.replace(tiny.head_config(), markov_rank=41).markov_rank == 41
    with pytest.raises(
        InputError, match="markov_kind: must be one of vanilla, gated, rnn; got gru"
    ):
        untrained(markov_rank=4, markov_kind="gru")
