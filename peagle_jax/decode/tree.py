"""Trees of drafts: several continuations are verified in one forward of the target.

P-EAGLE predicts its K positions independently of each other. The probability of a path is then the
product of its tokens' probabilities, and the tree of N nodes that is most likely to hold the
target's text has the N likeliest paths (DDTree; the nodes of a best-first search). Shapes are
static: which paths can ever be among the N likeliest does not depend on the probabilities.

With a Markov head (draft/markov.py) a token's probability is that behind its path, and no path
can be left out beforehand. The likeliest are then found depth by depth (`conditioned_tree`).

A path is written as ranks: (0, 2) is the likeliest token, then the third likeliest. All paths with
lower ranks, and all of their beginnings, are at least as likely. A path with more than N of those
is never needed, which leaves few.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Tokens of a position that trees choose from.
MAX_WIDTH = 16
# What a draft's logits are divided by where the target is greedy. A head is trained on the target's
# whole distribution, of which a greedy target writes the argmax: a draft's argmax is right more
# often than its probability says. With 0.7 the acceptance length of the packaged head with trees of
# 8 to 32 nodes is longer by 3 to 5 % than with 1. Of a target that samples at temperature 0.7 it is
# shorter by 3 to 6 %, so that nothing is divided there (LOG.md, 2026-11-26).
GREEDY_DIVISOR = 0.7


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The paths that a tree can consist of, shorter ones first.

    Attributes:
      ranks: of every token of a path; 0 after its end.
      depth: tokens of a path, 1 to K.
      prefixes: which candidates are the beginnings of a path, itself included; -1 after its end.
    """

    ranks: Int[np.ndarray, "C K"]
    depth: Int[np.ndarray, " C"]
    prefixes: Int[np.ndarray, "C K"]


@functools.cache
def candidates(k: int, num_nodes: int, max_width: int = MAX_WIDTH) -> Candidates:
    """The paths of up to `k` tokens that can be among the `num_nodes` likeliest.

    Args:
      max_width: tokens of a position that paths may have.
    """
    paths: list[tuple[int, ...]] = []

    def extend(path: tuple[int, ...], num_likelier: int, width: int) -> None:
        """Adds the continuations of a path.

        Args:
          num_likelier: paths at least as likely: its beginnings and all with lower ranks.
          width: of these, the paths of its own length.
        """
        if len(path) == k:
            return
        for rank in range(min(max_width, num_nodes)):
            longer = width * (rank + 1)
            if num_likelier + longer > num_nodes:
                return
            paths.append((*path, rank))
            extend((*path, rank), num_likelier + longer, longer)

    extend((), 0, 1)
    paths.sort(key=lambda path: (len(path), path))
    place = {path: i for i, path in enumerate(paths)}
    ranks, prefixes = np.zeros((len(paths), k), np.int32), np.full((len(paths), k), -1, np.int32)
    for i, path in enumerate(paths):
        ranks[i, : len(path)] = path
        prefixes[i, : len(path)] = [place[path[: d + 1]] for d in range(len(path))]
    return Candidates(ranks, np.array([len(path) for path in paths], np.int32), prefixes)


