"""Sampled speculation keeps the target's distribution.

Every sequence of 3 tokens is counted in 200,000 samples per case, in 60,000 of the case that
`make test` runs.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import stats
from scipy.special import softmax

from peagle_jax.decode import draft_tokens, drawn_tree, loop, tree_step
from peagle_jax.decode.drawn_tree import _after_refusal as after_refusal
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.penalties import count_tokens, penalize, penalties_of
from peagle_jax.decode.prefill import prefill, run_to_end
from peagle_jax.decode.requests import Request
from peagle_jax.decode.sampling import probabilities, sample, sampling_params
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.decode.tree import likeliest_tree, walk
from peagle_jax.decode.verify import verify_sampled
from peagle_jax.train.attention import PackedCausal
from peagle_jax.types import InputError, RowOptions

V, LENGTH, ROWS, CALLS, PROMPT = 5, 3, 20_000, 10, [3, 1]
SHAPE = {"vocab": V, "dim": 16, "mlp_dim": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}
HEAD = {
    "vocab": V,
    "draft_vocab": V,
    "target_dim": 16,
    "layers": 1,
    "windows": (None,),
    "mask_token": 4,
    "dim": 16,
    "mlp_dim": 16,
}
TEMPERATURE = 0.7
REQUEST = Request(
    prompt=PROMPT,
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=-0.9,
    logit_bias={2: 0.8, 4: -0.5},
    min_tokens=2,
)
# of penalized rows: not among their first two tokens, and they end by three in any case
STOP_ID = 1


@functools.cache
def exact(top_k: int, top_p: float, min_p: float, is_penalized: bool) -> np.ndarray:
    """Probability of every sequence of three tokens, by the chain rule over whole forwards."""
    model = tiny.target(**SHAPE)
    sequences = np.array(list(itertools.product(range(V), repeat=LENGTH)))
    tokens = jnp.asarray(np.concatenate([np.tile(PROMPT, (len(sequences), 1)), sequences], axis=1))
    module = model.bind(model.params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    out, _ = module(tokens, positions, PackedCausal(jnp.zeros_like(tokens)), None)
    count = len(sequences)
    sampling = sampling_params(count, TEMPERATURE, top_k, top_p, range(count), min_p)
    total = np.ones(len(sequences))
    for i in range(LENGTH):
        logits = module.compute_logits(out.hidden[:, len(PROMPT) - 1 + i])
        if is_penalized:
            counts = (sequences[:, :i, None] == np.arange(V)).sum(axis=1)
            penalties = penalties_of([REQUEST] * count, V)
            stop_ids = np.full((count, 1), STOP_ID)
            counts = jnp.asarray(counts)[:, None]
            logits = penalize(logits[:, None], counts, penalties, stop_ids)[:, 0]
        p = probabilities(logits, sampling)
        total *= np.asarray(p)[np.arange(len(sequences)), sequences[:, i]]
    return total


def p_value(
    head_changes: dict,
    k: int,
    method: str,
    top_k: int,
    top_p: float,
    sample_drafts: bool,
    cache_size: int,
    calls: int = CALLS,
    min_p: float = 0.0,
    is_penalized: bool = False,
    num_nodes: int | None = None,
) -> float:
    target, head = tiny.target(**SHAPE), tiny.head(**{**HEAD, **head_changes})
    if method == "eagle":
        target = tiny.target(**SHAPE, **tiny.FINAL)
        head = tiny.head(**{**HEAD, **tiny.FINAL, "mask_token": None})
    drafter = make_drafter(head, k, method)
    spec = DecodeSpec(target.graph, target.config, drafter, sample_drafts, num_nodes=num_nodes)
    params = target.params, head.params
    prompts = np.tile(PROMPT, (ROWS, 1)).astype(np.int32)
    lengths, max_new_tokens = np.full(ROWS, len(PROMPT)), np.full(ROWS, LENGTH)
    stop_ids = np.full((ROWS, 1), STOP_ID if is_penalized else -1)
    counts = np.zeros(V**LENGTH)
    accepted = 0
    for call in range(calls):
        start = call * ROWS + 1_000_000 * k
        seeds = range(start, start + ROWS)
        sampling = sampling_params(ROWS, TEMPERATURE, top_k, top_p, seeds, min_p)
        penalties = penalties_of([REQUEST] * ROWS, V) if is_penalized else None
        options = RowOptions(max_new_tokens, stop_ids, sampling, penalties)
        reading = prefill(spec, cache_size, *params, prompts, lengths, options, chunk=len(PROMPT))
        state = run_to_end(reading)
        _, state = loop.decode(spec, *params, options, ROWS, 99, state)
        index = np.asarray(state.output[:, :LENGTH]) @ V ** np.arange(LENGTH - 1, -1, -1)
        counts += np.bincount(index, minlength=V**LENGTH)
        accepted += int(state.num_accepted_per_pos.sum())
    assert accepted > calls * ROWS / 10  # else acceptance was not tested
    return chi_square(counts, exact(top_k, top_p, min_p, is_penalized) * counts.sum())


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value, cells of expected count under 5 merged into one."""
    assert counts[expected == 0].sum() == 0
    small = expected < 5

    def merge(x):
        return np.append(x[~small], x[small].sum())

    observed, wanted = merge(counts), merge(expected)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue


