"""Acceptance by position, of an option's text and of `peagle bench`'s rows."""

import json
from pathlib import Path

import pytest

from peagle_jax.pipelines.acceptance_rates import read_rates
from peagle_jax.types import InputError

TARGETS = Path(__file__).parents[2] / "configs/targets"


def test_rates(tmp_path):
    assert read_rates("--acceptance", "peagle=63,38,2.5") == ("peagle", (0.63, 0.38, 0.025))
    rows = [
        {"method": "peagle", "k": 2, "accepted_per_position": [0.7, 0.3]},
        {"method": "peagle", "k": 3, "accepted_per_position": [0.6, 0.5, 0.1]},
        # no chains of K drafts, although later and of a larger K
        {"method": "peagle", "k": 8, "adaptive_k": True, "accepted_per_position": [0.9] * 8},
        {"method": "peagle", "k": 3, "num_tree_nodes": 9, "accepted_per_position": [0.8] * 3},
        # not greedy, as a demo's last rows; not measured
        {"method": "peagle", "k": 3, "temperature": 1.0, "accepted_per_position": [0.7] * 3},
        {"method": "peagle", "k": 4, "synthetic_acceptance": [1.0], "accepted_per_position": [1.0]},
        {"method": "eagle3", "k": 7, "accepted_per_position": [0.9] * 7},
        {"method": "none", "k": 0, "accepted_per_position": []},
    ]
    assert read_rates("--acceptance", "eagle=50", ("eagle",)) == ("eagle", (0.5,))
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rates("--acceptance", f"peagle={path}") == ("peagle", (0.6, 0.5, 0.1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("medusa=50", "eagle3, peagle"),
        ("peagle", "METHOD=RATES"),
        ("peagle=a,b", "percentages"),
        ("peagle=", "percentages"),
        ("peagle=120", "0 to 100"),
        ("peagle=nan", "0 to 100"),
        ("peagle=60,70", "must not rise"),
        ("peagle=absent.jsonl", "readable"),
        (f"peagle={TARGETS / 'README.md'}l", "percentages"),
    ],
)
def test_rates_that_cannot_be(text, words):
    with pytest.raises(InputError, match=words):
        read_rates("--acceptance", text)


def test_rows_without_rates(tmp_path):
    path = tmp_path / "rows.jsonl"
    for content in ("[]\n", '{"method": "none", "k": 0}\n', "not JSON\n", ""):
        path.write_text(content)
        with pytest.raises(InputError, match="rows of `peagle bench`"):
            read_rates("--acceptance", f"peagle={path}")
