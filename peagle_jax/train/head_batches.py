"""What one step of a head's training reads: rows for the target to run on, or what `peagle extract` stored of them."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from peagle_jax import weights
from peagle_jax.checkpoints.target_io import target_hash
from peagle_jax.train.cod import cod_sample
from peagle_jax.train.config import HeadRun, PeagleRun
from peagle_jax.train.data import PackedRows
from peagle_jax.train.hidden_state_store import HiddenStateFolder, open_hidden_states
from peagle_jax.train.hidden_states import TrainingRows, shifted, training_rows
from peagle_jax.types import Batch, CodSample, InputError, Model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBatch:
    batch: Batch
    stored: (
        tuple | None
    )  # (taps [B T A], final hidden states [B T E]) of the batch; None: the target has to run
    segment_ids: np.ndarray | jax.Array  # [B n], shifted, as the next
    loss_mask: np.ndarray | jax.Array
    cod: CodSample | None  # None for EAGLE-3
    step: np.ndarray | jax.Array
    num_depths: int = dataclasses.field(
        metadata={"static": True}
    )  # trained in this step: it is compiled once for each number

    def rows(self, target, dtype) -> TrainingRows:
        """What the loss reads, inside jit. `dtype` is the target's."""
        if self.stored is None:
            return training_rows(target, self.batch, self.segment_ids, self.loss_mask)
        aux_hidden_states, hidden = self.stored
        return TrainingRows(
            self.batch.tokens[:, 1:],
            aux_hidden_states[:, :-1].astype(dtype),
            hidden[:, 1:].astype(dtype),
            self.segment_ids,
            self.loss_mask,
        )


class HeadBatches:
    """Step -> `HeadBatch`, on the host; a resumed run reads what it would have read."""

    def __init__(self, run: HeadRun, rows: PackedRows, target: Model):
        self.run, self.rows = run, rows
        self.folder = None if run.hidden_states_dir is None else _open(run, rows, target)
        if self.folder is not None:
            width, stored = (
                self.folder.config.hidden_width,
                self.folder.config.aux_hidden_state_layers,
            )
            self.columns = np.concatenate(
                [
                    np.arange(width) + width * stored.index(tap)
                    for tap in target.config.aux_hidden_state_layers
                ]
            )

    def __call__(self, step: int) -> HeadBatch:
        run = self.run
        picks = self.rows.picks(run.data.batch_size, run.seed, step)
        batch, stored = self.rows.take(picks), None
        if self.folder is not None:
            aux_hidden_states = self.folder.batch(picks)
            stored = (
                aux_hidden_states.aux_hidden_states[..., self.columns],
                aux_hidden_states.hidden,
            )
        segment_ids, loss_mask = shifted(batch)
        num_depths, cod = run.num_depths_at(step), None
        if isinstance(run, PeagleRun):
            cod = cod_sample(
                loss_mask,
                segment_ids,
                dataclasses.replace(run.cod, num_depths=num_depths),
                [run.seed, step],
            )
        return HeadBatch(
            batch, stored, segment_ids, loss_mask, cod, np.asarray(step, np.int32), num_depths
        )


def _open(run: HeadRun, rows: PackedRows, target: Model) -> HiddenStateFolder:
    """
    Raises:
      InputError: the folder is damaged, of another target or other rows, or lacks a tap.
    """
    path = run.hidden_states_dir
    folder = open_hidden_states(Path(path))
    held = folder.config
    if held.target_hash != target_hash(weights.find_folder(run.target)):
        raise InputError(
            path,
            f"stored features must be of the run's target, {run.target}",
            f"those of {held.target}",
            "extract again",
        )
    if (
        held.seq_len != rows.tokens.shape[1] or held.rows_hash != rows.digest()
    ):  # the digest does not see where rows are cut
        rule = "stored features must be of the rows that the run trains on: data.source, max_chars, held_out, length and seed as extracted"
        raise InputError(
            path,
            rule,
            f"{held.rows} rows of {held.seq_len} tokens of {held.data}",
            "extract again, or mend `data`",
        )
    if missing := [
        tap
        for tap in target.config.aux_hidden_state_layers
        if tap not in held.aux_hidden_state_layers
    ]:
        rule = f"every tap of the head must be stored: {', '.join(map(str, held.aux_hidden_state_layers))} are"
        raise InputError(
            path, rule, ", ".join(map(str, missing)), "extract again with --taps, or set head.taps"
        )
    return folder