MARKOV_REDUCED = {"draft_vocab": 3, "markov_rank": 3, "markov_kind": "rnn"}
CASES = {
    "k1": ({}, 1, "peagle", 0, 1.0, True),
    "k4": ({}, 4, "peagle", 0, 1.0, True),
    "k4_greedy_drafts": ({}, 4, "peagle", 0, 1.0, False),
    "k4_reduced": ({"draft_vocab": 3, "mask_token": 4}, 4, "peagle", 0, 1.0, True),
    "k1_reduced_greedy": ({"draft_vocab": 3}, 1, "peagle", 0, 1.0, False),
    "k4_eagle3": ({}, 4, "eagle3", 0, 1.0, True),
    "k4_eagle": ({}, 4, "eagle", 0, 1.0, True),
    "k4_markov": ({"markov_rank": 2}, 4, "peagle", 0, 1.0, True),
    "k4_markov_rnn_reduced": (MARKOV_REDUCED, 4, "peagle", 4, 0.9, True),
    "k4_filtered": ({}, 4, "peagle", 4, 0.85, True),
}


@pytest.mark.parametrize("name", CASES)
def test_distribution(name):
    calls = 3 if name == "k1" or "markov" in name else CALLS
    assert p_value(*CASES[name], cache_size=9, calls=calls) > 0.001


@pytest.mark.parametrize("name", ["k4", "k4_reduced", "k4_eagle3"])
def test_distribution_with_penalties(name):
    """Every position of a verification has the penalties of the drafts before it.

    So it has the least number of tokens: the stop token may come third.
    """
    has_stop_id = np.array(list(itertools.product(range(V), repeat=LENGTH))) == STOP_ID
    shares = exact(0, 1.0, 0.0, True)
    assert not shares[has_stop_id[:, :2].any(axis=1)].any() and shares[has_stop_id[:, 2]].any()
    assert p_value(*CASES[name], cache_size=9, is_penalized=True) > 0.001
    assert p_value(*CASES[name], cache_size=9, min_p=0.15, calls=3) > 0.001


def test_penalties_that_forget_the_drafts_are_noticed(monkeypatch):
    def forgetful(state, drafts, vocab):
        counts = count_tokens(state, drafts, vocab)
        return jnp.broadcast_to(counts[:, :1], counts.shape)

    monkeypatch.setattr(loop, "count_tokens", forgetful)
    assert p_value(*CASES["k4"], cache_size=12, is_penalized=True) < 1e-6


TREES = {
    "k4_reduced": [(7, False)],  # more children than the head knows tokens
    "k4_markov": [(9, True)],
    "k4_markov_rnn_reduced": [(9, False)],
    "k4_filtered": [(12, False)],
    "k4_greedy_drafts": [(9, True)],  # the likeliest paths, none of them drawn
}
TREE_CASES = [(name, *case) for name, cases in TREES.items() for case in cases]


@pytest.mark.parametrize("name, num_nodes, is_penalized", TREE_CASES)
def test_distribution_of_a_tree(name, num_nodes, is_penalized):
    options = {"num_nodes": num_nodes, "is_penalized": is_penalized}
    assert p_value(*CASES[name], cache_size=20, **options) > 0.001


def test_the_distribution_of_a_drawn_tree():
    """One with a Markov head and several children; others are slow tests."""
    assert p_value(*CASES["k4_markov"], cache_size=20, calls=3, num_nodes=6) > 0.001


