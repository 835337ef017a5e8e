"""One step of training: the gradients of a batch, at once or in parts, and the optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers

from peagle_jax.train.divergence import gradient_norms
from peagle_jax.train.mesh import without_fsdp
from peagle_jax.train.recipe_sections import OptimizerConfig
from peagle_jax.types import Params

BETAS = (0.9, 0.95)  # of AdamW's two moments
# The root mean square of Muon's steps before the learning rate, which is what AdamW's usually have
# (arXiv:2502.16982, 2.2).
ADAMW_RMS = 0.2


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
    """AdamW or Muon with gradient clipping, linear warm-up, and cosine decay to a tenth."""
    warmup = min(config.warmup, max(config.steps - 1, 0))
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0,
        peak_value=config.peak_lr,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.peak_lr / 10,
    )
    b1, b2 = BETAS
    decay = config.weight_decay
    steps = optax.adamw(schedule, b1=b1, b2=b2, weight_decay=decay, mask=decay_mask)
    if config.name == "muon":
        muon = optax.chain(
            # Optax's type of a function of parameters leaves out trees of other things
            optax.contrib.scale_by_muon(weight_dimension_numbers=cast(Any, _matrix_axes)),
            optax.stateless_with_tree_map(_with_size_of_adamw),
            optax.add_decayed_weights(decay, decay_mask),
            optax.scale_by_learning_rate(schedule),
        )
        steps = optax.partition({"muon": muon, "adamw": steps}, muon_or_adamw)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), steps)


def muon_or_adamw(params: Params) -> Params:
    """Which optimizer makes a parameter's steps where a recipe asks for Muon.

    Muon is for matrices between hidden states. Tables of vectors (the embedding, placeholders, a
    Markov head), a confidence head's vector and the output matrix are left to AdamW
    (https://kellerjordan.github.io/posts/muon/).
    """

    def label(path: tuple, x: jax.Array) -> str:
        name = jax.tree_util.keystr(path[:1])
        is_table = name in ("['embed']", "['lm_head']", "['placeholder']", "['markov']")
        is_table |= name == "['confidence']"
        return "muon" if x.ndim >= 2 and not is_table else "adamw"

    return jax.tree.map_with_path(label, params)


def _with_size_of_adamw(step: Any, _: Any) -> Array:
    """An orthogonal matrix [.. M N] has the mean square 1 / max(M, N)."""
    return ADAMW_RMS * max(step.shape[-2:]) ** 0.5 * step


def _matrix_axes(params: Params) -> Any:
    """The axes of matrices; experts have one more in front."""
    return jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), params)


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
