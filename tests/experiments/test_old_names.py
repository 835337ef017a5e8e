"""Rows of before are read in today's words, and the rows of results/experiments among them."""

import json

import pytest

from experiments import folders
from experiments.old_names import with_present_names
from experiments.registry import EXPERIMENTS
from experiments.rows import read_rows, rounded

OLD = {
    "experiment": "taps",
    "variant": "a norm per tap",
    "seed": 0,
    "head": "6b37",
    "parameters": 738_560,
    "changes": [
        "cod.depths: 5 -> 2",
        "data.batch: 2 -> 4",
        "grow: ({'until': 480, 'depths': 1}, {'until': 960, 'depths': 2}) -> ()",
        "grow: ({'until': 480, 'depths': 1},) -> ({'until': 96, 'depths': 1},)",
        "head.taps: (1, 4, 5) -> (5,)",
        "decoding.new_tokens: 64 -> 96",
        "start_from: the EAGLE-3 head itself",
        "markov.gated: None -> True",
        "loss: forward_kl -> tv",
    ],
    "config": {
        "features": "",
        "data": {"length": 128, "batch": 2},
        "head": {"layers": 2, "taps": [1, 4, 5]},
        "grow": [{"until": 480, "depths": 1}],
        "cod": {"depths": 5, "ratio": 0.8, "floor": 0.1, "anchors": None},
        "blur": {"feature_noise": 0.1, "feature_dropout": 0.0},
        "measure": {"every": None, "count": 1, "new_tokens": 8},
        "optimizer": {"clip": 1.0},
        "start": "target",
        "markov": {"rank": 32, "gated": False},
    },
    "stages": {"text": "99", "features": "59"},
    "measured": [{"k": 1, "new_tokens": 64, "prompts": [{"drafts": 9, "accepted": [3]}]}],
}
NEW = {
    "experiment": "aux_layers",
    "variant": "a norm per aux layer",
    "seed": 0,
    "head_key": "6b37",
    "num_parameters": 738_560,
    "changes": [
        "cod.num_depths: 5 -> 2",
        "data.batch_size: 2 -> 4",
        "depth_schedule: 1 until step 480, 2 until step 960 -> none",
        "depth_schedule: 1 until step 480 -> 1 until step 96",
        "head.aux_hidden_state_layers: (1, 4, 5) -> (5,)",
        "decoding.max_new_tokens: 64 -> 96",
        "init_from: the EAGLE-3 head itself",
        "markov.kind: None -> gated",
        "loss: forward_kl -> tv",
    ],
    "config": {
        "hidden_states_dir": "",
        "data": {"seq_len": 128, "batch_size": 2},
        "head": {"layers": 2, "aux_hidden_state_layers": [1, 4, 5]},
        "depth_schedule": [{"until": 480, "num_depths": 1}],
        "cod": {
            "num_depths": 5,
            "down_sample_ratio": 0.8,
            "down_sample_ratio_min": 0.1,
            "max_anchors": None,
        },
        "feature_noise": {"noise": 0.1, "dropout": 0.0},
        "eval": {"every": None, "num_prompts": 1, "max_new_tokens": 8},
        "optimizer": {"max_grad_norm": 1.0},
        "init": "target",
        "markov": {"rank": 32, "kind": "vanilla"},
    },
    "stages": {"text": "99", "hidden_states": "59"},
    "measurements": [
        {
            "k": 1,
            "max_new_tokens": 64,
            "prompts": [{"num_drafts": 9, "num_accepted_per_pos": [3]}],
        }
    ],
}


def test_every_former_name_becomes_the_present_one():
    assert with_present_names(OLD) == NEW
    assert json.loads(json.dumps(OLD)) == OLD  # the row itself stays


def test_present_names_stay():
    assert with_present_names(NEW) == NEW


@pytest.mark.parametrize(
    "damage",
    [
        {"experiment": []},
        {"variant": None},
        {"changes": [3, None, "grow: (1,) -> oops"]},
        {"config": {"grow": 3, "cod": []}},
        {"config": {"grow": [1]}},
        {"stages": 7},
        {"measured": 7},
        {"measured": [3, {"prompts": 3}, {"prompts": [3]}]},
    ],
)
def test_damaged_rows_raise_nothing(damage):
    with_present_names(OLD | damage)


def test_the_tracked_rows_are_read():
    """63 rows of 5 experiments, written before the names were those of docs/glossary.md."""
    rows, warnings = read_rows(folders.ROOT / folders.RESULTS)
    assert warnings == [] and len(rows) >= 63
    for row in rows:
        assert row["variant"] in EXPERIMENTS[row["experiment"]].variants
        assert "aux_hidden_state_layers" in row["config"]["head"]
        assert not any("depths'" in change for change in row["changes"])


def test_numbers_are_rounded_to_significant_digits():
    row = {"a": 3160.519993835016, "b": [1 / 3, 5], "c": {"d": (1e-9 / 3, None, "x", True)}}
    assert rounded(row, 4) == {
        "a": 3161.0,
        "b": [0.3333, 5],
        "c": {"d": [3.333e-10, None, "x", True]},
    }
    assert str(rounded(float("nan"), 4)) == "nan"