def test_wrong_rules_for_a_tree_are_noticed(monkeypatch):
    def first_child(tree, k, next_token):
        """Wrong: where the tree lacks the target's token, its first child is taken."""
        path, tokens, accepted = walk(tree, k, next_token)
        is_child = tree.parents == path[:, :1]
        first = jnp.take_along_axis(tree.tokens, is_child.argmax(axis=1)[:, None], axis=1)
        wrong = jnp.where(accepted[:, None] == 0, first, tokens[:, :1])
        return path, jnp.concatenate([wrong, tokens[:, 1:]], axis=1), accepted

    monkeypatch.setattr(tree_step, "walk", first_child)
    case = CASES["k4_greedy_drafts"]
    assert p_value(*case, cache_size=21, num_nodes=3) < 1e-6


def keeps_p(r, q, draft, is_refused):
    """Wrong: further children are tried against p itself."""
    return r, after_refusal(r, q, draft, is_refused)[1]


def keeps_q(r, q, draft, is_refused):
    """Wrong: further children count as drawn with those before them."""
    return after_refusal(r, q, draft, is_refused)[0], q


def keeps_sums(r, q, draft, is_refused):
    """Wrong: what is left is not divided by its sum."""
    left = jnp.where(is_refused[:, None], jnp.maximum(r - q, 0), r)
    return left, after_refusal(r, q, draft, is_refused)[1]


@pytest.mark.parametrize("wrong, cache_size", [(keeps_p, 22), (keeps_q, 23), (keeps_sums, 24)])
def test_wrong_rules_for_a_drawn_tree_are_noticed(wrong, cache_size, monkeypatch):
    monkeypatch.setattr(drawn_tree, "_after_refusal", wrong)
    assert p_value(*CASES["k4"], cache_size=cache_size, calls=4, num_nodes=9) < 1e-6


def test_a_form_that_depends_on_draws_is_noticed(monkeypatch):
    """Wrong: the likeliest of the children that were drawn come first."""

    def sorted_children(token_ids, logprobs, num_nodes):
        order = jnp.argsort(token_ids, axis=-1)
        return likeliest_tree(jnp.take_along_axis(token_ids, order, axis=-1), logprobs, num_nodes)

    monkeypatch.setattr(drawn_tree, "likeliest_tree", sorted_children)
    assert p_value(*CASES["k4"], cache_size=25, calls=4, num_nodes=9) < 1e-6


def no_residual(drafts, draft_logits, logits, sampling):
    """Wrong: a refused draft is replaced by a sample of p, not of normalize(max(p - q, 0))."""
    tokens, accepted = verify_sampled(drafts, draft_logits, logits, sampling)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 99))(sampling.key)
    p = jax.vmap(lambda x: probabilities(x, sampling), 1, 1)(logits)
    other = jax.vmap(lambda key, p: jax.random.categorical(key, jnp.log(p)))(keys, p)
    return jnp.where(
        jnp.arange(tokens.shape[1])[None] == accepted[:, None], other, tokens
    ), accepted


def always_accepts(drafts, draft_logits, logits, sampling):
    """Wrong: every draft is kept."""
    tokens, _ = verify_sampled(drafts, draft_logits, logits, sampling)
    return jnp.concatenate([drafts, tokens[:, -1:]], axis=1), jnp.full(
        len(drafts), drafts.shape[1], jnp.int32
    )


def test_a_q_without_the_markov_bias_is_noticed(monkeypatch):
    """Drafts are drawn with the bias of the draft before; q must have it as well."""

    def without_bias(head, hidden, *others):
        drafts, logits = in_turn(head, hidden, *others)
        return drafts, head.compute_logits(hidden).astype(logits.dtype)

    in_turn = draft_tokens.draft_in_turn
    monkeypatch.setattr(draft_tokens, "draft_in_turn", without_bias)
    assert p_value(*CASES["k4_markov"], cache_size=13, calls=3) < 1e-6


@pytest.mark.parametrize("wrong, cache_size", [(no_residual, 10), (always_accepts, 11)])
def test_wrong_rules_are_noticed(wrong, cache_size, monkeypatch):
    # a cache of another size makes another program, which is traced anew
    monkeypatch.setattr(loop, "verify_sampled", wrong)
    assert p_value(*CASES["k4"], cache_size=cache_size) < 1e-6


