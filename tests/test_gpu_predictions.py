"""Floors and predictions of docs/kernels.md: what the command computes, by sums that hold."""

import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def predictions():
    """conftest.py has put scripts/ into the path."""
    from gpu import predictions

    return predictions


@pytest.fixture(scope="module")
def tables(predictions):
    return predictions.tables()


def numbers(table: str) -> list[list[str]]:
    """The cells of a table's lines."""
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_is_as_computed(predictions, tables):
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert all(table in page for table in tables.values())
    assert predictions.filled(page, tables) == page
    old = predictions.filled(page, dict.fromkeys(tables, "| old |"))
    assert old.count("| old |") == len(tables)
    assert predictions.filled(old, tables) == page


def test_a_plain_step_by_hand(predictions, tables):
    """Qwen3-Coder's matrices of a token: 48 layers of attention and 8 experts, and its output."""
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048
    experts = 8 * 3 * 2048 * 768
    router, output = 2 * 2048 * 128, 2 * 2048 * 151936  # bfloat16
    cache = 1024 * 2 * 4 * (128 + 4)
    num_bytes = 48 * (attention + experts + router + cache) + output
    row = numbers(tables["steps"])[0]
    assert row[0] == "qwen3-coder-30b-a3b-instruct, plain"
    assert float(row[2]) == pytest.approx(num_bytes / 1e9, abs=0.06)
    assert float(row[3]) == pytest.approx(1e3 * num_bytes / 4.3e12, rel=0.01)
    # 15 launches a layer (results/layer_launches.jsonl), and few beside the layers
    assert 48 * 15 <= int(row[4]) <= 48 * 15 + 30
    assert float(row[5]) == pytest.approx(float(row[3]) + 2.5e-3 * int(row[4]), abs=0.01)


def test_experts_that_tokens_choose(predictions):
    assert predictions.experts_of(128, 8, 1) == pytest.approx(8)
    rng = np.random.default_rng(0)
    drawn = [len(np.unique([rng.permutation(32)[:4] for _ in range(8)])) for _ in range(2000)]
    assert predictions.experts_of(32, 4, 8) == pytest.approx(np.mean(drawn), rel=0.01)


def test_a_loop_is_launched_once_a_round(predictions):
    row = {"program": "p", "kernels": True, "thunks": 100, "thunks_in_loops": 30}
    other = row | {"kernels": False, "thunks": 7}
    assert [predictions.launches_of([other, row], "p", rounds) for rounds in (1, 2)] == [100, 130]
    with pytest.raises(KeyError, match="compile_ahead.py"):
        predictions.launches_of([other], "p", 1)


def test_pairs_of_a_training_step(predictions):
    """Two documents of 4,096 tokens: a row sees half of one on average, and so do placeholders."""
    step = predictions.training_step(8192)
    pairs = step["rows"] * 8192 / 4
    flop = 4 * 14 * pairs * 32 * 128  # 4 layers, 7 products of 2 FLOP
    assert step["attention, kernel"] == pytest.approx(flop / 790e12, rel=0.01)
    scores = 4 * step["rows"] * 8192 * 32  # bytes of a layer, through memory 15 times
    assert step["attention, xla"] == pytest.approx(4 * 15 * scores / 4.3e12, rel=1e-6)


def test_a_kernel_never_loses_to_its_own_floor(predictions):
    attention = predictions.cached_attention
    ours, xla = (attention(kernel, False, 8, [1000, 3000], 4096) for kernel in (True, False))
    assert ours.num_bytes == 2 * 4 * 4000 * 256 and ours.seconds > ours.floor
    scores = 3 * 4 * 2 * 32 * 8 * 4096
    assert xla.num_bytes == 2 * 4 * 256 * 2 * 4096 + scores
    narrow = attention(True, True, 8, [1000, 3000], 4096)
    assert narrow.num_bytes == 2 * 4 * 4000 * 132


def test_measured_tables_are_those_of_the_rows():
    from gpu import measured

    lines = (ROOT / "results" / "gpu.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = measured.tables(rows)
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert len(found) == 6 and all(table in page for table in found.values())
    assert measured.filled(page, found) == page
    old = measured.filled(page, dict.fromkeys(found, "| old |"))
    assert old.count("| old |") == len(found) and measured.filled(old, found) == page


def test_a_step_that_was_measured_again_has_both_times():
    from gpu import measured

    step = {
        "part": "steps",
        "target": "t",
        "method": "none",
        "k": 0,
        "batch": 1,
        "layers": None,
        "routing": "even",
        "floor_us": 500.0,
    }
    first = step | {"time": "2026-11-26T06:59:59Z", "step_us": 4000.0, "tokens_per_s": 250.0}
    last = step | {"time": "2027-01-01T00:00:00Z", "step_us": 2500.0, "tokens_per_s": 400.0}
    part_of_it = first | {"layers": 6}
    lines = measured.step_lines([last, part_of_it, first])
    former = [""] * (len(measured.STATES) - 2)
    assert lines[1:] == [["t, batch 1, plain", "0.50", "4.00", *former, "2.50", "400"]]
    drafting = last | {"method": "peagle", "k": 7, "routing": "alike"}
    times = ["", *former, "2.50"]
    name = "t, batch 1, P-EAGLE, K = 7, alike"
    assert measured.step_lines([drafting])[1] == [name, "0.50", *times, "400"]
    batch = last | {"batch": 8, "routing": "alike", "time": "2026-11-26T13:30:00Z"}
    times = ["2.50" if name == "third" else "" for name in measured.STATES]
    assert measured.step_lines([batch])[1] == ["t, batch 8, plain, alike", "0.50", *times, "400"]


def test_steps_of_a_target_stand_together():
    from gpu import measured

    step = {"part": "steps", "layers": None, "routing": "even", "floor_us": 1.0, "step_us": 1.0}
    step |= {"time": "2027-01-01T00:00:00Z", "tokens_per_s": 1.0}

    def row(target, batch, method, k):
        return step | {"target": target, "batch": batch, "method": method, "k": k}

    rows = [row("b", 1, "none", 0), row("a", 1, "none", 0), row("b", 8, "none", 0)]
    rows += [row("b", 1, "peagle", 7), row("a", 1, "eagle3", 3)]
    names = [", ".join(line[0].split(", ")[:2]) for line in measured.step_lines(rows)[1:]]
    assert names == ["b, batch 1"] * 2 + ["a, batch 1"] * 2 + ["b, batch 8"]


def test_experts_that_were_measured_twice_have_both_times():
    from gpu import measured

    row = {"part": "variants: experts", "shape": "4 tokens", "floor_us": {"now": 33.1}}
    rows = [
        row | {"us": {"now": 84.0, "sorted into tiles": 84.2, "pair by pair": 52.1}},
        row | {"us": {"now": 60.0, "in tiles": 81.5, "without tensor cores": 60.5}},
    ]
    assert measured.expert_lines(rows)[1:] == [["4 tokens", "33", "52", "60", "84, 82"]]
