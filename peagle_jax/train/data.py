"""Packed training rows, in an order that only the seed and the step decide.

A resumed run therefore reads what it would have read without the interruption.
"""

import bisect
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from peagle_jax.types import Batch, InputError

# A document: its token ids [t], and which of them a loss may read [t].
EncodedDocument = tuple[np.ndarray, np.ndarray]
# How documents become rows, as `rows_of` says.
PACKINGS = ("cut", "whole")
WINDOW = 1 << 14  # documents among which `whole` looks for those that fill a row
CHUNK_TOKENS = 1 << 17  # that are read at one time where all rows are


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Where the parts of documents lie in the rows, which are numbered through token by token.

    Attributes:
      places: where each begins in the rows, ascending: row * seq_len + position.
      sources: where it begins in the corpus' tokens.
      lengths: its tokens.
      documents: the number of its document.
    """

    places: Int[np.ndarray, " n"]
    sources: Int[np.ndarray, " n"]
    lengths: Int[np.ndarray, " n"]
    documents: Int[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """All rows of a corpus, which are put together when they are asked for.

    Documents are numbered within the corpus; -1 is padding.

    Attributes:
      corpus_tokens: token ids of all documents, one after another, in memory or in a mapped file.
      corpus_loss_mask: which of them a loss may read.
      pieces: which of them lie where in the rows.
      seq_len: tokens of a row.
      num_rows: of the corpus.
    """

    corpus_tokens: Int[np.ndarray, " t"]
    corpus_loss_mask: Bool[np.ndarray, " t"]
    pieces: Pieces
    seq_len: int
    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.pieces.lengths.sum())

    @functools.cached_property
    def num_loss_tokens(self) -> int:
        """Tokens that a loss may read."""
        return sum(int(np.count_nonzero(batch.loss_mask)) for batch in self.chunks())

    @property
    def padding(self) -> float:
        """Share of the rows that is padding, 0 to 1."""
        return 1 - self.num_tokens / (self.num_rows * self.seq_len)

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """The rows of one step."""
        return self.take(self.indices_at(size, seed, step))

    def take(self, indices: Sequence[int] | slice) -> Batch:
        """The rows of these numbers, in that order."""
        if isinstance(indices, slice):
            indices = range(*indices.indices(len(self)))
        if isinstance(indices, range) and indices.step == 1:
            return self._read(indices.start, indices.stop)
        parts = [self._read(i, i + 1) for i in (range(len(self))[i] for i in indices)]
        if not parts:
            return self._read(0, 0)
        arrays = zip(*((x.tokens, x.segment_ids, x.loss_mask) for x in parts), strict=True)
        return Batch(*(np.concatenate(x) for x in arrays))

    def chunks(self) -> Iterator[Batch]:
        """All rows in their own order, some at a time."""
        size = max(1, CHUNK_TOKENS // self.seq_len)
        for first in range(0, len(self), size):
            yield self._read(first, min(first + size, len(self)))

    def _read(self, first: int, end: int) -> Batch:
        """Rows `first` to `end`, which lie side by side."""
        pieces = self.pieces
        begin, stop = first * self.seq_len, max(first, end) * self.seq_len
        p = max(int(np.searchsorted(pieces.places, begin, "right")) - 1, 0)
        some = slice(p, max(p, int(np.searchsorted(pieces.places, stop, "left"))))
        places, lengths = pieces.places[some], pieces.lengths[some]
        cut = np.maximum(begin - places, 0)  # tokens of a piece that lie in rows before
        counts = np.maximum(np.minimum(places + lengths, stop) - places - cut, 0)
        ramp = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        where = np.repeat(places + cut - begin, counts) + ramp
        source = np.repeat(pieces.sources[some] + cut, counts) + ramp
        tokens = np.zeros(stop - begin, np.int32)
        segment_ids = np.full(stop - begin, -1, np.int32)
        loss_mask = np.zeros(stop - begin, bool)
        tokens[where] = self.corpus_tokens[source]
        segment_ids[where] = np.repeat(pieces.documents[some], counts)
        loss_mask[where] = self.corpus_loss_mask[source]
        shape = -1, self.seq_len
        return Batch(tokens.reshape(shape), segment_ids.reshape(shape), loss_mask.reshape(shape))

    def digest(self) -> str:
        """SHA-256 of all tokens, then all segment ids, then all loss masks, 16 digits."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name in ("tokens", "segment_ids", "loss_mask"):
            for batch in self.chunks():
                digest.update(getattr(batch, name).tobytes())
        return digest.hexdigest()[:16]

    def token_counts(self, vocab: int) -> Int[np.ndarray, " V"]:
        """How often each token is one that a loss may read."""
        counts = np.zeros(vocab, np.int64)
        for batch in self.chunks():
            counts += np.bincount(batch.tokens[batch.loss_mask], minlength=vocab)
        return counts

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
    documents: Sequence[EncodedDocument],
    seq_len: int,
    where: str | Path | None = "corpus",
    packing: str = "cut",
) -> PackedRows:
    """Rows of documents that are in memory.

    Args:
      documents: (token ids, loss mask) of each.
      seq_len: tokens of a row.
      where: the corpus, for errors.
      packing: as for `rows_of`.

    Raises:
      InputError: there are no documents.
    """
    check_any(len(documents), where)
    tokens = np.concatenate([ids for ids, _ in documents])
    loss_mask = np.concatenate([mask for _, mask in documents])
    lengths = np.array([len(ids) for ids, _ in documents], np.int64)
    return rows_of(tokens, loss_mask, np.cumsum(lengths) - lengths, lengths, seq_len, packing)


