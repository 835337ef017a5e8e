"""Extraction that is interrupted: the same bytes after every kind of interruption."""

import fcntl
import os
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from features import FLAGS, contents, extract, go, watch

from peagle_jax import weights
from peagle_jax.pipelines import extract as room
from peagle_jax.train.hidden_state_store import open_hidden_states, read_index, shard_path
from peagle_jax.types import InputError


@pytest.mark.parametrize(
    "rows, shards, error",
    [(20, 2, RuntimeError()), (23, 2, KeyboardInterrupt()), (9, 0, RuntimeError())],
)
def test_resumes_to_the_same_bytes(rows, shards, error, place, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        watch(patch, rows, error)
        extract(place, tmp_path / "out")
    names = ["index.json", *(f"shard-{i:05}.safetensors" for i in range(shards))]
    assert sorted(contents(tmp_path / "out")) == names
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    reports = watch(monkeypatch)
    result = extract(place, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(place / "whole")
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == times[name] for name in names)
    total = read_index(place / "whole").rows
    assert reports[0][:2] == (shards * 10 + 3, total) and reports[-1][:2] == (total, total)
    size = sum(len(content) for content in contents(place / "whole").values())
    assert result.tokens_per_second > 0 and result.bytes == size


def test_a_shard_appears_whole_or_not_at_all(place, tmp_path, monkeypatch):
    """Interrupted in the middle of a file; and a file that a SIGKILL left half is written over."""
    out, real, calls = tmp_path / "out", weights.write_safetensors, []
    synced = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: synced.append((os.fstat(handle).st_size, len(list(out.glob("shard*"))))),
    )

    def half(path, tensors, metadata):
        calls.append(path.name)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        real(path, tensors, metadata)

    monkeypatch.setattr(weights, "write_safetensors", half)
    with pytest.raises(KeyboardInterrupt):
        go(place, out)
    assert sorted(contents(out)) == [
        "index.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    assert calls[2] == ".shard-00002.safetensors.tmp"
    assert synced == [
        (shard_path(out, shard).stat().st_size, shard) for shard in range(2)
    ]  # all of it on the disk, before it has its name
    (out / calls[2]).write_bytes(b"x" * 100_000)
    go(place, out)
    assert contents(out) == contents(place / "whole")


@pytest.mark.long
def test_killed(place, tmp_path):
    """SIGKILL, after the first shard."""
    words = [str(w) for flag, value in FLAGS.items() for w in (f"--{flag}", value)]
    ask = [
        "extract",
        "--target",
        place / "target",
        "--data",
        place / "corpus.jsonl",
        "--out",
        tmp_path / "out",
        *words,
    ]
    code = (
        "import sys, time; from peagle_jax.train import hidden_state_store\n"
        "r = hidden_state_store.write_shard\n"
        "from peagle_jax.pipelines import extract as e\n"
        "e.write_shard = lambda *a: (r(*a), time.sleep(0 if a[2] == 0 else 60))\n"
        "from peagle_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, ask)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    while not shard_path(tmp_path / "out", 1).exists() and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9
    assert sorted(contents(tmp_path / "out")) == [
        "index.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    go(place, tmp_path / "out")
    got, want = contents(tmp_path / "out"), contents(place / "whole")
    assert (
        got.pop("index.json") != want.pop("index.json") and got.keys() == want.keys()
    )  # another command began it
    a, b = (open_hidden_states(folder) for folder in (tmp_path / "out", place / "whole"))
    arrays_of_a, arrays_of_b = (jax.tree.leaves(f.batch(range(len(f)))) for f in (a, b))
    for x, y in zip(arrays_of_a, arrays_of_b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_shard_lost_in_the_middle(place, tmp_path):
    """Reading says which, and what to do; that does it, and computes no other."""
    out = shutil.copytree(place / "whole", tmp_path / "out")
    shard_path(out, 1).unlink()
    with pytest.raises(
        InputError,
        match=r"shard-00001.safetensors: shard 2 of \d must be there; got nothing; run .* again",
    ):
        open_hidden_states(out)
    lines = go(place, out)
    assert contents(out) == contents(place / "whole") and "in 1 of " in lines[1]
    shard_path(out, 4).unlink()
    assert "in 1 of 5 shards" in go(place, out)[1] and contents(out) == contents(place / "whole")


def test_nothing_left_to_do(place, monkeypatch):
    monkeypatch.setattr(room, "load_target", None)
    before = {p: p.stat().st_mtime_ns for p in (place / "whole").iterdir()}
    lines = go(place, place / "whole")
    assert "are there" in lines[-1] and before == {
        p: p.stat().st_mtime_ns for p in (place / "whole").iterdir()
    }


def test_one_writer_at_a_time(place, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        watch(patch, 12, RuntimeError())
        extract(place, tmp_path / "out")
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match="one process fills a folder at a time"):
        go(place, tmp_path / "out")
    os.close(handle)
    assert contents(tmp_path / "out") == before
    go(place, tmp_path / "out")
