"""Parameters and inputs in the dtype that a step computes with; those that are trained keep theirs.

The gradient of a rounded copy is that of the parameter, in the parameter's own dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from peagle_jax.draft.head import DraftHead
from peagle_jax.layers import activation_dtype
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.recipe_sections import ComputeConfig


def in_compute_dtype(head: DraftHead, compute: ComputeConfig | None) -> DraftHead:
    """The head with copies of its parameters in `compute.dtype`; None leaves them."""
    if compute is None:
        return head
    graph, state = nnx.split(head)
    return nnx.merge(graph, floats_as(state, compute.dtype))


def rows_in_compute_dtype(rows: TrainingRows, compute: ComputeConfig | None) -> TrainingRows:
    """The rows with the head's inputs in the dtype of its activations; the teacher's stay."""
    if compute is None:
        return rows
    dtype = activation_dtype(compute.dtype)
    return dataclasses.replace(rows, aux_hidden_states=rows.aux_hidden_states.astype(dtype))


def floats_as(tree: Any, dtype: DTypeLike) -> Any:
    """Arrays of floats in `dtype`; others, such as tables of ids, as they are."""

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)
