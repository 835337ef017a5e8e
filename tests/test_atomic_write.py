"""Small files appear whole or not at all; lines are added whole, too."""

import json
import os
import subprocess
import sys
import threading

import pytest

from peagle_jax import atomic_write, file_lock
from peagle_jax.atomic_write import append_line, write_atomically
from peagle_jax.report.records import Records, read_rows

FULL = """
import resource, signal, sys
from pathlib import Path
from peagle_jax import atomic_write, file_lock
from peagle_jax.atomic_write import append_line, write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    globals()[sys.argv[1]](Path(sys.argv[2]), "x" * 5000)
except OSError as error:
    print(error.strerror)
"""


def on_a_full_disk(function, path):
    """What is said where no file may have more than 1,000 bytes."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, function, str(path)], capture_output=True, text=True
    )
    return done.stdout


def test_a_full_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("before\n")
    assert "File too large" in on_a_full_disk("write_atomically", path)
    assert "File too large" in on_a_full_disk("append_line", path)
    assert path.read_text() == "before\n" and os.listdir(tmp_path) == ["rows.json"]


def test_text_that_is_no_unicode_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a", "x\ud800")
    assert not os.listdir(tmp_path)


def test_links_are_not_followed(tmp_path):
    """Neither the temporary name nor the name itself leads elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".a.tmp").symlink_to(elsewhere)
    (folder / "a").symlink_to(elsewhere)
    write_atomically(folder / "a", "new")
    assert elsewhere.read_text() == "mine"
    assert os.listdir(folder) == ["a"] and not (folder / "a").is_symlink()
    assert (folder / "a").read_text() == "new"


def test_what_a_killed_process_left_is_written_over(tmp_path):
    (tmp_path / ".a.tmp").write_text("a longer text than the new one")
    write_atomically(tmp_path / "a", "short")
    assert (tmp_path / "a").read_text() == "short" and os.listdir(tmp_path) == ["a"]
    name = "n" * 250  # its temporary one would be too long
    write_atomically(tmp_path / name, "x")
    assert sorted(os.listdir(tmp_path)) == ["a", name]


def test_many_writers_at_once(tmp_path):
    """The file always has all of one text, and no writer fails."""
    texts = [str(i) * 200_000 for i in range(8)]
    failures = []

    def write(text):
        try:
            for _ in range(30):
                write_atomically(tmp_path / "a", text)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "a").exists():
            seen.add((tmp_path / "a").read_text())
    assert not failures and seen <= set(texts)
    assert os.listdir(tmp_path) == ["a"]


def test_a_row_after_a_torn_one_is_whole(tmp_path):
    """One row is lost, and not two."""
    rows = Records(tmp_path)
    rows.add({"a": 1})
    with rows.path.open("a") as file:
        file.write('{"a": 2, "b')
    rows.add({"a": 3})
    append_line(rows.path, json.dumps({"a": 4}))
    lines = rows.path.read_text().splitlines()
    assert lines == ['{"a": 1}', '{"a": 2, "b', '{"a": 3}', '{"a": 4}']
    rows.path.write_text("\n".join([lines[0], *lines[2:]]))
    assert [row["a"] for row in read_rows(rows.path)] == [1, 3, 4]


def test_a_writer_that_stands_still_blocks_nobody(tmp_path, monkeypatch):
    """As one that was stopped with Ctrl-Z, or where locks do not work."""

    def has_none(handle):
        raise OSError("no locks available")

    monkeypatch.setattr(atomic_write, "wait_for_lock", has_none)
    write_atomically(tmp_path / "a", "before")
    assert os.listdir(tmp_path) == ["a"]
    monkeypatch.setattr(atomic_write, "wait_for_lock", lambda handle: False)
    write_atomically(tmp_path / "a", "x")
    assert (tmp_path / "a").read_text() == "x"
    handle = os.open(tmp_path / "a", os.O_RDWR)
    assert file_lock.wait_for_lock(handle)
    other = os.open(tmp_path / "a", os.O_RDWR)
    assert not file_lock.wait_for_lock(other, seconds=0.02)
    os.close(handle)
    assert file_lock.wait_for_lock(other)
    os.close(other)
