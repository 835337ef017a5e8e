"""A folder for temporary files: gone in the end, and after a kill gone with the next one."""

import fcntl
import subprocess
import sys
import tempfile

import pytest

from peagle_jax.pipelines import temporary_folder as room
from peagle_jax.pipelines.temporary_folder import PREFIX, temporary_folder

HOLD = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from peagle_jax.pipelines.temporary_folder import temporary_folder
with temporary_folder() as folder:
    (folder / "corpus").mkdir()
    (folder / "corpus" / "tokens.bin").write_bytes(b"1234")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_has_left_is_removed_by_the_next(parent):
    """And what a living one uses is not."""
    processes = [
        subprocess.Popen([sys.executable, "-c", HOLD, parent], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, alive = (process.stdout.readline().strip() for process in processes)
    others = [parent / f"{PREFIX}file", parent / "peagle-corpus-x", parent / f"{PREFIX}link"]
    others[0].write_text("no folder")
    others[1].mkdir()  # of a version before this one, without a lock
    (parent / "elsewhere").mkdir()
    others[2].symlink_to(parent / "elsewhere")
    try:
        processes[0].kill()
        processes[0].wait()
        before = {path.name for path in parent.iterdir()}
        with temporary_folder() as folder:
            names = {path.name for path in parent.iterdir()}
        assert before - names == {killed.rpartition("/")[2]}
        assert names - before == {folder.name} and not folder.exists()
        assert (parent / alive / "corpus" / "tokens.bin").read_bytes() == b"1234"
        assert (parent / "elsewhere").exists()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_without_locks_nothing_is_removed(parent, monkeypatch):
    left = parent / f"{PREFIX}left"
    left.mkdir()

    def refuse(handle, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folder() as folder:
        assert folder.exists()
    assert left.exists() and not folder.exists()


def test_a_folder_of_another_user_stays(parent, monkeypatch):
    left = parent / f"{PREFIX}left"
    left.mkdir()
    monkeypatch.setattr(room.os, "getuid", lambda: left.stat().st_uid + 1)
    with temporary_folder():
        pass
    assert left.exists()
