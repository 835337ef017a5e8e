"""Which stored hidden states each of several training processes reads."""

import dataclasses

import jax
import numpy as np
from features import go, rows_of
from test_stored_training import config

from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.train import head_batches
from peagle_jax.train.config import TASKS, build
from peagle_jax.train.head_batches import HeadBatches
from peagle_jax.train.hidden_state_store import HiddenStateFolder


def test_each_process_reads_its_own_rows(place, tokenizer, tmp_path, monkeypatch):
    """What is stored of the others is not read; tokens and elements are those of all rows."""
    go(place, tmp_path / "states", aux_hidden_state_layers=(0, 1, 2, 3), batch_size=5)
    raw = config(place, place / "never", hidden_states_dir=str(tmp_path / "states"))
    run, rows = build(TASKS["peagle"], raw, "test"), rows_of(place, tokenizer)
    target = load_target(place / "target", aux_hidden_state_layers=(1, 3))
    whole = HeadBatches(run, rows, target)(2)
    monkeypatch.setattr(head_batches, "rows_here", lambda count, mesh: [1, 3])
    read, batch = [], HiddenStateFolder.batch

    def noting(folder, indices):
        read.append(list(indices))
        return batch(folder, indices)

    monkeypatch.setattr(HiddenStateFolder, "batch", noting)
    half = HeadBatches(run, rows, target)(2)
    picks = rows.indices_at(4, 9, 2)
    assert read == [[picks[1], picks[3]]]
    for x, y in zip(jax.tree.leaves(half.stored), jax.tree.leaves(whole.stored), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and not x[[0, 2]].any()
        np.testing.assert_array_equal(x[[1, 3]], y[[1, 3]])
    half, whole = (dataclasses.replace(one, stored=None) for one in (half, whole))
    for x, y in zip(jax.tree.leaves(half), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(x, y)
