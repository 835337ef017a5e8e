"""A reduced draft vocabulary: the tokens that the head can draft, and the two tables for it."""

import numpy as np
from jaxtyping import Bool, Int


def choose(counts: Int[np.ndarray, " V"], size: int) -> Int[np.ndarray, " W"]:
    """The most frequent token ids in ascending order; of equally frequent ones the lower ids.

    Args:
      counts: occurrences of every token of the target.
      size: how many ids to choose, W.

    Raises:
      ValueError: `size` is not in 1..V.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"draft vocabulary must have 1..{len(counts)} tokens, got {size}")
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def tables(
    ids: Int[np.ndarray, " W"], vocab: int
) -> tuple[Int[np.ndarray, " W"], Bool[np.ndarray, " V"]]:
    """The tables `d2t` and `t2d` that checkpoints hold.

    Args:
      ids: target id of every draft id.
      vocab: size of the target's vocabulary, V.

    Returns:
      d2t: int64 OFFSETS, d2t[i] = ids[i] - i.
      t2d: True for the target ids that the head can draft.
    """
    t2d = np.zeros(vocab, bool)
    t2d[ids] = True
    return (ids - np.arange(len(ids))).astype(np.int64), t2d
