"""What one step of a head's training reads: rows for the target to run on, or what `peagle extract` stored of them."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from peagle_jax import weights
from peagle_jax.pipelines.extract import target_hash
from peagle_jax.train.cod import cod_sample
from peagle_jax.train.config import HeadRun, PeagleRun
from peagle_jax.train.data import PackedRows
from peagle_jax.train.features import Rows, shifted, training_rows
from peagle_jax.train.stored import FeatureFolder, open_features
from peagle_jax.types import Batch, CodSample, InputError, Model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBatch:
    batch: Batch
    stored: tuple | None  # (taps [B T A], final hidden states [B T E]) of the batch; None: the target has to run
    document: np.ndarray | jax.Array  # [B n], shifted, as the next
    supervised: np.ndarray | jax.Array
    cod: CodSample | None  # None for EAGLE-3
    step: np.ndarray | jax.Array
    depths: int = dataclasses.field(metadata={"static": True})  # trained in this step: it is compiled once for each number

    def rows(self, target, dtype) -> Rows:
        """What the loss reads, inside jit. `dtype` is the target's."""
        if self.stored is None:
            return training_rows(target, self.batch, self.document, self.supervised)
        taps, hidden = self.stored
        return Rows(self.batch.tokens[:, 1:], taps[:, :-1].astype(dtype), hidden[:, 1:].astype(dtype), self.document, self.supervised)


class HeadBatches:
    """Step -> `HeadBatch`, on the host; a resumed run reads what it would have read."""

    def __init__(self, run: HeadRun, rows: PackedRows, target: Model):
        self.run, self.rows = run, rows
        self.folder = None if run.features is None else _open(run, rows, target)
        if self.folder is not None:
            width, stored = self.folder.config.hidden_width, self.folder.config.taps
            self.columns = np.concatenate([np.arange(width) + width * stored.index(tap) for tap in target.config.taps])

    def __call__(self, step: int) -> HeadBatch:
        run = self.run
        picks = self.rows.picks(run.data.batch, run.seed, step)
        batch, stored = self.rows.take(picks), None
        if self.folder is not None:
            features = self.folder.batch(picks)
            stored = features.taps[..., self.columns], features.hidden
        document, supervised = shifted(batch)
        depths, cod = run.depths_at(step), None
        if isinstance(run, PeagleRun):
            cod = cod_sample(supervised, document, dataclasses.replace(run.cod, depths=depths), [run.seed, step])
        return HeadBatch(batch, stored, document, supervised, cod, np.asarray(step, np.int32), depths)


def _open(run: HeadRun, rows: PackedRows, target: Model) -> FeatureFolder:
    """
    Raises:
      InputError: the folder is damaged, of another target or other rows, or lacks a tap.
    """
    path = run.features
    folder = open_features(Path(path))
    held = folder.config
    if held.target_hash != target_hash(weights.find_folder(run.target)):
        raise InputError(path, f"stored features must be of the run's target, {run.target}", f"those of {held.target}", "extract again")
    if held.length != rows.tokens.shape[1] or held.rows_hash != rows.digest():  # the digest does not see where rows are cut
        rule = "stored features must be of the rows that the run trains on: data.source, max_chars, held_out, length and seed as extracted"
        raise InputError(path, rule, f"{held.rows} rows of {held.length} tokens of {held.data}", "extract again, or mend `data`")
    if missing := [tap for tap in target.config.taps if tap not in held.taps]:
        rule = f"every tap of the head must be stored: {', '.join(map(str, held.taps))} are"
        raise InputError(path, rule, ", ".join(map(str, missing)), "extract again with --taps, or set head.taps")
    return folder
