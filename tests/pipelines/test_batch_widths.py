"""How many elements a batch of training has."""

import dataclasses

import numpy as np
import pytest
from features import rows_of
from test_stored_training import config

from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.train import cod as cod_module
from peagle_jax.train.config import TASKS, build
from peagle_jax.train.head_batches import HeadBatches


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_batch_has_no_more_elements_than_its_rows_need(partitions, place, tokenizer, monkeypatch):
    """Padding and prompts take no places, but for partitions, whose places are shares of all."""
    monkeypatch.setattr(cod_module, "LEAST_WIDTH", 4)
    raw = config(place, place / "never")
    run = build(TASKS["peagle"], raw, "test")
    run = dataclasses.replace(run, cod=dataclasses.replace(run.cod, partitions=partitions))
    rows = rows_of(place, tokenizer)
    is_read = np.arange(len(rows.corpus_loss_mask)) // 12 % 3 != 1
    rows = dataclasses.replace(rows, corpus_loss_mask=rows.corpus_loss_mask & is_read)
    target = load_target(place / "target", aux_hidden_state_layers=(1, 3))
    batches, positions = HeadBatches(run, rows, target), rows.seq_len - 1
    widths = {batches(step).cod.real.shape[1] for step in range(12)}
    whole = run.cod.partitions * run.cod.partition_width(positions)
    assert (len(widths) > 1 and max(widths) <= whole) if partitions == 1 else widths == {whole}