@functools.cache
def num_paths(k: int, num_nodes: int, max_width: int = MAX_WIDTH) -> int:
    """How many paths `candidates` has, without a list of them.

    A path whose last token has the rank r - 1 leaves n // r - 1 of a budget of n paths to those
    that are longer, each as wide as the path.
    """
    if k == 0 or num_nodes < 1:
        return 0
    ranks = range(1, min(max_width, num_nodes) + 1)
    return sum(1 + num_paths(k - 1, num_nodes // r - 1, max_width) for r in ranks)


def num_tree_nodes(k: int, num_nodes: int, vocab: int) -> int:
    """Nodes of a tree with a budget of `num_nodes`: fewer where there are not as many paths."""
    return min(num_nodes, num_paths(k, num_nodes, min(MAX_WIDTH, vocab)))


def tree_width(num_nodes: int, vocab: int) -> int:
    """Tokens of a position that a tree may need, of a draft vocabulary of `vocab`."""
    return min(num_nodes, MAX_WIDTH, vocab)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """Drafts after the last committed token, which is the root. R = N + 1 with the root.

    Attributes:
      tokens: of the nodes; a node comes after its parent.
      parents: of the nodes: 0 is the root, i + 1 is node i.
      depth: of the root, 0, and of the nodes, 1 to K.
      ancestors: whether the second is on the way from the root to the first, both included.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depth: Int[Array, "B R"]
    ancestors: Bool[Array, "B R R"]


def tree_divisor(temperature: Float[Array, " B"] | None) -> Float[Array, "#B 1 1"]:
    """What a draft's logits are divided by, before a tree is made of their probabilities.

    Args:
      temperature: that the target's tokens are sampled at, 0 for argmaxes; None: 0 for all rows.
    """
    if temperature is None:
        return jnp.full((1, 1, 1), GREEDY_DIVISOR)
    return jnp.where(temperature > 0, 1.0, GREEDY_DIVISOR)[:, None, None]


def likeliest_tree(
    token_ids: Int[Array, "B K W"], logprobs: Float[Array, "B K W"], num_nodes: int
) -> Tree:
    """The tree of the `num_nodes` likeliest paths.

    Args:
      token_ids: of each position, the likeliest first.
      logprobs: of these tokens.
    """
    _, k, width = token_ids.shape
    table = candidates(k, num_nodes, width)
    num_nodes = min(num_nodes, len(table.depth))
    is_token = jnp.arange(k)[None] < table.depth[:, None]
    # [B C K]: the log-probability of every token of every path
    of_tokens = logprobs[:, jnp.arange(k)[None], table.ranks]
    scores = jnp.where(is_token[None], of_tokens, 0).sum(axis=-1)
    # of equal scores the first is taken, so that no path comes without its beginning
    _, chosen = jax.lax.top_k(scores, num_nodes)
    chosen = jnp.sort(chosen, axis=1)
    depth = jnp.asarray(table.depth)[chosen]
    last_rank = jnp.take_along_axis(jnp.asarray(table.ranks)[chosen], depth[..., None] - 1, axis=2)
    rows = jnp.arange(len(chosen))[:, None]
    tokens = token_ids[rows, depth - 1, last_rank[..., 0]]

    prefixes = jnp.asarray(table.prefixes)[chosen]
    # [B N N]: whether the second node is a beginning of the first
    is_prefix = (prefixes[:, :, None, :] == chosen[:, None, :, None]).any(axis=-1)
    is_parent = is_prefix & (depth[:, None, :] == depth[:, :, None] - 1)
    parents = jnp.where(depth == 1, 0, is_parent.argmax(axis=-1) + 1)
    ancestors = jnp.pad(is_prefix, [(0, 0), (1, 0), (1, 0)]).at[:, :, 0].set(True)
    return Tree(
        tokens=tokens.astype(jnp.int32),
        parents=parents.astype(jnp.int32),
        depth=jnp.pad(depth, [(0, 0), (1, 0)]).astype(jnp.int32),
        ancestors=ancestors,
    )


def conditioned_tree(
    root: Int[Array, " B"],
    state: Float[Array, "B 1 S"],
    continuations: Callable[[int, Int[Array, "B M"], Float[Array, "B M S"]], tuple],
    k: int,
    num_nodes: int,
) -> Tree:
    """The tree of the `num_nodes` likeliest paths, where a token's probability is by its path.

    A path among the N likeliest is among the N - d + 1 likeliest of its depth d, because its
    beginnings are at least as likely, and so are theirs. At each depth that many are kept, and from
    all of them the N likeliest are taken. arXiv:2608.02123 has trees that are conditioned on
    parents.

    Args:
      root: the last committed token.
      state: of a path, before the root.
      continuations: (depth of the children, 1 to K; tokens of M parents; states before them) -> for
        each parent the likeliest tokens [B M W], their log-probabilities, and the state after it.
      k: the longest path.
    """
    rows = jnp.arange(len(root))[:, None]
    tokens, scores, states = root[:, None], jnp.zeros((len(root), 1)), state
    found: list[tuple[Array, Array, Array]] = []  # tokens, scores and parents of each depth
    first = 0  # the place of the parents' depth among all that are found, from 1 on; 0 is the root
    for depth in range(1, k + 1):
        ids, logprobs, states = continuations(depth, tokens, states)
        width = ids.shape[-1]
        all_scores = (scores[..., None] + logprobs).reshape(len(root), -1)
        size = min(max(num_nodes - depth + 1, 1), all_scores.shape[1])
        scores, chosen = jax.lax.top_k(all_scores, size)
        tokens, states = ids.reshape(len(root), -1)[rows, chosen], states[rows, chosen // width]
        found.append((tokens, scores, first + chosen // width))
        first = 1 + sum(x[0].shape[1] for x in found[:-1])
    all_tokens, all_scores, all_parents = (
        jnp.concatenate(x, axis=1) for x in zip(*found, strict=True)
    )
    # of equal scores the first is taken, so that no path comes without its beginning
    _, chosen = jax.lax.top_k(all_scores, min(num_nodes, all_scores.shape[1]))
    chosen = jnp.sort(chosen, axis=1)
    parent = all_parents[rows, chosen]
    is_parent = parent[:, :, None] == chosen[:, None, :] + 1
    parents = jnp.where(parent == 0, 0, is_parent.argmax(axis=-1) + 1).astype(jnp.int32)
    depth_of = np.concatenate([np.full(x[0].shape[1], d + 1) for d, x in enumerate(found)])
    # the root is its own parent
    of_all = jnp.pad(parents, [(0, 0), (1, 0)])
    ancestors = jnp.broadcast_to(
        jnp.eye(of_all.shape[1], dtype=bool), (len(root), *[of_all.shape[1]] * 2)
    )
    for _ in range(k):
        ancestors |= jnp.take_along_axis(ancestors, of_all[..., None], axis=1)
    return Tree(
        tokens=all_tokens[rows, chosen].astype(jnp.int32),
        parents=parents,
        depth=jnp.pad(jnp.asarray(depth_of)[chosen], [(0, 0), (1, 0)]).astype(jnp.int32),
        ancestors=ancestors,
    )


def walk(
    tree: Tree, k: int, next_token: Callable[[int, Int[Array, " B"], Int[Array, "B K"]], Array]
) -> tuple[Int[Array, "B R"], Int[Array, "B R"], Int[Array, " B"]]:
    """Follows the target's tokens from the root, as long as the tree has them.

    Children are tried against the token that the target writes there, argmax or sample. A sample
    is distributed as the target's whether the tree has it or not, so that nothing needs to be
    corrected: for drafts that are chosen and not sampled, this is multi-round rejection sampling
    (arXiv:2305.09781).

    Args:
      k: depth of the tree.
      next_token: from a depth, the nodes reached there (0 is the root) and the tokens on the way to
        them, to the target's next tokens.

    Returns:
      The nodes of the path, R = K + 1 with the root, and the target's token after each of them, of
      which the first `accepted + 1` count; and `accepted`, 0 to K.
    """
    batch = len(tree.tokens)
    node = accepted = jnp.zeros(batch, jnp.int32)
    is_inside = jnp.ones(batch, bool)
    path, tokens = [node], []
    for depth in range(k + 1):
        drafts = jnp.stack([*tokens, *[node] * (k - len(tokens))], axis=1)[:, :k]
        token = next_token(depth, node, drafts).astype(jnp.int32)
        tokens.append(token)
        if depth == k:
            break
        is_child = (tree.parents == node[:, None]) & (tree.tokens == token[:, None])
        is_inside &= is_child.any(axis=1)
        node = jnp.where(is_inside, is_child.argmax(axis=1).astype(jnp.int32) + 1, node)
        accepted = accepted + is_inside
        path.append(node)
    return jnp.stack(path, axis=1), jnp.stack(tokens, axis=1), accepted
