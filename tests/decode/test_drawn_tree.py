"""Trees whose nodes are drawn: their form, their tokens, and what they are for.

tests/decode/test_sampling.py has the distribution of the texts.
"""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_tree import PROMPTS, paths_of, truth

from peagle_jax.decode.drawn_tree import RANK_SHARES, draw_tree, most_children, walk_drawn
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.requests import Request
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.types import DraftState

K, NODES = 4, 11


@functools.cache
def trees(markov_rank: int | None, kind: str = "gated", top_k: int = 0):
    """Of a greedy row and of seven that sample, with one hidden state; and of the likeliest paths.

    Also the distribution that children are drawn from, at each depth behind the token 5.
    """
    head = tiny.head(markov_rank=markov_rank, markov_kind=kind, draft_vocab=9)
    drafter, rng = make_drafter(head, K), np.random.default_rng(3)
    aux = np.repeat(rng.normal(size=(1, K + 1, head.config.sizes.aux_dim)), 8, axis=0)
    state = DraftState(drafter.init(8, 16), None)
    tokens = jnp.full((8, K + 1), 6)
    inputs = state, tokens, jnp.asarray(aux, jnp.float32), jnp.ones(8, jnp.int32)
    sampling = sampling_params(8, [0.0, *[0.8] * 7], top_k, 1.0, range(8))

    @jax.jit
    def run(params):
        module, hidden, _ = drafter.read(params, *inputs)
        tree, q_of = draw_tree(module, hidden, tokens[:, 0], NODES, sampling)
        q = [q_of(depth, jnp.full(8, 5), None)[0] for depth in range(1, K + 1)]
        return tree, jnp.stack(q, axis=1), drafter.tree(params, *inputs, NODES, None)[0]

    tree, q, likeliest = run(head.params)
    return tree, np.asarray(q), likeliest


def form_of(tree, row) -> set[tuple[int, ...]]:
    """The paths of a tree as ranks of their tokens among the children of a node."""
    ranks: list[tuple[int, ...]] = [()]
    count: dict[int, int] = {}
    for parent in tree.parents[row].tolist():
        ranks.append((*ranks[parent], count.setdefault(parent, 0)))
        count[parent] += 1
    return set(ranks[1:])


def best_form(k: int, num_nodes: int) -> set[tuple[int, ...]]:
    """By a search with a heap."""
    heap, found = [(-RANK_SHARES[0], (0,))], set()
    while len(found) < num_nodes:
        share, path = heapq.heappop(heap)
        found.add(path)
        if path[-1] + 1 < len(RANK_SHARES):
            next_share = share / RANK_SHARES[path[-1]] * RANK_SHARES[path[-1] + 1]
            heapq.heappush(heap, (next_share, (*path[:-1], path[-1] + 1)))
        if len(path) < k:
            heapq.heappush(heap, (share * RANK_SHARES[0], (*path, 0)))
    return found


@pytest.mark.parametrize("markov_rank", [None, 4])
def test_the_form_does_not_depend_on_draws(markov_rank):
    tree, _, _ = trees(markov_rank)
    forms = [form_of(tree, row) for row in range(8)]
    assert all(form == best_form(K, NODES) for form in forms[1:]) and forms[0] != forms[1]
    widest = [max(path[d] for path in forms[1] if len(path) > d) + 1 for d in range(K)]
    most = most_children(K, NODES, 9)
    assert all(a <= b <= a + 1 for a, b in zip(widest, most, strict=True))
    assert len({tuple(tree.tokens[row].tolist()) for row in range(1, 8)}) > 1


@pytest.mark.parametrize("markov_rank", [None, 4])
def test_children_are_different_tokens_that_can_be_drawn(markov_rank):
    tree, q, _ = trees(markov_rank)
    assert np.allclose(q[1:].sum(axis=-1), 1, atol=1e-5) and not q[0].any()
    known = q[1:].any(axis=(0, 1)).nonzero()[0]
    assert len(known) == 9  # the head's vocabulary
    for row in range(1, 8):
        paths = paths_of(tree, row)
        assert len(set(paths)) == NODES + 1  # no two children of a node are equal
        assert set(tree.tokens[row].tolist()) <= set(known.tolist())


@pytest.mark.parametrize("markov_rank", [None, 4])
def test_first_children_are_distributed_as_q(markov_rank):
    """Many rows with one hidden state and seeds of their own, at the first depth."""
    head, count = tiny.head(markov_rank=markov_rank, draft_vocab=9), 4_000
    hidden = jnp.broadcast_to(
        jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, head.config.dim)), jnp.float32),
        (count, 1, head.config.dim),
    )
    sampling = sampling_params(count, 0.8, 0, 1.0, range(count))

    @jax.jit
    def run(params):
        module = head.bind(params)
        tree, q_of = draw_tree(module, hidden, jnp.full(count, 6), 2, sampling)
        return tree.tokens, q_of(1, jnp.full(count, 6), None)[0][0]

    tokens, q = jax.device_get(run(head.params))
    for place, want in enumerate((q, second_shares(q))):
        shares = np.bincount(tokens[:, place], minlength=41) / count
        np.testing.assert_allclose(shares, want, atol=4 * 0.5 / np.sqrt(count))
    assert np.abs(q - second_shares(q)).max() > 0.05