@pytest.mark.parametrize(
    "top_k, top_p, num_kept",
    [(0, 1.0, 5), (2, 1.0, 2), (0, 0.6, 2), (3, 0.5, 2), (0, 0.05, 1), (9, 1.0, 5)],
)
def test_filters(top_k, top_p, num_kept):
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.05, 0.25, 0.2]]))
    p = np.asarray(probabilities(logits, sampling_params(1, 1.0, top_k, top_p, [0])))[0]
    order = [1, 3, 4, 0, 2]
    assert (p > 0).sum() == num_kept and set(np.flatnonzero(p)) == set(order[:num_kept])
    want = np.array([0.1, 0.4, 0.05, 0.25, 0.2]) * (p > 0)
    np.testing.assert_allclose(p, want / want.sum(), rtol=1e-5)


def by_definition(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The probabilities in float64, token by token: temperature, min-p, top-k, top-p, as vLLM."""
    p = softmax(logits.astype(np.float64) / temperature)
    tokens = [t for t in np.argsort(-p, kind="stable") if p[t] >= min_p * p.max()]
    if top_k:
        tokens = tokens[:top_k]
    total, before, kept = p[tokens].sum(), 0.0, []
    for token in tokens:
        if before / total >= top_p:
            break
        before += p[token]
        kept.append(token)
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


def test_draws_follow_the_weights_of_a_large_vocabulary():
    """Blocks of the vocabulary are drawn first; the last one is not full."""
    rng, rows, calls = np.random.default_rng(3), 2_000, 30
    weights = rng.gamma(0.3, size=3_001) * (rng.random(3_001) < 0.4)
    draw = jax.jit(lambda keys, weights: sample(keys, jnp.tile(weights[None], (rows, 1))))
    counts = np.zeros(len(weights))
    for call in range(calls):
        keys = jax.random.split(jax.random.key(call), rows)
        drawn = np.asarray(draw(keys, jnp.asarray(weights, jnp.float32)))
        counts += np.bincount(drawn, minlength=len(weights))
    assert chi_square(counts, weights / weights.sum() * counts.sum()) > 0.001


@pytest.mark.parametrize("only", [0, 63, 64, 2_999, 3_000])
@pytest.mark.parametrize("weight", [1e-37, 1.0, 1e37])
def test_a_token_that_alone_has_weight_is_drawn(only, weight):
    weights = np.zeros((50, 3_001), np.float32)
    weights[:, only] = weight
    keys = jax.random.split(jax.random.key(5), 50)
    assert (np.asarray(sample(keys, jnp.asarray(weights))) == only).all()
    assert (np.asarray(sample(keys, jnp.full((50, 3_001), jnp.nan))) < 3_001).all()


def test_probabilities_by_their_definition():
    """Which tokens are left depends on the order of temperature and filters."""
    rng = np.random.default_rng(5)
    rows, vocab = 60, 12
    logits = rng.normal(0, 2, (rows, vocab)).astype(np.float32)
    temperatures = rng.uniform(0.3, 2.5, rows)
    top_ks, top_ps = rng.integers(0, vocab, rows), rng.uniform(0.2, 1, rows)
    min_ps = rng.choice([0, 0.05, 0.3], rows)
    given = temperatures.tolist(), top_ks.tolist(), top_ps.tolist()
    sampling = sampling_params(rows, *given, range(rows), min_ps.tolist())
    got = np.asarray(probabilities(jnp.asarray(logits), sampling))
    want = np.stack(list(map(by_definition, logits, *given, min_ps)))
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=1e-5)  # float32 against float64


def test_top_k_of_vllm():
    """-1 is all of them."""
    prompts, limits = [[3], [9]], {"max_new_tokens": 9, "temperature": 1.0, "seed": 4}
    answers = [generate(tiny.target(), None, prompts, top_k=k, **limits) for k in (-1, 0, 2)]
    assert answers[0] == answers[1] != answers[2]
    with pytest.raises(InputError, match="top_k: must be 0 or more, or vLLM's -1; got -2"):
        generate(tiny.target(), None, prompts, top_k=-2, **limits)


def test_temperature_zero_is_greedy():
    assert sampling_params(2, 0.0, 0, 1.0, [0, 1]) is None
    with pytest.raises(ValueError, match="top_p"):
        sampling_params(1, 1.0, 0, 0.0, [0])


def test_the_largest_seed():
    """Keys are made of 32 bits; a larger seed would silently be another one."""
    assert sampling_params(1, 0.7, 0, 1.0, [2**32 - 1]) is not None
    with pytest.raises(InputError, match="seed: must lie in 0..2\\^32-1; got 4294967296"):
        sampling_params(1, 0.7, 0, 1.0, [2**32])
