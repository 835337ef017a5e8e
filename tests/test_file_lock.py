"""Locks on files: one process has a file, and what it has is the file of that name."""

import subprocess
import sys

from peagle_jax import file_lock

HAS_LOCK = """
import sys
from pathlib import Path
from peagle_jax.file_lock import open_locked
print(open_locked(Path(sys.argv[1])) is not None)
"""


def test_another_process_gets_none_until_the_file_is_closed(tmp_path):
    path = tmp_path / "rows.jsonl"

    def other_gets_it() -> bool:
        words = [sys.executable, "-c", HAS_LOCK, str(path)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout == "True\n"

    with file_lock.open_locked(path) as file:
        file.write("a row\n")
        file.flush()
        assert not other_gets_it()
    assert other_gets_it()
    assert path.read_text() == "a row\n"


def test_a_file_that_its_former_owner_removes_is_opened_anew(tmp_path, monkeypatch):
    """The lock of a removed file keeps nobody out."""
    path = tmp_path / "rows.jsonl"
    tries = []

    def remove_first(file):
        tries.append(file)
        if len(tries) == 1:
            path.unlink()
        return True

    monkeypatch.setattr(file_lock, "try_lock", remove_first)
    with file_lock.open_locked(path) as file:
        file.write("a row\n")
    assert path.read_text() == "a row\n"
    assert len(tries) == 2 and tries[0].closed
