"""Locks: one process has a file, which is the file of that name; writers begin one by one."""

import subprocess
import sys
import threading
import time

import pytest

from peagle_jax import file_lock, weights
from peagle_jax.types import InputError

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


def test_one_waits_for_another_but_not_for_long(tmp_path):
    """Two holders one after the other; then one that holds for longer than anybody waits."""
    events, has_begun, may_end = [], threading.Event(), threading.Event()

    def hold():
        with file_lock.lock_briefly(tmp_path):
            has_begun.set()
            may_end.wait()
            events.append("first ends")

    thread = threading.Thread(target=hold)
    thread.start()
    has_begun.wait()
    with file_lock.lock_briefly(tmp_path, seconds=0.05):
        events.append("went on without")
    threading.Timer(0.2, may_end.set).start()
    with file_lock.lock_briefly(tmp_path, seconds=60.0):
        events.append("second begins")
    thread.join()
    assert events == ["went on without", "first ends", "second begins"]


def test_writers_that_begin_at_once_are_not_both_let_in(tmp_path, monkeypatch):
    """Each looks for others before it makes its folder: the second may look too early."""
    make = weights.writing.FolderWriter._temporary_folder

    def make_late(writer, kind):
        time.sleep(0.3)
        return make(writer, kind)

    monkeypatch.setattr(weights.writing.FolderWriter, "_temporary_folder", make_late)
    outcomes, both_are_done = [], threading.Barrier(2)

    def write():
        try:
            with weights.new_folder(tmp_path / "out") as work:
                both_are_done.wait(timeout=60)
                (work / "config.json").write_text("{}")
            outcomes.append("written")
        except InputError as error:
            both_are_done.wait(timeout=60)
            outcomes.append(error.rule)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["one process writes a folder at a time", "written"]


@pytest.mark.parametrize("is_removed", [False, True])
def test_two_that_begin_in_the_same_moment(is_removed, tmp_path, monkeypatch):
    """The other took this one's folder, not locked yet, for what a killed process has left."""

    def taken(handle):
        if is_removed:
            work, *_ = tmp_path.glob(".out.peagle-new.*")
            work.rmdir()
        return is_removed

    monkeypatch.setattr("peagle_jax.weights.writing.try_lock", taken)
    with pytest.raises(InputError, match="one process writes a folder at a time; got another"):
        weights.new_folder(tmp_path / "out").__enter__()
    assert not (tmp_path / "out").exists()
