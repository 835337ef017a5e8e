"""A reduced draft vocabulary: the tokens that the head can draft, and the two tables that name them."""

import numpy as np


def choose(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent token ids, ascending; ties go to the lower id.

    Args:
      counts: occurrences of every target token [V].

    Raises:
      ValueError: `size` is not in 1..V.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"draft vocabulary must have 1..{len(counts)} tokens, got {size}")
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def tables(ids: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(`d2t`, `t2d`) of checkpoints: d2t[i] = ids[i] - i, an int64 OFFSET; t2d is a mask over the target vocabulary."""
    kept = np.zeros(vocab, bool)
    kept[ids] = True
    return (ids - np.arange(len(ids))).astype(np.int64), kept
