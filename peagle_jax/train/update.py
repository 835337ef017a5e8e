"""One step of training: the gradients of a batch, at once or in parts, and the optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from peagle_jax.train.config import OptimizerConfig
from peagle_jax.train.divergence import gradient_norms
from peagle_jax.train.mesh import without_fsdp
from peagle_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Objective:
    """What training minimizes: a sum over a batch, divided by what the whole batch says.

    Parts of a batch can therefore be computed one after another, and their shares added up.

    Attributes:
      loss: (parameters, batch or a part of it, frozen parameters, denominators) -> the share of the
        loss, and sums that metrics are made of. Pure.
      denominators: batch -> what the sums of its parts are divided by.
      metrics: sums -> metrics of the step.
    """

    loss: Callable[[Params, Any, Any, Any], tuple[Array, Any]]
    denominators: Callable[[Any], Any]
    metrics: Callable[[Any], dict]


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW with gradient clipping, linear warm-up, and cosine decay to a tenth of the peak."""
    warmup = min(config.warmup, max(config.steps - 1, 0))
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0,
        peak_value=config.peak_lr,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.peak_lr / 10,
    )
    adamw = optax.adamw(
        schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=decay_mask
    )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


def decay_mask(params: Params) -> Params:
    """Which parameters have weight decay: matrices, except tables of placeholders.

    Such a table has a vector for each depth. With one depth it would be a vector, and vectors and
    norms have no weight decay.
    """

    def is_decayed(path: tuple, x: jax.Array) -> bool:
        return x.ndim > 1 and jax.tree_util.keystr(path[:1]) != "['placeholder']"

    return jax.tree.map_with_path(is_decayed, params)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shardings of the arrays of a step on a mesh.

    Attributes:
      params: of the trained parameters.
      frozen: of the frozen ones.
    """

    params: Any
    frozen: Any


def make_update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    num_parts: int = 1,
    layout: Layout | None = None,
) -> Callable[[dict, Any, Any], tuple[dict, dict]]:
    """(state, batch, frozen parameters) -> the state after one step, metrics.

    Args:
      num_parts: parts of a batch that are computed one after another (gradient accumulation). The
        activations in memory are those of one part; the gradients are those of the batch.
      layout: where arrays lie on a mesh; None for one device.
    """
    constrain = jax.lax.with_sharding_constraint

    def update(state: dict, batch: Any, frozen_params: Any) -> tuple[dict, dict]:
        loss_and_grads = jax.value_and_grad(objective.loss, has_aux=True)
        denominators = objective.denominators(batch)
        params = state["params"]

        together, frozen = params, frozen_params
        if layout is not None:
            together = constrain(params, without_fsdp(layout.params))
            frozen = constrain(frozen_params, without_fsdp(layout.frozen))

        def of_part(part: Any) -> tuple:
            value, grads = loss_and_grads(together, part, frozen, denominators)
            # every device keeps the gradients of its own share
            return value, grads if layout is None else constrain(grads, layout.params)

        if num_parts == 1:
            (value, sums), grads = of_part(batch)
        else:
            # as a list of arrays: the classes of a batch check the axes of their fields
            leaves, structure = jax.tree.flatten(batch)

            def of_leaves(part: list[Array]) -> tuple:
                return of_part(jax.tree.unflatten(structure, part))

            parts = [_split_rows(x, num_parts) for x in leaves]
            shapes = jax.eval_shape(of_leaves, [x[0] for x in parts])
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def add_part(total: Any, part: list[Array]) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, of_leaves(part)), None

            ((value, sums), grads), _ = jax.lax.scan(add_part, zeros, parts)
        updates, opt_state = optimizer.update(grads, state["opt"], params)
        new_state = {
            "params": optax.apply_updates(params, updates),
            "opt": opt_state,
            "step": state["step"] + 1,
        }
        norms = {"grad_norm": optax.tree.norm(grads), "grad_norms": gradient_norms(grads)}
        return new_state, {"loss": value, **norms, **objective.metrics(sums)}

    return update


def _split_rows(x: Array, num_parts: int) -> Array:
    """The rows of an array as `num_parts` parts, along a new first axis.

    Part p has the rows p, p + num_parts, and so on: where the rows are spread over devices in
    order, every device has its share of every part.
    """
    x = jnp.asarray(x)
    return x.reshape(-1, num_parts, *x.shape[1:]).swapaxes(0, 1)
