"""Ours beside published numbers: every line says what its rows say."""

from pathlib import Path

import pytest

from peagle_jax.report.published_picture import draw, panels, speed
from peagle_jax.report.published_tables import read_tables

TABLES = Path(__file__).parents[2] / "results/published"


def row(method, k, batch_size, tokens_per_second, speedup):
    return {
        "method": method,
        "k": k,
        "batch_size": batch_size,
        "tokens_per_second": tokens_per_second,
        "speedup": speedup,
        "acceptance_length": 1 + k / 4 if k else None,
        "accepted_per_position": [0.5] * k,
    }


OURS = {
    "made": [
        row("none", 0, 1, 100.0, 1.0),
        row("peagle", 7, 1, 180.0, 1.8),
        row("peagle", 11, 1, 150.0, 1.5),
        row("eagle3", 11, 1, 120.0, 1.2),
        row("peagle", 11, 8, 400.0, 0.8),
        row("eagle3", 11, 8, 500.0, 1.0),
    ]
}


@pytest.fixture(scope="module")
def lines():
    """(panel, label, method) -> points."""
    drawn = panels(read_tables(TABLES), OURS)
    return {
        (panel.title.split(",")[0], line.label, line.method): list(line.points)
        for panel in drawn
        for line in panel.lines
    }


def test_published_lines(lines):
    positions = lines["Accepted by position", "gpt-oss-120b, HumanEval", "peagle"]
    assert positions[0] == (1, 63) and len(positions) == 8
    lengths = lines["Acceptance length", "gpt-oss-20b", "peagle"]
    assert lengths == [(1, 1.9), (2, 2.68), (3, 3.17), (4, 3.62), (7, 4.08)]
    key = "Speed over plain decoding", "llama-3.1-8b-instruct, vLLM issue 20780", "eagle3"
    assert dict(lines[key])[4] == pytest.approx(7.07 / 4.05)
    bench = "P-EAGLE over EAGLE-3", "qwen3-coder-30b-a3b-instruct, SPEED-Bench", "peagle"
    assert lines[bench] == [(1, 1.41), (32, 1.07), (128, 1.02)]


def test_our_lines(lines):
    assert lines["P-EAGLE over EAGLE-3", "ours, made", "peagle"] == [(1, 1.25), (8, 0.8)]
    assert lines["Speed over plain decoding", "ours, made", "peagle"] == [(7, 1.8), (11, 1.5)]
    assert lines["Acceptance length", "ours, made", "eagle3"] == [(11, 3.75)]
    assert lines["Accepted by position", "ours, made", "peagle"][-1] == (7, 50.0)


def test_nothing_is_drawn_of_rows_that_do_not_tell(lines):
    assert speed({"method": "peagle", "speedup": 2.0}) == 0
    # the K of AWS's 1,167 tokens/s is not known
    assert not any("aws" in str(key).lower() for key in lines)
    assert ("Speed over plain decoding", "qwen3-coder-30b-a3b-instruct", "peagle") not in lines


def test_picture(tmp_path):
    path = tmp_path / "published.png"
    draw(path, panels(read_tables(TABLES), OURS))
    assert path.read_bytes().startswith(b"\x89PNG")
