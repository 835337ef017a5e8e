"""Checkpoints that cannot be written to the end."""

import threading
import time

import orbax.checkpoint as ocp
import pytest

from peagle_jax.checkpoints.orbax_io import save_tree
from peagle_jax.types import InputError


def test_files_that_appear_after_the_failure_are_removed(monkeypatch, tmp_path):
    """Threads of tensorstore's go on for a moment when a disk is full."""
    unfinished = tmp_path / "0" / "default.orbax-checkpoint-tmp"
    threads = []

    def write_on():
        for _ in range(2):
            time.sleep(0.15)
            (unfinished / "d").mkdir(parents=True, exist_ok=True)

    def save(self, path, tree, force):
        (unfinished / "d").mkdir(parents=True)
        threads.append(threading.Thread(target=write_on))
        threads[0].start()
        raise ValueError("No space left on device")

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", save)
    with pytest.raises(InputError, match="must be written to the end; got No space"):
        save_tree(tmp_path / "0" / "default", {"x": 1.0})
    assert not threads[0].is_alive() and not any((tmp_path / "0").iterdir())
