"""The readers of binary files, on inputs that are searched for by coverage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure" / "guided_fuzz.py"

pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86-64 only")


@pytest.mark.parametrize("seconds", [3, pytest.param(150, marks=pytest.mark.long)])
def test_readers_survive_a_search(seconds, tmp_path):
    """Both of them, so many seconds each."""
    words = [sys.executable, SCRIPT, "--seconds", seconds, "--record", tmp_path / "rows.jsonl"]
    ended = subprocess.run([*map(str, words)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["found"] for row in rows] == [[], []]
    for row in rows:  # the search sees what the readers do, and finds new ways through them
        assert row["inputs"] > 500 and row["branches"] > row["branches_of_seeds"] > 20
