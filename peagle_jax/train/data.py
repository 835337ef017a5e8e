"""Packed training rows, in an order that only the seed and the step decide.

A resumed run therefore reads what it would have read without the interruption.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from peagle_jax.types import Batch, InputError

# A document: its token ids [t], and which of them a loss may read [t].
EncodedDocument = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """All rows of a corpus. Documents are numbered within the corpus; -1 is padding."""

    tokens: Int[np.ndarray, "rows T"]
    segment_ids: Int[np.ndarray, "rows T"]
    loss_mask: Bool[np.ndarray, "rows T"]

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """The rows of one step."""
        return self.take(self.indices_at(size, seed, step))

    def take(self, indices: Sequence[int] | slice) -> Batch:
        """The rows of these numbers, in that order."""
        return Batch(self.tokens[indices], self.segment_ids[indices], self.loss_mask[indices])

    def digest(self) -> str:
        """SHA-256 of all rows, 16 digits."""
        digest = hashlib.sha256()
        for part in (self.tokens, self.segment_ids, self.loss_mask):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def indices_at(self, size: int, seed: int, step: int) -> list[int]:
        """The numbers of the rows of one step.

        Every epoch is a new permutation of all rows. Batches are cut from one permutation after the
        other, without regard to where an epoch ends.
        """
        indices = []
        for i in range(step * size, (step + 1) * size):
            epoch, place = divmod(i, len(self))
            indices.append(int(_permutation(len(self), seed, epoch)[place]))
        return indices


# (rows, seed) -> (epoch, its permutation): the last one asked for, since a batch asks row by row
_PERMUTATIONS: dict[tuple[int, int], tuple[int, np.ndarray]] = {}


def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    cached = _PERMUTATIONS.get((n, seed))
    if cached is None or cached[0] != epoch:
        cached = epoch, np.random.default_rng([seed, epoch]).permutation(n)
        _PERMUTATIONS[n, seed] = cached
    return cached[1]


def pack(
    documents: Sequence[EncodedDocument], seq_len: int, where: str | Path | None = "corpus"
) -> PackedRows:
    """Puts documents one after another and cuts them into rows.

    Args:
      documents: (token ids, loss mask) of each.
      seq_len: tokens of a row; the last row is padded.
      where: the corpus, for errors.

    Raises:
      InputError: there are no documents.
    """
    if not documents:
        raise InputError(where, "at least one document is needed", "none", "use a larger corpus")
    tokens = np.concatenate([ids for ids, _ in documents])
    loss_mask = np.concatenate([mask for _, mask in documents])
    lengths = [len(ids) for ids, _ in documents]
    segment_ids = np.repeat(np.arange(len(documents), dtype=np.int32), lengths)
    padding = -len(tokens) % seq_len

    def cut(x: np.ndarray, fill: int | bool) -> np.ndarray:
        return np.pad(x, (0, padding), constant_values=fill).reshape(-1, seq_len)

    return PackedRows(cut(tokens, 0), cut(segment_ids, -1), cut(loss_mask, False))
