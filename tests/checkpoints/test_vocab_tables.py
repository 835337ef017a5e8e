"""d2t and t2d of a reduced draft vocabulary: either is enough, and both are checked."""

import numpy as np
import pytest
import tiny
from checkpoints.folder_edits import edit

from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.types import InputError

IDS = np.array([0, 3, 4, 9, 17, 30, 40])
KEPT = np.isin(np.arange(41), IDS)


@pytest.fixture
def reduced(tmp_path):
    save_drafter(tiny.head(draft_vocab=7), tmp_path / "r")

    def make(**tables):
        def drop(t):
            return {n: x for n, x in t.items() if n not in ("d2t", "t2d")} | tables

        return edit(tmp_path / "r", tmp_path / f"r{len(list(tmp_path.iterdir()))}", drop)

    return make


def test_either_table_is_enough(reduced):
    for tables in (
        {"d2t": IDS - np.arange(7), "t2d": KEPT},
        {"d2t": IDS - np.arange(7)},
        {"t2d": KEPT},
        {"t2d": KEPT.astype(np.uint8)},
        {"d2t": (IDS - np.arange(7)).astype(np.int32)},
    ):
        head = load_drafter(reduced(**tables))
        assert head.bind(head.params).target_ids().tolist() == IDS.tolist()


@pytest.mark.parametrize(
    "tables, words",
    [
        ({"d2t": IDS - np.arange(7) + 1}, "ids in 0..40; got ids 1..41"),
        ({"d2t": -np.arange(1, 8)}, "got ids -1..-1"),
        ({"d2t": np.zeros(6, int)}, "must hold 7 whole numbers"),
        (
            {"d2t": np.zeros(7, np.float32)},
            "must hold 7 whole numbers; got float32.*: d2t is damaged",
        ),
        ({"d2t": np.full(7, 2**62)}, "different ids in 0..40"),
        ({"d2t": np.array([0, -1, 0, 0, 0, 0, 0])}, "7 different ids"),
        ({"d2t": IDS - np.arange(7), "t2d": ~KEPT}, "t2d must name the 7 ids"),
        (
            {"d2t": IDS - np.arange(7), "t2d": np.isin(np.arange(41), [0, 3, 4, 9, 17, 30, 39])},
            "a difference at 39",
        ),
        ({"t2d": np.ones(40, bool)}, "must hold 41 truth values"),
        (
            {"t2d": KEPT.astype(np.float32)},
            "must hold 41 truth values; got float32.*: t2d is damaged",
        ),
        ({"t2d": np.isin(np.arange(41), [1, 2])}, "t2d must name the 7 ids"),
        ({}, "missing: d2t"),
    ],
)
def test_bad_tables(tables, words, reduced):
    with pytest.raises(InputError, match=words):
        load_drafter(reduced(**tables))
