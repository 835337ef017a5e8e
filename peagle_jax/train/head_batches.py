"""What one step of a head's training reads.

That is packed rows for the target to run on, or the hidden states of these rows that `peagle
extract` stored.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from peagle_jax import weights
from peagle_jax.checkpoints.target_io import target_hash
from peagle_jax.layers import FINAL_HIDDEN_STATE, Decoder
from peagle_jax.targets.config import TargetConfig
from peagle_jax.train.cod import cod_sample, narrowed
from peagle_jax.train.config import HeadRun, PeagleRun
from peagle_jax.train.data import PackedRows
from peagle_jax.train.hidden_state_store import (
    HiddenStateFolder,
    HiddenStates,
    decoded,
    open_hidden_states,
)
from peagle_jax.train.hidden_states import TrainingRows, shifted, training_rows
from peagle_jax.train.mesh import rows_here
from peagle_jax.types import Batch, CodSample, InputError, Model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBatch:
    """The input of one training step.

    Attributes:
      batch: packed rows.
      stored: their hidden states; None: the target has to run.
      segment_ids: documents of the shifted rows.
      loss_mask: of the shifted rows.
      cod: elements of depth 1 and more; None for heads that draft one by one.
      noise_ids: the step and the row in it, by which a row's feature noise is drawn.
      num_depths: depths that this step trains; static, so that a step is compiled for each number.
    """

    batch: Batch
    stored: HiddenStates | None
    segment_ids: Int[Array | np.ndarray, "B n"]
    loss_mask: Bool[Array | np.ndarray, "B n"]
    cod: CodSample | None
    noise_ids: Int[Array | np.ndarray, "B 2"]
    num_depths: int = dataclasses.field(metadata={"static": True})

    def rows(self, target: Decoder, dtype: DTypeLike) -> TrainingRows:
        """What the loss reads. To be called inside jit.

        Args:
          target: a bound target module; runs if no hidden states are stored.
          dtype: the target's, in which stored hidden states are read.
        """
        segment_ids, loss_mask = cast(Array, self.segment_ids), cast(Array, self.loss_mask)
        if self.stored is None:
            return training_rows(target, self.batch, segment_ids, loss_mask)
        stored = self.stored
        hidden = decoded(stored.hidden, stored.hidden_scales, dtype)
        if target.aux_hidden_state_layers == (FINAL_HIDDEN_STATE,):
            aux_hidden_states = hidden
        else:
            aux_hidden_states = decoded(stored.aux_hidden_states, stored.aux_scales, dtype)
        return TrainingRows(
            cast(Array, self.batch.tokens[:, 1:]),
            aux_hidden_states[:, :-1],
            hidden[:, 1:],
            segment_ids,
            loss_mask,
        )


class HeadBatches:
    """Step -> `HeadBatch`, on the host. The same step always gives the same batch.

    Of stored hidden states each process reads the rows that its devices get; the others are zero,
    and take no memory. A row of 20,000 tokens has a gigabyte of them.

    Args:
      run: the training run.
      rows: its packed rows.
      target: the run's target.
      mesh: of the devices of all processes; None for one device.

    Raises:
      InputError: `run.hidden_states_dir` is damaged, is of another target or other rows, or lacks a
        layer that the head reads.
    """

    def __init__(
        self, run: HeadRun, rows: PackedRows, target: Model, mesh: Mesh | None = None
    ) -> None:
        self.run, self.rows = run, rows
        self.rows_here = rows_here(run.data.batch_size, mesh)
        self.folder: HiddenStateFolder | None = None
        if run.hidden_states_dir is not None:
            aux_layers = cast(TargetConfig, target.config).aux_hidden_state_layers
            # the final hidden state is stored for every kind of head, and not among these
            aux_layers = tuple(i for i in aux_layers if i != FINAL_HIDDEN_STATE)
            self.folder = _open_matching(run, run.hidden_states_dir, rows, aux_layers)
            width = self.folder.index.hidden_width
            stored_layers = self.folder.index.aux_hidden_state_layers
            self.layers = [stored_layers.index(layer) for layer in aux_layers]
            columns = [np.arange(width) + width * i for i in self.layers]
            self.columns = np.concatenate([np.arange(0), *columns])

    def __call__(self, step: int) -> HeadBatch:
        run = self.run
        indices = self.rows.indices_at(run.data.batch_size, run.seed, step)
        batch, stored = self.rows.take(indices), None
        if self.folder is not None:
            stored = self._stored(self.folder, indices)
        segment_ids, loss_mask = shifted(batch)
        num_depths, cod = run.num_depths_at(step), None
        if isinstance(run, PeagleRun):
            cod_config = dataclasses.replace(run.cod, num_depths=num_depths)
            cod = cod_sample(loss_mask, segment_ids, cod_config, [run.seed, step])
            cod = narrowed(cod) if cod_config.partitions == 1 else cod
        noise_ids = np.array([(step, row) for row in range(len(indices))], np.int32)
        return HeadBatch(batch, stored, segment_ids, loss_mask, cod, noise_ids, num_depths)

    def _stored(self, folder: HiddenStateFolder, indices: Sequence[int]) -> HiddenStates:
        """The hidden states of the layers that the head reads."""
        here = self.rows_here
        states = folder.batch([indices[row] for row in here])
        scales = None if states.aux_scales is None else states.aux_scales[..., self.layers]
        states = dataclasses.replace(
            states,
            aux_hidden_states=states.aux_hidden_states[..., self.columns],
            aux_scales=scales,
        )
        if len(here) == len(indices):
            return states

        def among_all(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((len(indices), *x.shape[1:]), x.dtype)
            whole[here] = x
            return whole

        return jax.tree.map(among_all, states)


def _open_matching(
    run: HeadRun, path: str, rows: PackedRows, aux_layers: tuple[int, ...]
) -> HiddenStateFolder:
    """Opens stored hidden states; they must be of this target, these rows and these layers."""
    folder = open_hidden_states(Path(path))
    index = folder.index
    if index.target_hash != target_hash(weights.find_folder(run.target)):
        rule = f"stored hidden states must be of the run's target, {run.target}"
        next_step = f"run `peagle extract --target {run.target}`, or set hidden_states_dir: null"
        raise InputError(path, rule, f"those of {index.target}", next_step)
    # the digest does not depend on where rows are cut, so their length is compared too
    if index.seq_len != rows.seq_len or index.rows_hash != rows.digest():
        rule = (
            "stored hidden states must be of the rows that the run trains on: the same "
            "data.source, data.max_chars, data.held_out, data.seq_len, data.packing and seed"
        )
        got = f"{index.rows} rows of {index.seq_len} tokens of {index.data}"
        next_step = (
            f"set data.max_chars: {'null' if index.max_chars is None else index.max_chars}, "
            f"data.held_out: {index.held_out}, data.seq_len: {index.seq_len}, "
            f"data.packing: {index.packing} and seed: {index.seed} as they were, or extract again"
        )
        raise InputError(path, rule, got, next_step)
    if missing := [layer for layer in aux_layers if layer not in index.aux_hidden_state_layers]:
        stored = ", ".join(map(str, index.aux_hidden_state_layers))
        rule = f"every aux hidden state layer of the head must be stored: {stored} are"
        next_step = (
            "extract again with --aux-hidden-state-layers "
            f"{','.join(map(str, aux_layers))}, or set head.aux_hidden_state_layers to stored ones"
        )
        raise InputError(path, rule, ", ".join(map(str, missing)), next_step)
    return folder
