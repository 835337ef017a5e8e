"""Trees of drafts that are drawn, for rows that sample.

Where the target samples, the likeliest token x of a position is accepted with the chance p(x)
alone, and a drawn one with the sum of min(p, q) over all tokens, which is more. So the children of
a node are drawn from q, what the draft head expects there, one after another and each without those
before it (arXiv:2402.14160; by Gumbel-top-k, arXiv:1903.06059). They are tried in this order: child
x is accepted with the chance min(1, r(x) / q(x)), and after a refusal r becomes
normalize(max(r - q, 0)), and q loses x. At first r is p, the target's distribution. Where all
children are refused, or a node has none, the next token is a sample of r. Committed tokens are then
distributed as the target's.

For that the tree's form must not depend on what is drawn. It is the form that has the most accepted
nodes if a child of rank i is accepted in a share RANK_SHARES[i] of all visits of its parent. At one
depth all parents share the random numbers of their draws, because at most one of them is visited.
"""

import functools
import heapq
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.decode.draft_tokens import over_target_vocab
from peagle_jax.decode.sampling import probabilities, sample
from peagle_jax.decode.tree import (
    GREEDY_DIVISOR,
    MAX_WIDTH,
    Tree,
    conditioned_tree,
    likeliest_tree,
    tree_width,
)
from peagle_jax.draft.head import DraftHead
from peagle_jax.kernels import vocab
from peagle_jax.types import SamplingParams

# Of the visits of a node, how many accept its first, second, ... child. The first one's share
# differs by head and text, 0.39 to 0.7 were found; those of others, as parts of it, hardly do
# (LOG.md, 2026-11-29).
RANK_SHARES = 0.55 * np.array([1.0, *(0.25 * rank**-1.3 for rank in range(1, MAX_WIDTH))])

# (depth of the children, 1 to K; their parent's token [B]; the Markov head's state before that,
# None for the root) -> q over the target's vocabulary [B V], and the state after the parent
DraftProbabilities = Callable[[int, Int[Array, " B"], Any], tuple[Float[Array, "B V"], Any]]
# (depth, nodes, tokens on the way to them) -> the target's distribution of the next token [B V]
TargetProbabilities = Callable[[int, Int[Array, " B"], Int[Array, "B K"]], Float[Array, "B V"]]


@functools.cache
def most_children(k: int, num_nodes: int, width: int) -> tuple[int, ...]:
    """The most children of a node at the depths 0 to K - 1, in trees that are drawn."""
    most = [0] * k
    least, num_found = 0.0, 0  # share of the last node; of equal ones any may be in the tree
    heap: list[tuple[float, tuple[int, ...]]] = [(-float(RANK_SHARES[0]), (0,))]
    while heap and (num_found < num_nodes or -heap[0][0] >= least):
        share, path = heapq.heappop(heap)
        num_found += 1
        if num_found == num_nodes:
            least = -share * (1 - 1e-4)
        most[len(path) - 1] = max(most[len(path) - 1], path[-1] + 1)
        if path[-1] + 1 < width:
            next_share = share / RANK_SHARES[path[-1]] * RANK_SHARES[path[-1] + 1]
            heapq.heappush(heap, (float(next_share), (*path[:-1], path[-1] + 1)))
        if len(path) < k:
            heapq.heappush(heap, (float(share * RANK_SHARES[0]), (*path, 0)))
    return tuple(most)


def draw_tree(
    head: DraftHead,
    hidden: Float[Array, "B K D"],
    root: Int[Array, " B"],
    num_nodes: int,
    sampling: SamplingParams,
) -> tuple[Tree, DraftProbabilities]:
    """A tree whose children are drawn; in greedy rows that of the likeliest paths.

    Args:
      hidden: of the K positions.
      root: the last committed token.
      sampling: how rows sample; its keys must be fresh.

    Returns:
      The tree; and what its children were drawn from, 0 for all tokens in greedy rows.
    """
    k, width = hidden.shape[1], tree_width(num_nodes, head.cfg.draft_vocab)
    normed = head.final_norm(hidden)
    unbiased = head.lm_head(normed)
    is_sampled = (jnp.asarray(sampling.temperature) > 0)[:, None, None]
    # "high": others have no more than 23 bits, and tokens of small shares would never be drawn
    shape = k, head.cfg.vocab
    noise = jax.vmap(lambda key: jax.random.gumbel(key, shape, mode="high"))(sampling.key)
    shares = jnp.log(jnp.asarray(RANK_SHARES[:width], jnp.float32))

    def drawn_from(logits: Float[Array, "B M V"]) -> Float[Array, "B M V"]:
        q = jax.vmap(probabilities, (1, None), 1)(logits, sampling)
        return jnp.where(is_sampled, q, 0)

    def drawn(
        logits: Float[Array, "B M V"], noise: Float[Array, "*rows V"]
    ) -> tuple[Int[Array, "B M W"], Float[Array, "B M W"]]:
        """The children in places with such logits, and their scores."""
        likely = jax.nn.log_softmax(logits / GREEDY_DIVISOR, axis=-1)
        perturbed = jnp.where(is_sampled, jnp.log(drawn_from(logits)) + noise, likely)
        scores, ids = jax.lax.top_k(perturbed, width)
        return ids.astype(jnp.int32), jnp.where(is_sampled, shares, scores)

    if head.markov is None:
        logits = over_target_vocab(head, unbiased.astype(jnp.float32))
        q = drawn_from(logits)
        tree = likeliest_tree(*drawn(logits, noise), num_nodes)
        return tree, lambda depth, parent, state: (q[:, depth - 1], None)

    markov, first_state = head.markov, head.markov.first_state(normed[:, :1])

    def logits_behind(
        depth: int, parents: Int[Array, "B M"], states: Float[Array, "B M S"]
    ) -> tuple[Float[Array, "B M V"], Float[Array, "B M S"]]:
        shape = (*parents.shape, normed.shape[-1])
        of_position = jnp.broadcast_to(normed[:, depth - 1][:, None], shape)
        bias, states = markov(parents, of_position, states)
        logits = unbiased[:, depth - 1][:, None] + bias
        return over_target_vocab(head, logits.astype(jnp.float32)), states

    def continuations(
        depth: int, parents: Int[Array, "B M"], states: Float[Array, "B M S"]
    ) -> tuple[Array, Array, Array]:
        logits, states = logits_behind(depth, parents, states)
        return *drawn(logits, noise[:, depth - 1][:, None]), states

    def draft_probabilities(
        depth: int, parent: Int[Array, " B"], state: Float[Array, "B 1 S"] | None
    ) -> tuple[Float[Array, "B V"], Float[Array, "B 1 S"]]:
        before = first_state if state is None else state
        logits, after = logits_behind(depth, parent[:, None], before)
        return drawn_from(logits)[:, 0], after

    return conditioned_tree(root, first_state, continuations, k, num_nodes), draft_probabilities


