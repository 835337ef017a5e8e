"""COD sampling: every rule of peagle.md section 4, on random sequences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.train.cod import LEAST_WIDTH, CodConfig, cod_sample, narrowed, sample_row


@st.composite
def sequences(draw):
    n = draw(st.integers(1, 40))
    loss_mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=3)))
    segment_ids = np.searchsorted(cuts, np.arange(n), side="right")
    segment_ids[
        np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
        & (draw(st.integers(0, 3)) == 0)
    ] = -1
    cod = CodConfig(
        num_depths=draw(st.integers(1, 9)),
        down_sample_ratio=draw(st.floats(0.1, 1.0)),
        down_sample_ratio_min=draw(st.floats(0.0, 0.5)),
        max_anchors=draw(st.none() | st.integers(1, 12)),
    )
    return loss_mask & (segment_ids >= 0), segment_ids, cod, draw(st.integers(0, 99))


@settings(max_examples=300, deadline=None)
@given(sequences())
def test_rules(case):
    loss_mask, segment_ids, cod, seed = case
    anchor, depth = sample_row(loss_mask, segment_ids, cod, np.random.default_rng(seed))
    n, kept = len(loss_mask), set(zip(anchor.tolist(), depth.tolist(), strict=True))
    assert len(kept) == len(anchor) <= cod.capacity(n)
    assert list(zip(anchor, depth, strict=True)) == sorted(kept)  # chains are contiguous, in order
    alive = set(range(n))
    for d in range(1, cod.num_depths):
        pool = {
            p
            for p in range(1, n)
            if p - 1 in alive and loss_mask[p] and segment_ids[p] == segment_ids[p - 1] >= 0
        }
        alive = {a + d for a, e in kept if e == d}
        assert alive <= pool  # supervised, same document, its parent kept; never position 0
        begin = min(loss_mask.sum(), cod.max_anchors or n)
        wanted = int(max(begin - d, 0) * max(cod.down_sample_ratio**d, cod.down_sample_ratio_min))
        assert len(alive) == min(len(pool), wanted)
    assert all(0 <= a and a + d < n and 1 <= d < cod.num_depths for a, d in kept)


def test_a_chain_may_start_at_an_unsupervised_anchor():
    """Depth 0 keeps every position, so (0, 1) exists although position 0 teaches nothing."""
    cod, loss_mask, segment_ids = (
        CodConfig(num_depths=2, down_sample_ratio=1.0, down_sample_ratio_min=0.0, max_anchors=None),
        np.array([False, True, True]),
        np.zeros(3, int),
    )
    anchors = {
        sample_row(loss_mask, segment_ids, cod, np.random.default_rng(seed))[0].item()
        for seed in range(20)
    }
    assert anchors == {0, 1}


def test_position_zero_is_nobodys_child():
    """speculators 0.9 gives anchor -1 here."""
    anchor, _ = sample_row(
        np.ones(6, bool),
        np.zeros(6, int),
        CodConfig(num_depths=4, down_sample_ratio=1.0, down_sample_ratio_min=0.0, max_anchors=None),
        np.random.default_rng(0),
    )
    assert anchor.min() == 0


def test_padding_is_of_no_document():
    """Also where a mask forgets it: the padding behind two documents is no chain."""
    cod = CodConfig(num_depths=3, down_sample_ratio=1.0)
    segment_ids = np.array([0, 0, 1, 1, -1, -1, -1])
    anchor, depth = sample_row(np.ones(7, bool), segment_ids, cod, np.random.default_rng(1))
    assert list(zip(anchor.tolist(), depth.tolist(), strict=True)) == [(0, 1), (2, 1)]


def test_draws_are_uniform():
    """Each of 19 candidates is kept at depth 1 about equally often."""
    cod, counts = (
        CodConfig(num_depths=2, down_sample_ratio=0.5, down_sample_ratio_min=0.0, max_anchors=None),
        np.zeros(20),
    )
    for seed in range(2000):
        anchor, _ = sample_row(
            np.ones(20, bool), np.zeros(20, int), cod, np.random.default_rng(seed)
        )
        counts[anchor] += 1
    assert counts[19] == 0 and abs(counts[:19] / 2000 - 9 / 19).max() < 0.05


def test_batches_are_static_seeded_and_rows_independent():
    cod, loss_mask, segment_ids = (
        CodConfig(num_depths=5, down_sample_ratio=0.8, down_sample_ratio_min=0.2, max_anchors=None),
        np.ones((3, 30), bool),
        np.zeros((3, 30), int),
    )
    whole = cod_sample(loss_mask, segment_ids, cod, [4, 7])
    assert whole.anchor.shape == (3, cod.capacity(30)) and whole.real.sum() > 0
    again = cod_sample(loss_mask[:1], segment_ids[:1], cod, [4, 7])
    np.testing.assert_array_equal(again.anchor[0], whole.anchor[0])
    assert not np.array_equal(whole.anchor[0], whole.anchor[1])
    assert not np.array_equal(cod_sample(loss_mask, segment_ids, cod, [4, 8]).anchor, whole.anchor)
    loss_mask[0, 5:] = False  # fewer elements, the same shape
    assert cod_sample(loss_mask, segment_ids, cod, [4, 7]).anchor.shape == whole.anchor.shape


def test_places_that_no_row_uses_are_cut_off_in_quarters():
    cod = CodConfig(num_depths=6, down_sample_ratio=0.9, down_sample_ratio_min=0.1)
    segment_ids = np.zeros((2, 500), int)
    widths = []
    for share in (0.0, 0.1, 0.3, 0.6, 0.99, 1.0):
        loss_mask = np.zeros((2, 500), bool)
        loss_mask[0, : int(500 * share)] = True
        loss_mask[1, :30] = True  # a row needs fewer places than the other
        whole = cod_sample(loss_mask, segment_ids, cod, 3)
        cut = narrowed(whole)
        width = cut.real.shape[1]
        widths.append(width)
        for name in ("anchor", "depth", "real"):
            np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name)[:, :width])
        assert cut.real.sum() == whole.real.sum() > 0
    capacity = cod.capacity(500)
    one, two, three = (-(-capacity * part // 4) for part in (1, 2, 3))
    assert one > LEAST_WIDTH and widths == [one, one, two, three, capacity, capacity]


def test_few_places_are_left_as_they_are():
    """Every width is a program; LEAST_WIDTH bounds them where rows are short."""
    cod = CodConfig(num_depths=5, down_sample_ratio=0.8)
    loss_mask = np.zeros((1, 150), bool)
    loss_mask[0, :20] = True
    for positions, width in ((100, cod.capacity(100)), (150, LEAST_WIDTH)):
        whole = cod_sample(loss_mask[:, :positions], np.zeros((1, positions), int), cod, 3)
        assert narrowed(whole).real.shape[1] == width
    assert cod.capacity(100) < LEAST_WIDTH < cod.capacity(150)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_depths": 0},
        {"down_sample_ratio": 0.0},
        {"down_sample_ratio": 1.5},
        {"down_sample_ratio_min": -0.1},
        {"down_sample_ratio_min": 1.1},
        {"max_anchors": 0},
    ],
)
def test_bad_settings(bad):
    (key,) = bad
    with pytest.raises(ValueError, match=f"^{key}: must "):
        CodConfig(**bad)
