"""Flipped and missing bytes in training states are named by file, and not trained on."""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.checkpoints.checksums import check_checksums, write_checksums
from peagle_jax.checkpoints.orbax_io import Checkpoints, newest, open_tree
from peagle_jax.types import InputError


def state(seed):
    rng = np.random.default_rng(seed)
    w = jnp.asarray(rng.normal(size=(40, 30)), jnp.float32)
    return {"params": {"w": w}, "step": jnp.int32(seed)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """States of steps 3 and 5."""
    folder = tmp_path_factory.mktemp("states") / "checkpoints"
    checkpoints = Checkpoints(folder)
    for step in (1, 3, 5):
        checkpoints.save(step, state(step))
    checkpoints.close()
    assert sorted(p.name for p in folder.iterdir()) == ["3", "5"]
    return folder


def restored(folder):
    checkpoints = Checkpoints(folder)
    try:
        return checkpoints.restore(checkpoints.latest(), state(0))
    finally:
        checkpoints.close()


def test_every_file_of_every_state_has_a_checksum(saved):
    for step in ("3", "5"):
        folder = saved / step / "default"
        files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        assert json.loads((folder / "checksums.json").read_text()).keys() == (
            files - {"checksums.json"}
        )
        check_checksums(folder, "never")
    np.testing.assert_array_equal(restored(saved)["params"]["w"], state(5)["params"]["w"])
    tree = open_tree(newest(saved), "params")
    np.testing.assert_array_equal(np.asarray(tree["w"]), state(5)["params"]["w"])


def flipped(content):
    changed = bytearray(content)
    changed[len(content) // 2] ^= 16
    return bytes(changed)


@pytest.mark.parametrize("kind", ["flipped", "cut", "longer", "gone"])
def test_damage_is_named(saved, tmp_path, kind):
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    step = folder / "5" / "default"
    for name in json.loads((step / "checksums.json").read_text()):
        content = (step / name).read_bytes()
        if kind == "gone":
            (step / name).unlink()
        else:
            damage = {"flipped": flipped, "cut": lambda x: x[:-1], "longer": lambda x: x + b"x"}
            (step / name).write_bytes(damage[kind](content))
        for read in (restored, lambda folder: open_tree(newest(folder), "params")):
            with pytest.raises(InputError) as caught:
                read(folder)
            message = str(caught.value)
            assert message.startswith(f"{step}: {name} must have the checksum "), message
            assert f"{len(content):,} bytes; got " in message and "\n" not in message
            assert message.endswith(f"delete {folder / '5'}, so that the step before it is used")
        (step / name).write_bytes(content)
    shutil.rmtree(folder / "5")
    np.testing.assert_array_equal(restored(folder)["params"]["w"], state(3)["params"]["w"])


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": 3}', '{"a": ["x", "y"]}'])
def test_checksums_that_are_damaged(tmp_path, content):
    (tmp_path / "a").write_text("b")
    write_checksums(tmp_path)
    (tmp_path / "checksums.json").write_text(content)
    with pytest.raises(InputError, match="checksums.json: must be a list of checksums; got .*; do"):
        check_checksums(tmp_path, "do something")


def test_checksums_that_cannot_be_read(tmp_path):
    """Whatever it is, it is named, and not taken for none."""
    (tmp_path / "checksums.json").mkdir()
    with pytest.raises(InputError, match="checksums.json: must be readable; got Is a directory"):
        check_checksums(tmp_path, "do something")


def test_states_of_former_versions_have_none(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    (folder / "5" / "default" / "checksums.json").unlink()
    leaves = zip(jax.tree.leaves(restored(folder)), jax.tree.leaves(state(5)), strict=True)
    assert all(np.array_equal(x, y) for x, y in leaves)


def test_large_files_are_read_in_blocks(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(range(250)) * 9)
    write_checksums(tmp_path)
    monkeypatch.setattr("peagle_jax.checkpoints.checksums.BLOCK", 100)
    check_checksums(tmp_path, "never")


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import jax.numpy as jnp
import numpy as np
from peagle_jax.checkpoints.orbax_io import Checkpoints
from peagle_jax.cli.libraries import configure_libraries
from peagle_jax.types import InputError
configure_libraries()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(Path(sys.argv[1]))
w = np.random.default_rng(0).normal(size=(200, 200)).astype(np.float32)
checkpoints.save(2, {"w": jnp.asarray(w)})
checkpoints.wait()
# a write beyond this size is refused half-way, as by a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    checkpoints.save(4, {"w": jnp.asarray(w + 1)})
    if sys.argv[2] == "at the end":
        checkpoints.close()
    else:
        checkpoints.save(6, {"w": jnp.asarray(w + 2)})
except InputError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize("noticed", ["at the end", "by the next save"])
def test_a_disk_that_is_full(tmp_path, noticed):
    """One line; and the state before stays, and is the one that is read."""
    folder = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder), noticed], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith(f"{folder}: a checkpoint must be written to the end; got ")
    assert done.stdout.endswith("make room on the disk, and run this again (step 2 is kept)\n")
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() == 2
    w = np.random.default_rng(0).normal(size=(200, 200)).astype(np.float32)
    like = {"w": jnp.zeros((200, 200))}
    np.testing.assert_array_equal(checkpoints.restore(2, like)["w"], w)
    checkpoints.close()