def walk_drawn(
    tree: Tree,
    num_children: tuple[int, ...],
    target_probabilities: TargetProbabilities,
    draft_probabilities: DraftProbabilities,
    root: Int[Array, " B"],
    is_greedy: Bool[Array, " B"],
    keys: Array,
) -> tuple[Int[Array, "B R"], Int[Array, "B R"], Int[Array, " B"]]:
    """As `tree.walk`, by trying the children of each node in turn.

    Args:
      num_children: the most that a node has at each depth, `most_children`.
      target_probabilities: at the nodes that are reached, after tokens that were accepted.
      draft_probabilities: from `draw_tree`.
      root: the last committed token.
      is_greedy: rows whose next token is the target's argmax.
      keys: of each row, fresh in this step.
    """
    k, rows = len(num_children), jnp.arange(len(root))
    node = accepted = jnp.zeros(len(root), jnp.int32)
    is_inside, parent, state = jnp.ones(len(root), bool), root, None
    path, tokens = [node], []
    for depth in range(k + 1):
        drafts = jnp.stack([*tokens, *[node] * (k - len(tokens))], axis=1)[:, :k]
        r = target_probabilities(depth, node, drafts)
        key = jax.vmap(lambda key, depth=depth: jax.random.split(jax.random.fold_in(key, depth)))(
            keys
        )
        if depth == k:
            tokens.append(sample(key[:, 0], r))
            break
        width = num_children[depth]
        uniform = jax.vmap(lambda key, width=width: jax.random.uniform(key, (width,)))(key[:, 1])
        q, state = draft_probabilities(depth + 1, parent, state)
        is_child = tree.parents == node[:, None]
        number = jnp.cumsum(is_child, axis=1)
        # greedy rows: the tree may have the one token that can follow
        token = vocab.argmax(r)
        is_there = is_child & (tree.tokens == token[:, None])
        is_taken = is_there.any(axis=1) & is_greedy
        taken = is_there.argmax(axis=1) + 1
        for i in range(width):
            is_next = is_child & (number == i + 1)
            place = is_next.argmax(axis=1)
            draft = tree.tokens[rows, place]
            # a token that q does not have was not drawn: there were none left
            is_drawn = is_next.any(axis=1) & (q[rows, draft] > 0) & ~is_taken
            is_right = is_drawn & (uniform[:, i] * q[rows, draft] < r[rows, draft])
            taken = jnp.where(is_right, place + 1, taken)
            token = jnp.where(is_right, draft, token)
            is_taken |= is_right
            r, q = _after_refusal(r, q, draft, is_drawn & ~is_right)
        token = jnp.where(is_taken, token, sample(key[:, 0], r)).astype(jnp.int32)
        tokens.append(token)
        is_inside &= is_taken
        node, parent = jnp.where(is_inside, taken, node).astype(jnp.int32), token
        accepted = accepted + is_inside
        path.append(node)
    return jnp.stack(path, axis=1), jnp.stack(tokens, axis=1), accepted


def _after_refusal(
    r: Float[Array, "B V"], q: Float[Array, "B V"], draft: Int[Array, " B"], is_refused: Array
) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
    """What is left of both distributions, in rows that have refused a draft."""

    def normalized(x: Array, otherwise: Array) -> Array:
        total = x.sum(axis=-1, keepdims=True)
        return jnp.where(is_refused[:, None] & (total > 0), x / total, otherwise)

    without = jnp.where(jnp.arange(q.shape[1])[None] == draft[:, None], 0, q)
    # where p equals q nothing is left of p; then only rounding can have refused the draft
    return normalized(jnp.maximum(r - q, 0), r), jnp.where(
        is_refused[:, None], normalized(without, without), q
    )
