"""Rows of experiments with any value in any place: read, or left out with a warning."""

import json

import numpy as np
import pytest
from fuzzing import JSON_PIECES, cases, changed, damaged
from hypothesis import given
from made_rows import made

from experiments.rows import latest, read_rows
from experiments.run import finished
from experiments.statistics import pooled

ROW = made(np.random.default_rng(5), "losses", "forward_kl", 0, k=2, prompts=2)


@pytest.mark.fuzz
@cases(200)
@given(
    content=changed(ROW).map(lambda row: json.dumps(row).encode())
    | damaged(json.dumps(ROW).encode(), (*JSON_PIECES, b"\n"))
)
def test_any_value_anywhere(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "rows"
    folder.mkdir(exist_ok=True)
    (folder / "losses.jsonl").write_bytes(content + b"\n")
    rows, warnings = read_rows(folder)
    assert rows or warnings or not content.strip()
    assert all(warning.isprintable() for warning in warnings)
    for row in latest(rows):
        assert set(row["measurements"][0]) >= {"k", "temperature"}
        pooled([row])
    finished(folder)