def test_what_children_are_drawn_from_knows_the_whole_path():
    """A state passes from node to node: q of 6, 5, 7, 30 against the head's own calls."""
    head, path = tiny.head(markov_rank=4, markov_kind="rnn", draft_vocab=9), (6, 5, 7, 30)
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(2, K, head.config.dim)), jnp.float32)
    sampling = sampling_params(2, 0.8, 0, 1.0, range(2))

    @jax.jit
    def run(params):
        module = head.bind(params)
        _, q_of = draw_tree(module, hidden, jnp.full(2, path[0]), NODES, sampling)
        normed, state, found, want = module.final_norm(hidden), None, [], []
        own = module.markov.first_state(normed[:, 0])
        for depth, token in enumerate(path, start=1):
            q, state = q_of(depth, jnp.full(2, token), state)
            bias, own = module.markov(jnp.full(2, token), normed[:, depth - 1], own)
            found.append(q)
            want.append(jax.nn.softmax((module.lm_head(normed[:, depth - 1]) + bias) / 0.8))
        forgetful = q_of(K, jnp.full(2, path[-1]), None)[0]
        return jnp.stack(found), jnp.stack(want), forgetful

    found, want, forgetful = jax.device_get(run(head.params))
    ids = np.arange(9) + np.asarray(head.params["d2t"])
    np.testing.assert_allclose(found[..., ids], want, atol=1e-5)
    assert np.abs(found[-1] - forgetful).sum(axis=-1).min() > 0.02


def test_the_walk_hands_on_what_was_read():
    """Each node's children are tried with the state behind all of its path."""
    tree, _, _ = trees(4, "rnn")
    calls = []

    def draft_probabilities(depth, parent, state):
        calls.append((depth, parent.tolist(), state))
        return jnp.full((8, 41), 1 / 41), f"behind {depth} tokens"

    _, tokens, _ = walk_drawn(
        tree,
        most_children(K, NODES, 9),
        lambda depth, node, drafts: jnp.full((8, 41), 1 / 41),
        draft_probabilities,
        jnp.full(8, 6),
        jnp.zeros(8, bool),
        jax.random.split(jax.random.key(3), 8),
    )
    states = [None, *(f"behind {depth} tokens" for depth in range(1, K))]
    parents = [[6] * 8, *np.asarray(tokens).T[: K - 1].tolist()]
    assert calls == [(d + 1, parents[d], states[d]) for d in range(K)]


def second_shares(q: np.ndarray) -> np.ndarray:
    """The distribution of the second of two draws, without the first one."""
    rest = q[None] * (1 - np.eye(len(q))) / np.maximum(1 - q, 1e-9)[:, None]
    return q @ rest


@pytest.mark.parametrize("markov_rank, kind", [(None, "gated"), (4, "gated"), (4, "rnn")])
def test_greedy_rows_have_the_likeliest_paths(markov_rank, kind):
    tree, _, likeliest = trees(markov_rank, kind)
    assert sorted(paths_of(tree, 0)) == sorted(paths_of(likeliest, 0))


def test_where_fewer_tokens_can_be_drawn_than_there_are_children():
    """Of two tokens that top-k leaves, a third child is none: it cannot be accepted."""
    tree, q, _ = trees(None, "vanilla", 2)
    assert ((q[1:] > 0).sum(axis=-1) == 2).all()
    assert any(path[0] >= 2 for path in form_of(tree, 1))
    head = tiny.head()
    options = {"max_new_tokens": 40, "temperature": 0.9, "top_k": 2, "num_tree_nodes": NODES}
    answers = generate(tiny.target(), head, PROMPTS, k=K, **options)
    assert all(a.finish_reason == "length" for a in answers)


def test_drawn_trees_accept_more_than_the_likeliest_paths():
    """Of a target that samples; random heads expect something else than it, but widely."""
    steps = {}
    for sample_drafts in (True, False):
        options = {"k": K, "num_tree_nodes": NODES, "sample_drafts": sample_drafts}
        options |= {"temperature": 1.0, "max_new_tokens": 80, "stop_ids": ()}
        answers = generate(tiny.target(), tiny.head(), PROMPTS * 3, **options)
        steps[sample_drafts] = sum(a.num_drafts for a in answers)
    assert steps[True] < 0.9 * steps[False]


def test_greedy_requests_beside_sampled_ones():
    """Their text and their counters are those of a batch without such neighbours."""
    head = tiny.head()
    drafter = make_drafter(head, K)
    greedy = Request(prompt=PROMPTS[0], max_new_tokens=30, stop_ids=())
    sampled = Request(prompt=PROMPTS[1], max_new_tokens=30, temperature=1.2, stop_ids=())

    def engine():
        options = {"num_tree_nodes": NODES, "max_batch": 2}
        return Engine(tiny.target(), drafter, head.params, **options)

    beside = dict(engine().run([greedy, sampled]))[0]
    assert beside.output_token_ids == truth()[0]
    assert beside == dict(engine().run([greedy]))[0]
