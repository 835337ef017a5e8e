"""Trees of drafts: the likeliest paths, verified in one forward, and the text of plain decoding."""

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.decode import drafters, growth
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.requests import Request
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.decode.tree import (
    candidates,
    conditioned_tree,
    likeliest_tree,
    num_paths,
    num_tree_nodes,
    tree_width,
)
from peagle_jax.types import DraftState, InputError

PROMPTS = [[3, 14, 15], [9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 23], [8], [4, 6, 2, 6, 4, 33, 8]]


def best_first(token_ids: np.ndarray, logprobs: np.ndarray, num_nodes: int) -> list[tuple]:
    """The likeliest paths of one row, as tokens, by a search with a heap."""
    k, width = token_ids.shape
    heap = [(-logprobs[0, 0], (0,))]
    paths = []
    while heap and len(paths) < num_nodes:
        cost, ranks = heapq.heappop(heap)
        paths.append(tuple(token_ids[depth, rank] for depth, rank in enumerate(ranks)))
        if ranks[-1] + 1 < width:
            step = logprobs[len(ranks) - 1, ranks[-1]] - logprobs[len(ranks) - 1, ranks[-1] + 1]
            heapq.heappush(heap, (cost + step, (*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < k:
            heapq.heappush(heap, (cost - logprobs[len(ranks), 0], (*ranks, 0)))
    return paths


@pytest.mark.parametrize("k, num_nodes", [(1, 3), (3, 1), (4, 9), (7, 32), (5, 64)])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_tree_is_best_first(k, num_nodes, spread):
    rng = np.random.default_rng(k)
    logits = spread * rng.normal(size=(3, k, 40))
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    width = tree_width(num_nodes, 40)
    token_ids = np.argsort(-logprobs, axis=-1)[..., :width].astype(np.int32)
    logprobs = np.take_along_axis(logprobs, token_ids, axis=-1).astype(np.float32)
    tree = likeliest_tree(jnp.asarray(token_ids), jnp.asarray(logprobs), num_nodes)
    for row in range(3):
        paths: list[tuple] = []
        parents, depth = np.asarray(tree.parents[row]), np.asarray(tree.depth[row])
        for node, (token, parent) in enumerate(zip(tree.tokens[row], parents, strict=True)):
            assert parent <= node  # a parent comes first
            paths.append((*(paths[parent - 1] if parent else ()), int(token)))
            assert len(paths[-1]) == depth[node + 1]
        assert sorted(paths) == sorted(best_first(token_ids[row], logprobs[row], num_nodes))
        paths = [(), *paths]
        want = [[a == b[: len(a)] for a in paths] for b in paths]
        assert np.array_equal(tree.ancestors[row], want)


def test_candidates_are_all_that_can_be_needed():
    """A path is one if no more than N paths, itself included, are at least as likely."""
    table = candidates(4, 10)
    paths = {tuple(r[:d]) for r, d in zip(table.ranks.tolist(), table.depth.tolist(), strict=True)}
    assert len(paths) == len(table.depth)
    every = [p for d in range(1, 5) for p in itertools.product(range(11), repeat=d)]

    def num_likelier(path):
        ranges = [itertools.product(*(range(r + 1) for r in path[:d])) for d in range(1, 5)]
        return len({p for options in ranges for p in options})

    small = [p for p in every if np.prod([r + 1 for r in p]) <= 10]
    assert paths == {p for p in small if num_likelier(p) <= 10}
    assert num_tree_nodes(1, 5, 90) == 5 and num_tree_nodes(1, 100, 90) == 16
    assert num_tree_nodes(2, 100, 3) == 3 + 9 and tree_width(100, 3) == 3
    assert len(candidates(7, 32).depth) < 1500 and len(candidates(7, 64).depth) < 6000


@pytest.mark.parametrize("k, num_nodes, width", [(1, 9, 16), (4, 10, 3), (7, 64, 16), (5, 33, 5)])
def test_paths_are_counted_without_a_list(k, num_nodes, width):
    assert num_paths(k, num_nodes, width) == len(candidates(k, num_nodes, width).depth)
    assert num_paths(7, 256) == 61_852 and num_paths(128, 256) > 10**7  # at once


@functools.cache
def truth():
    return [tiny.greedy(tuple(p), 30) for p in PROMPTS]


# (6, 2): a path of fewer nodes than K has K + 1 places all the same, at the end of a cache, too
@pytest.mark.parametrize("k, num_nodes", [(1, 4), (3, 3), (4, 12), (6, 33), (6, 2)])
def test_greedy_text_is_plain_decodings(k, num_nodes, monkeypatch):
    monkeypatch.setattr(growth, "FIRST_SLOTS", 32)
    answers = generate(
        tiny.target(), tiny.head(), PROMPTS, k=k, num_tree_nodes=num_nodes, max_new_tokens=30
    )
    assert [a.output_token_ids for a in answers] == truth()
    assert all(a.num_draft_tokens == num_nodes * a.num_drafts for a in answers)
    accepted = sum(a.num_accepted_tokens for a in answers)
    assert accepted == sum(sum(a.is_draft) for a in answers) > 0


@pytest.mark.parametrize("num_nodes", [None, 9])
@pytest.mark.parametrize(
    "design",
    [
        {"placeholder_attention": "bidirectional", "windows": (4, None)},
        {"placeholder_attention": "committed"},
        {"placeholder_context": "injected", "markov_rank": 3},
    ],
)
def test_greedy_text_with_other_attention_of_placeholders(design, num_nodes):
    options = {"k": 4, "num_tree_nodes": num_nodes, "max_new_tokens": 30}
    answers = generate(tiny.target(), tiny.head(**design), PROMPTS, **options)
    assert [a.output_token_ids for a in answers] == truth()
    assert sum(a.num_accepted_tokens for a in answers) > 0


def test_a_tree_accepts_more_than_a_chain():
    """Random heads are poor: a chain of 5 is hardly ever right, 40 nodes sometimes are."""
    options = {"k": 5, "max_new_tokens": 60}
    target, head = tiny.target(), tiny.head()
    chain = generate(target, head, PROMPTS, **options)
    tree = generate(target, head, PROMPTS, num_tree_nodes=40, **options)
    assert [a.output_token_ids for a in tree] == [a.output_token_ids for a in chain]
    steps = [sum(a.num_drafts for a in answers) for answers in (chain, tree)]
    assert steps[1] < 0.9 * steps[0]


def conditioned_paths(root, table, k, num_nodes):
    """The likeliest paths of one row; table[d][parent][token] has log-probabilities."""
    heap = [(-table[0][root, t], (t,)) for t in range(table.shape[2])]
    heapq.heapify(heap)
    paths = []
    while heap and len(paths) < num_nodes:
        cost, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < k:
            of_parent = table[len(path)][path[-1]]
            for token, logprob in enumerate(of_parent):
                heapq.heappush(heap, (cost - logprob, (*path, token)))
    return paths


def paths_of(tree, row) -> list[tuple]:
    paths: list[tuple] = [()]
    nodes = zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True)
    for place, (token, parent) in enumerate(nodes):
        assert parent <= place  # a parent comes first
        paths.append((*paths[parent], token))
    return paths


@pytest.mark.parametrize("k, num_nodes", [(1, 3), (3, 1), (4, 9), (6, 24), (2, 99)])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_a_conditioned_tree_is_best_first(k, num_nodes, spread):
    """Against a search with a heap over all continuations of every path."""
    rng, vocab = np.random.default_rng(k), 7
    logits = spread * rng.normal(size=(k, vocab, vocab))
    table = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    width, roots = min(num_nodes, vocab), np.array([2, 5])

    def continuations(depth, parents, states):
        logprobs = table[depth - 1][np.asarray(parents)]
        ids = np.argsort(-logprobs, axis=-1, kind="stable")[..., :width]
        sorted_logprobs = np.take_along_axis(logprobs, ids, axis=-1)
        return jnp.asarray(ids), jnp.asarray(sorted_logprobs, jnp.float32), states

    tree = conditioned_tree(jnp.asarray(roots), jnp.zeros((2, 1, 0)), continuations, k, num_nodes)
    assert tree.tokens.shape[1] == num_tree_nodes(k, num_nodes, vocab)
    for row, root in enumerate(roots):
        paths = paths_of(tree, row)
        assert sorted(paths[1:]) == sorted(conditioned_paths(root, table, k, num_nodes))
        assert np.asarray(tree.depth[row]).tolist() == [len(path) for path in paths]
        want = [[a == b[: len(a)] for a in paths] for b in paths]
        assert np.array_equal(tree.ancestors[row], want)


@pytest.mark.parametrize("temperature", [None, (0.0, 0.4)])
@pytest.mark.parametrize("markov_rank", [None, 4])
def test_the_paths_of_a_head_are_the_likeliest(markov_rank, temperature):
    """Enumerated; with a Markov head a token's probability is by its parent.

    For a greedy target the logits are divided by 0.7.
    """
    markov = {"markov_rank": markov_rank, "markov_kind": "gated"} if markov_rank else {}
    head, k, num_nodes = tiny.head(**markov, draft_vocab=9), 3, 20
    drafter, rng = make_drafter(head, k), np.random.default_rng(3)
    state = DraftState(drafter.init(2, 16), None)
    aux = jnp.asarray(rng.normal(size=(2, k + 1, head.config.sizes.aux_dim)), jnp.float32)
    inputs = state, jnp.asarray([[6] * 4, [30] * 4]), aux, jnp.ones(2, jnp.int32)
    of_rows = None if temperature is None else jnp.asarray(temperature)

    @jax.jit
    def run(params):
        module, hidden, _ = drafter.read(params, *inputs)
        normed = module.final_norm(hidden)
        every = jnp.broadcast_to(jnp.arange(41)[None, None], (2, k, 41))
        by_parent = jnp.broadcast_to(normed[:, :, None], (2, k, 41, normed.shape[-1]))
        bias = jnp.zeros((2, k, 41, 9))
        if markov_rank:
            bias, _ = module.markov(every, by_parent, module.markov.first_state(by_parent))
        logits = module.lm_head(normed)[:, :, None] + bias
        return drafter.tree(params, *inputs, num_nodes, of_rows)[0], logits

    def is_sampled(row: int) -> bool:
        return temperature is not None and temperature[row] > 0

    tree, logits = run(head.params)
    ids = np.arange(9) + np.asarray(head.params["d2t"])
    table = np.full((2, k, 41, 41), -np.inf)
    for row in range(2):
        divisor = 1.0 if is_sampled(row) else 0.7
        table[row][..., ids] = jax.nn.log_softmax(np.asarray(logits[row]) / divisor)
    for row, root in enumerate((6, 30)):
        want = sorted(conditioned_paths(root, table[row], k, num_nodes))
        assert sorted(paths_of(tree, row)[1:]) == want
        # another divisor would have been noticed
        other = jax.nn.log_softmax(table[row] / 0.7 if is_sampled(row) else table[row] * 0.7)
        assert sorted(conditioned_paths(root, np.asarray(other), k, num_nodes)) != want


def test_the_paths_of_a_head_with_a_state_are_the_likeliest():
    """All 9^4 paths, each one's tokens read in turn from its beginning."""
    head, k, num_nodes = tiny.head(markov_rank=4, markov_kind="rnn", draft_vocab=9), 4, 40
    markov = jax.tree.map(lambda x: 3 * x, head.params["markov"])  # so that states decide
    drafter, rng = make_drafter(head, k), np.random.default_rng(3)
    state = DraftState(drafter.init(1, 16), None)
    aux = jnp.asarray(rng.normal(size=(1, k + 1, head.config.sizes.aux_dim)), jnp.float32)
    inputs = state, jnp.asarray([[6] * (k + 1)]), aux, jnp.ones(1, jnp.int32)
    ids = np.arange(9) + np.asarray(head.params["d2t"])
    paths = np.array(list(itertools.product(range(9), repeat=k)))

    @jax.jit
    def run(params):
        module, hidden, _ = drafter.read(params, *inputs)
        normed = jnp.broadcast_to(module.final_norm(hidden), (len(paths), k, hidden.shape[-1]))
        previous = np.concatenate([np.full((len(paths), 1), 6), ids[paths[:, :-1]]], axis=1)
        state, logprobs = module.markov.first_state(normed[:, 0]), []
        for d in range(k):
            bias, state = module.markov(jnp.asarray(previous[:, d]), normed[:, d], state)
            logits = (module.lm_head(normed[:, d]) + bias) / 0.7
            logprobs.append(jax.nn.log_softmax(logits)[jnp.arange(len(paths)), paths[:, d]])
        return drafter.tree(params, *inputs, num_nodes, None)[0], jnp.stack(logprobs, axis=1)

    tree, logprobs = run({**head.params, "markov": markov})
    scores = {}
    for path, of_tokens in zip(paths.tolist(), np.asarray(logprobs), strict=True):
        for end in range(1, k + 1):
            scores[tuple(ids[path[:end]].tolist())] = float(of_tokens[:end].sum())
    want = sorted(scores, key=lambda path: -scores[path])[:num_nodes]
    assert sorted(paths_of(tree, 0)[1:]) == sorted(want)
    assert len({path[1:] for path in want if len(path) > 1}) > 3


def test_trees_are_made_for_the_temperature_of_their_requests(monkeypatch):
    seen, tree_divisor = [], drafters.tree_divisor

    def watched(temperature):
        seen.append(None if temperature is None else temperature.shape)
        return tree_divisor(temperature)

    monkeypatch.setattr(drafters, "tree_divisor", watched)
    # nodes that no other test has; drawn trees are for sampling rows anyway
    options = {"k": 3, "num_tree_nodes": 13, "max_new_tokens": 4, "sample_drafts": False}
    generate(tiny.target(), tiny.head(), PROMPTS[:1], **options)
    assert set(seen) == {None}
    seen.clear()
    generate(tiny.target(), tiny.head(), PROMPTS[:1], temperature=1.3, **options)
    assert set(seen) == {(1,)}


def test_greedy_text_of_a_conditioned_tree_is_plain_decodings():
    options = {"k": 4, "num_tree_nodes": 12, "max_new_tokens": 30}
    answers = generate(tiny.target(), tiny.head(markov_rank=4), PROMPTS, **options)
    assert [a.output_token_ids for a in answers] == truth()
    assert all(a.num_draft_tokens == 12 * a.num_drafts for a in answers)
    assert sum(a.num_accepted_tokens for a in answers) > 0


class Perfect:
    """Stands in for `likeliest`: the target's own text, at a rank that differs by position."""

    def __init__(self, text: list[int], prompt: list[int], ranks: tuple[int, ...]):
        self.text, self.start, self.ranks = jnp.asarray(text), len(prompt), ranks

    def __call__(self, drafter, params, state, tokens, aux, count, width, divisor):
        _, _, new = drafter.read(params, state, tokens, aux, count)
        # the position of the newest committed token, of which the text has those that follow
        last = new.cache.length - self.start
        ids = []
        for i, rank in enumerate(self.ranks):
            right = self.text[jnp.clip(last + 1 + i, 0, len(self.text) - 1)]
            others = (right[:, None] + 1 + jnp.arange(width)[None]) % 41
            ids.append(others.at[:, rank].set(right) if rank < width else others)
        logprobs = jnp.tile(-1.0 - jnp.arange(width), (len(tokens), len(self.ranks), 1))
        return jnp.stack(ids, axis=1).astype(jnp.int32), logprobs, new


@pytest.mark.parametrize("ranks", [(0, 0, 0), (1, 0, 0), (0, 2, 0), (1, 1, 0), (0, 0, 9)])
def test_a_path_away_from_the_likeliest_is_kept(ranks, monkeypatch):
    """Its keys, values and hidden states are moved to where a chain would have them."""
    drafter = make_drafter(tiny.head(), 3)
    perfect = Perfect(truth()[0], PROMPTS[0], ranks)
    monkeypatch.setattr(type(drafter), "likeliest", lambda *arguments: perfect(*arguments))
    (answer,) = generate(
        tiny.target(seed=0),
        drafter,
        PROMPTS[:1],
        draft_params=tiny.head().params,
        num_tree_nodes=30 + sum(ranks),  # another program for each case
        max_new_tokens=30,
    )
    assert answer.output_token_ids == truth()[0]
    depth = 2 if ranks[2] == 9 else 3
    assert answer.acceptance_length == pytest.approx(1 + depth, abs=0.5)


def test_sampling_penalties_and_logprobs():
    """A seed's text has the target's penalties and probabilities, whatever is beside it."""
    head = tiny.head()
    engine = Engine(
        tiny.target(), make_drafter(head, 4), head.params, num_tree_nodes=12, max_batch=3
    )
    request = Request(prompt=[3, 14], max_new_tokens=20, temperature=0.9, seed=5, logprobs=True)
    forbidden = Request(prompt=[8], max_new_tokens=20, logit_bias={5: -100.0, 23: -100.0})
    answers = dict(engine.run([request, forbidden, request]))
    assert answers[0] == answers[2]
    assert not {5, 23} & set(answers[1].output_token_ids)
    plain = dict(Engine(tiny.target()).run([forbidden]))[0]
    assert answers[1].output_token_ids == plain.output_token_ids
    assert all(x <= 0 for x in answers[0].logprobs) and len(answers[0].logprobs) == 20


@pytest.mark.parametrize(
    "method, nodes, rule", [("peagle", 0, "1 or more"), ("eagle3", 4, "P-EAGLE")]
)
def test_mistakes(method, nodes, rule):
    options = {"max_new_tokens": 9, "num_tree_nodes": nodes}
    with pytest.raises(InputError, match=f"num_tree_nodes: .*{rule}"):
        generate(tiny.target(), tiny.head(), [[1]], k=3, method=method, **options)
    with pytest.raises(InputError, match="got plain decoding"):
        generate(tiny.target(), None, [[1]], num_tree_nodes=4, max_new_tokens=9)
    assert DecodeSpec(tiny.target().graph, tiny.target().config, None, True).num_drafts == 0


@pytest.mark.parametrize("draft_vocab, width", [(7, 7), (41, 16)])
def test_a_tree_wider_than_the_vocabulary(draft_vocab, width):
    """Or than the tokens of a position that trees choose from."""
    head = tiny.head(draft_vocab=draft_vocab)
    for k, most in ((1, width), (2, width + width**2)):
        rule = rf"with K = {k} and {width} continuations of a draft there are {most} nodes; got"
        if most < 256:  # the most that trees have
            Engine(tiny.target(), make_drafter(head, k), head.params, num_tree_nodes=most)
            with pytest.raises(InputError, match=f"num_tree_nodes: {rule} {most + 1}; use at m"):
                Engine(tiny.target(), make_drafter(head, k), head.params, num_tree_nodes=most + 1)
