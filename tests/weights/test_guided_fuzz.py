"""The readers of binary files, on inputs that are searched for by coverage."""

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
    assert (tmp_path / "rows.jsonl").read_text().count('"found": []') == 2
