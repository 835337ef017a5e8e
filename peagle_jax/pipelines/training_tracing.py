"""A whole training step of a recipe at full size, traced without weights and without its devices.

So a recipe can be checked, and its memory be counted by XLA, on a machine that could not run it.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.stages import Lowered

from peagle_jax.pipelines.tracing import abstract_head, abstract_target
from peagle_jax.targets import sharding
from peagle_jax.train.cod import cod_sample
from peagle_jax.train.config import HeadRun, PeagleRun
from peagle_jax.train.head_batches import HeadBatch
from peagle_jax.train.head_config import head_config
from peagle_jax.train.hidden_states import shifted
from peagle_jax.train.mesh import row_sharding
from peagle_jax.train.train_head import head_objective, split_params
from peagle_jax.train.trainer import jitted_update, state_shardings
from peagle_jax.train.update import make_optimizer
from peagle_jax.types import Batch, Model, Params
from peagle_jax.weights import flatten_params, unflatten_params


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """A training step and the shapes of what it reads, which say where these lie.

    Attributes:
      update: the jitted step.
      state: of the trained parameters, of what the optimizer keeps of them, and the step's number.
      batch: a batch.
      frozen: of the target's parameters and the head's frozen ones.
      mesh: over which all of them are spread; None: they are on one device.
      device: a GPU that the step is only compiled for; None: the devices here.
    """

    update: Any
    state: dict
    batch: HeadBatch
    frozen: tuple[Params, Params]
    mesh: Mesh | None
    device: Any

    def lower(self) -> Lowered:
        """The step, traced to an XLA program and not compiled."""
        # as a list of arrays: the classes of a batch check the axes of their fields
        leaves, structure = jax.tree.flatten(self.batch)
        rows = self._at_rows()
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for x in leaves]
        platforms = None if self.device is None else ("cuda",)
        with contextlib.ExitStack() as stack:
            if self.mesh is not None:
                stack.enter_context(jax.set_mesh(self.mesh))
            if self.device is not None:
                stack.enter_context(jax.default_device(self.device))
            traced = self.update.trace(self.state, shapes, self.frozen, structure)
            return traced.lower(lowering_platforms=platforms)

    def bytes_on_a_device(self) -> int:
        """Of the state and of frozen parameters."""
        arrays = jax.tree.leaves((self.state, self.frozen))
        shares = (x.shape if self.mesh is None else x.sharding.shard_shape(x.shape) for x in arrays)
        return sum(
            int(np.prod(share)) * x.dtype.itemsize for share, x in zip(shares, arrays, strict=True)
        )

    def _at_rows(self) -> Sharding | None:
        if self.mesh is not None:
            return row_sharding(self.mesh)
        return None if self.device is None else SingleDeviceSharding(self.device)


def abstract_step(run: HeadRun, config: Path, device: Any = None) -> AbstractStep:
    """One step of a run, as `train_head` computes it.

    That is the target's forward over a batch of packed rows, each full with one document; the
    elements of COD sampling; losses and gradients, part by part of the batch; and the optimizer.

    Args:
      run: of a head, without stored hidden states. There must be as many devices as its mesh has;
        they may be simulated.
      config: the target's config.json.
      device: a GPU that is only compiled for, which this machine need not have, for a run without a
        mesh.

    Raises:
      InputError: the head does not fit the target, or names no mask token: no tokenizer is read.
    """
    sizes = run.mesh.data, run.mesh.fsdp, run.mesh.model
    mesh = sharding.mesh_of_sizes(*sizes) if np.prod(sizes) > 1 else None
    target = abstract_target(
        config,
        dtype=jnp.dtype(run.target_dtype),
        aux_hidden_state_layers=run.aux_hidden_state_layers,
    )
    head = abstract_head(head_config(run, target, None))
    trained, frozen = (_placed(params, head, mesh, device) for params in split_params(run, head))
    optimizer = make_optimizer(run.optimizer)
    state = {
        "params": trained,
        "opt": jax.eval_shape(optimizer.init, trained),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    if mesh is not None:
        state = jax.tree.map(_at, state, state_shardings(state, mesh))
    elif device is not None:
        state = jax.tree.map(lambda x: _at(x, SingleDeviceSharding(device)), state)
    frozen_params = _placed(target.params, target, mesh, device), frozen
    objective = head_objective(run, target, head)
    update = jitted_update(run, objective, optimizer, state, frozen_params, mesh)
    return AbstractStep(update, state, full_batch(run), frozen_params, mesh, device)


def full_batch(run: HeadRun) -> HeadBatch:
    """A batch whose rows are one document each, all of it trained."""
    size = run.data.batch_size, run.data.seq_len
    batch = Batch(np.ones(size, np.int32), np.zeros(size, np.int32), np.ones(size, bool))
    segment_ids, loss_mask = shifted(batch)
    num_depths = run.num_depths_at(run.optimizer.steps)
    cod = None
    if isinstance(run, PeagleRun):
        config = dataclasses.replace(run.cod, num_depths=num_depths)
        cod = cod_sample(loss_mask, segment_ids, config, [0, 0])
    noise_ids = np.zeros((size[0], 2), np.int32)
    return HeadBatch(batch, None, segment_ids, loss_mask, cod, noise_ids, num_depths)


def _placed(params: Params, model: Model, mesh: Mesh | None, device: Any) -> Params:
    """The shapes of parameters, with where they lie."""
    if mesh is not None:
        place = sharding.placement(model.config, mesh)
        placed = {path: _at(x, place(path, x)) for path, x in flatten_params(params)}
        return unflatten_params(placed)
    if device is None:
        return params
    return jax.tree.map(lambda x: _at(x, SingleDeviceSharding(device)), params)


def _at(x: Any, where: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
