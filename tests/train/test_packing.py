"""Rows of documents, in both ways of packing, against loops."""

import hashlib

import numpy as np
import pytest

from peagle_jax.train import data
from peagle_jax.train.data import pack

SEQ_LEN = 16


def corpus(seed, count=150, longest=40):
    """Documents in which every token is another one."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, size=count)
    ends = np.cumsum(lengths)
    tokens = np.arange(1, ends[-1] + 1, dtype=np.int32)
    return [
        (tokens[end - n : end], rng.random(n) < 0.6) for n, end in zip(lengths, ends, strict=True)
    ]


def former_rows(documents, seq_len):
    """(tokens, segment ids, loss mask) as the first version of `pack` made them, in memory."""
    tokens = np.concatenate([ids for ids, _ in documents])
    loss_mask = np.concatenate([mask for _, mask in documents])
    segments = np.repeat(np.arange(len(documents), dtype=np.int32), [len(x) for x, _ in documents])
    padding = (0, -len(tokens) % seq_len)
    return [
        np.pad(x, padding, constant_values=fill).reshape(-1, seq_len)
        for x, fill in ((tokens, 0), (segments, -1), (loss_mask, False))
    ]


def arrays(batch):
    return [batch.tokens, batch.segment_ids, batch.loss_mask]


def same(got, want):
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("seq_len", [4, 16, 999, 10_000])
def test_cut_rows_are_those_of_before(seq_len, monkeypatch):
    monkeypatch.setattr(data, "CHUNK_TOKENS", 50)
    documents = corpus(1)
    rows, want = pack(documents, seq_len), former_rows(documents, seq_len)
    assert len(rows) == len(want[0])
    same(arrays(rows.take(slice(None))), want)
    same(arrays(rows.take(slice(1, None, 2))), [x[1::2] for x in want])
    some = [len(rows) - 1, 0, -1, len(rows) // 2]
    same(arrays(rows.take(some)), [x[some] for x in want])
    same(arrays(rows.batch(3, 7, 5)), [x[rows.indices_at(3, 7, 5)] for x in want])
    digest = hashlib.sha256(b"".join(x.tobytes() for x in want)).hexdigest()[:16]
    assert rows.digest() == digest
    assert rows.num_loss_tokens == want[2].sum()
    assert rows.num_tokens == (want[1] >= 0).sum()
    assert rows.padding == pytest.approx((want[1] < 0).mean())
    counts = rows.token_counts(10_000)
    np.testing.assert_array_equal(counts, np.bincount(want[0][want[2]], minlength=10_000))


def test_every_epoch_has_an_order_of_its_own():
    rows = pack(corpus(1), 16)
    size = len(rows)
    epochs = [rows.indices_at(size, 7, step) for step in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert rows.indices_at(size, 8, 0) != epochs[0]
    # batches that are cut across the ends of epochs
    stream = [i for step in range(9) for i in rows.indices_at(size // 3, 7, step)]
    assert stream == sum(epochs, [])[: len(stream)]


@pytest.mark.parametrize("seed", range(8))
def test_whole_documents(seed, monkeypatch):
    monkeypatch.setattr(data, "WINDOW", 40)
    documents = corpus(seed)
    rows = pack(documents, SEQ_LEN, packing="whole")
    tokens, segment_ids, loss_mask = arrays(rows.take(slice(None)))
    is_token = segment_ids >= 0
    # every token once, with its document and mask; padding is zero
    for row, column in zip(*np.nonzero(is_token), strict=True):
        ids, mask = documents[segment_ids[row, column]]
        i = tokens[row, column] - ids[0]
        assert ids[i] == tokens[row, column] and mask[i] == loss_mask[row, column]
    total = sum(len(ids) for ids, _ in documents)
    assert sorted(tokens[is_token].tolist()) == list(range(1, total + 1))
    assert not tokens[~is_token].any() and not loss_mask[~is_token].any()
    assert rows.padding == pytest.approx(1 - total / tokens.size)
    assert rows.num_tokens == total
    # a document is in one row, unless it is longer: then in full rows and one more
    for number, (ids, _) in enumerate(documents):
        counts = (segment_ids == number).sum(axis=1)
        counts = sorted(counts[counts > 0].tolist(), reverse=True)
        full, rest = divmod(len(ids), SEQ_LEN)
        assert counts == [SEQ_LEN] * full + [rest] * (rest > 0)
    # its tokens stand side by side and in order, and padding is behind all
    for row, segments in zip(tokens, segment_ids, strict=True):
        assert (np.diff((segments < 0).astype(int)) >= 0).all()
        inside = segments[1:] == segments[:-1]
        assert (np.diff(row)[inside & (segments[1:] >= 0)] == 1).all()
    same(arrays(pack(documents, SEQ_LEN, packing="whole").take(slice(None))), [
        tokens, segment_ids, loss_mask
    ])  # fmt: skip


def test_whole_documents_waste_little():
    """Lengths as chats have them: half a percent at most; cut rows, and one row each, beside."""
    rng = np.random.default_rng(5)
    lengths = np.minimum(rng.lognormal(6.0, 0.8, 3000).astype(int) + 10, 2048)
    documents = [(np.ones(n, np.int32), np.ones(n, bool)) for n in lengths]
    whole = pack(documents, 2048, packing="whole")
    assert whole.padding < 0.005
    assert pack(documents, 2048).padding < 1 / len(whole)
    assert 1 - lengths.mean() / 2048 > 0.7


def test_the_fullest_row_with_room_is_taken():
    """By hand: 9, 8, 7, 5, 3 into rows of 12. 3 goes to 9, which it fills, and 5 to 7."""
    lengths = [5, 9, 3, 8, 7]
    documents = [(np.full(n, n, np.int32), np.ones(n, bool)) for n in lengths]
    got = pack(documents, 12, packing="whole").take(slice(None)).tokens.tolist()
    assert got == [[9] * 9 + [3] * 3, [8] * 8 + [0] * 4, [7] * 7 + [5] * 5]