def check_any(count: int, where: str | Path | None) -> None:
    """Raises InputError where there is no document to train on."""
    if not count:
        raise InputError(where, "at least one document is needed", "none", "use a larger corpus")


def rows_of(
    tokens: Int[np.ndarray, " t"],
    loss_mask: Bool[np.ndarray, " t"],
    sources: Int[np.ndarray, " n"],
    lengths: Int[np.ndarray, " n"],
    seq_len: int,
    packing: str = "cut",
) -> PackedRows:
    """Puts documents into rows.

    Args:
      tokens: of all documents.
      loss_mask: which of them a loss may read.
      sources: where each document begins in `tokens`, in the order in which they are packed.
      lengths: their tokens.
      seq_len: tokens of a row.
      packing: one of PACKINGS. "cut": one document after another, cut where a row ends; only the
        last row is padded. "whole": only documents longer than a row are cut, and rows are padded
        where no document fits.
    """
    numbers = np.arange(len(lengths), dtype=np.int32)
    if packing == "cut":
        pieces = Pieces(np.cumsum(lengths) - lengths, sources, lengths, numbers)
        num_rows = -(-int(lengths.sum()) // seq_len)
    else:
        parts = -(-lengths // seq_len)
        of_document = np.repeat(numbers, parts)
        begin = seq_len * (np.arange(len(of_document)) - np.repeat(np.cumsum(parts) - parts, parts))
        part_lengths = np.minimum(lengths[of_document] - begin, seq_len)
        places, num_rows = _whole_places(part_lengths.tolist(), seq_len)
        order = np.argsort(places)
        part_sources = (sources[of_document] + begin)[order]
        pieces = Pieces(places[order], part_sources, part_lengths[order], of_document[order])
    return PackedRows(tokens, loss_mask, pieces, seq_len, num_rows)


def _whole_places(lengths: list[int], seq_len: int) -> tuple[np.ndarray, int]:
    """Where each part of at most `seq_len` tokens begins, and how many rows there are.

    Best fit decreasing: of the parts of a window the longest comes first, and each into the fullest
    row that has room for it. Rows that are not full stay open for the next window.
    """
    places = np.zeros(len(lengths), np.int64)
    # the rooms that open rows have, ascending, and the rows of each room
    rooms: list[int] = []
    rows: dict[int, list[int]] = {}
    num_rows = 0
    for i in _longest_first(lengths):
        length = lengths[i]
        k = bisect.bisect_left(rooms, length)
        if k == len(rooms):
            row, room = num_rows, seq_len
            num_rows += 1
        else:
            room = rooms[k]
            row = rows[room].pop()
            if not rows[room]:
                rooms.pop(k)
        places[i] = (row + 1) * seq_len - room
        if left := room - length:
            if not rows.setdefault(left, []):
                bisect.insort(rooms, left)
            rows[left].append(row)
    return places, num_rows


def _longest_first(lengths: list[int]) -> Iterable[int]:
    """Numbers of the parts, window by window."""
    for first in range(0, len(lengths), WINDOW):
        window = range(first, min(first + WINDOW, len(lengths)))
        yield from sorted(window, key=lengths.__getitem__, reverse=True)
