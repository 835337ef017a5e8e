"""Ours beside published numbers: every line says what its rows say."""

from pathlib import Path

import pytest

from peagle_jax.report.published_picture import draw, panels, speed
from peagle_jax.report.published_tables import read_tables

PLAIN = "Speed over plain decoding"
SAME_K = "P-EAGLE over EAGLE-3, both with K = 11"
BEST_K = "P-EAGLE over EAGLE-3, each with its best K"
BY_K = "P-EAGLE over EAGLE-3 with its best K, by K; published: HumanEval"
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
        (panel.title, line.label, line.method): list(line.points)
        for panel in drawn
        for line in panel.lines
    }


def test_published_lines(lines):
    positions = lines["Accepted by position", "gpt-oss-120b, HumanEval", "peagle"]
    assert positions[0] == (1, 63) and len(positions) == 8
    lengths = lines["Acceptance length", "gpt-oss-20b", "peagle"]
    assert lengths == [(1, 1.9), (2, 2.68), (3, 3.17), (4, 3.62), (7, 4.08)]
    key = f"{PLAIN}, one sequence", "llama-3.1-8b-instruct, vLLM issue 20780", "eagle3"
    assert dict(lines[key])[4] == pytest.approx(7.07 / 4.05)
    bench = SAME_K, "qwen3-coder-30b-a3b-instruct, SPEED-Bench", "peagle"
    assert lines[bench] == [(1, 1.41), (32, 1.07), (128, 1.02)]
    best = lines[BEST_K, "gpt-oss-20b, SPEED-Bench", "peagle"]
    assert best == [(1, 1.69), (2, 1.61), (4, 1.54), (8, 1.45), (16, 1.4), (32, 1.22), (64, 1.25)]
    assert lines[BEST_K, "gpt-oss-120b, MT-Bench", "peagle"] == [(1, 1.12), (8, 1.07)]
    by_k = lines[BY_K, "qwen3-coder-30b-a3b-instruct, 4 sequences", "peagle"]
    assert by_k == [(3, 0.92), (5, 1.06), (7, 1.11)]


def test_our_lines(lines):
    assert lines[SAME_K, "ours, made", "peagle"] == [(1, 1.25), (8, 0.8)]
    assert lines[BEST_K, "ours, made", "peagle"] == [(1, 1.5), (8, 0.8)]
    assert lines[BY_K, "ours, made, 1 sequence", "peagle"] == [(7, 1.5), (11, 1.25)]
    assert lines[BY_K, "ours, made, 8 sequences", "peagle"] == [(11, 0.8)]
    assert lines[f"{PLAIN}, one sequence", "ours, made", "peagle"] == [(7, 1.8), (11, 1.5)]
    assert lines["Acceptance length", "ours, made", "eagle3"] == [(11, 3.75)]
    assert lines["Accepted by position", "ours, made", "peagle"][-1] == (7, 50.0)


def test_nothing_is_drawn_of_rows_that_do_not_tell(lines):
    assert speed({"method": "peagle", "speedup": 2.0}) == 0
    # the K of AWS's 1,167 tokens/s is not known
    assert not any("AWS" in label for _, label, _ in lines)
    plain = [label for panel, label, _ in lines if panel.startswith(PLAIN)]
    assert plain and not any("qwen3-coder" in label for label in plain)


def test_tables_of_the_paper_agree_with_themselves():
    """Printed ratios are those of the printed speeds, to EAGLE-3 with its best K."""
    tables = read_tables(TABLES)
    papers = [table for name, table in tables.items() if name.startswith("paper_")]
    assert len(papers) == 3
    for table in papers:
        assert len(table.rows) == 36
        best: dict = {}
        for row in table.rows:
            key = row["texts"], row["concurrency"]
            if row["method"] == "eagle3":
                best[key] = max(best.get(key, 0), row["tokens_per_second"])
            else:
                ratio = row["tokens_per_second"] / best[key]
                assert ratio == pytest.approx(row["over_best_eagle3"], abs=0.0101), (table, row)


def test_picture(tmp_path):
    path = tmp_path / "published.png"
    draw(path, panels(read_tables(TABLES), OURS))
    assert path.read_bytes().startswith(b"\x89PNG")
