"""Checkpoints that cannot be written to the end."""

import types

import orbax.checkpoint as ocp
import pytest

from peagle_jax.checkpoints import orbax_io
from peagle_jax.types import InputError


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_files_that_appear_after_the_failure_are_removed(error, monkeypatch, tmp_path):
    """Threads of tensorstore's go on for a moment when a disk is full."""
    unfinished = tmp_path / "0" / "default.orbax-checkpoint-tmp"
    others = tmp_path / "0" / "other.orbax-checkpoint-tmp"
    pauses = iter("-+-+---")  # in which a file appears

    def save(self, path, tree, force):
        (unfinished / "d").mkdir(parents=True)
        others.mkdir()
        raise error("No space left on device")

    def sleep(seconds):
        if next(pauses) == "+":
            (unfinished / "d").mkdir(parents=True)

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", save)
    monkeypatch.setattr(orbax_io, "time", types.SimpleNamespace(sleep=sleep))
    with pytest.raises(InputError, match="must be written to the end; got No space"):
        orbax_io.save_tree(tmp_path / "0" / "default", {"x": 1.0})
    assert list((tmp_path / "0").iterdir()) == [others]
    assert next(pauses, None) is None  # it has looked until files had stopped to appear
