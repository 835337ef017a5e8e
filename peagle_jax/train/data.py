"""Packed training rows, in an order that (seed, step) alone decides: a resumed run reads what it would have read."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from peagle_jax.types import Batch, InputError


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """All rows of a corpus, [rows, T]; documents are numbered within the corpus, -1 is padding."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """The rows of one step."""
        return self.take(self.picks(size, seed, step))

    def take(self, picks: Sequence[int]) -> Batch:
        return Batch(self.tokens[picks], self.segment_ids[picks], self.loss_mask[picks])

    def digest(self) -> str:
        """SHA-256, 16 digits: tells these rows from all others."""
        digest = hashlib.sha256()
        for part in (self.tokens, self.segment_ids, self.loss_mask):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def picks(self, size: int, seed: int, step: int) -> list[int]:
        """Numbers of the rows of one step: every epoch a new permutation, cut into batches without regard to epoch ends."""
        picks = []
        for i in range(step * size, (step + 1) * size):
            epoch, place = divmod(i, len(self))
            picks.append(int(_permutation(len(self), seed, epoch)[place]))
        return picks


_CACHE: dict[tuple[int, int], tuple[int, np.ndarray]] = {}


def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Of the epoch at hand; the last one of each (n, seed) is kept, since a batch asks for it row by row."""
    if _CACHE.get((n, seed), (None,))[0] != epoch:
        _CACHE[n, seed] = (epoch, np.random.default_rng([seed, epoch]).permutation(n))
    return _CACHE[n, seed][1]


def pack(
    documents: Sequence[tuple[np.ndarray, np.ndarray]], length: int, where="corpus"
) -> PackedRows:
    """Documents one after another, cut into rows of `length` tokens; the last row is padded.

    Args:
      documents: (token ids, supervised) of each.
    """
    if not documents:
        raise InputError(where, "at least one document is needed", "none", "use a larger corpus")
    tokens = np.concatenate([t for t, _ in documents])
    loss_mask = np.concatenate([s for _, s in documents])
    number = np.repeat(np.arange(len(documents), dtype=np.int32), [len(t) for t, _ in documents])
    short = -len(tokens) % length

    def cut(x, fill):
        return np.pad(x, (0, short), constant_values=fill).reshape(-1, length)

    return PackedRows(cut(tokens, 0), cut(number, -1), cut(loss_mask, False))
