"""What a run does when its loss is no number any more: it stops, and says where to look."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.types import InputError, Params

NUM_GRADIENTS = 3  # that are named
NUM_ROWS = 16


def gradient_norms(grads: Params) -> dict[str, jax.Array]:
    """The norm of every parameter's gradient, by the parameter's path."""
    leaves = jax.tree.leaves_with_path(grads)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): jnp.linalg.norm(
            x.astype(jnp.float32).reshape(-1)
        )
        for path, x in leaves
    }


def check_finite(
    out: Path,
    step: int,
    metrics: Mapping[str, Any],
    last_saved: int | None,
    rows_at: Callable[[int], Sequence[int]] | None,
) -> None:
    """Checks the loss and the gradients of a step, which must be done.

    Args:
      out: the run's folder.
      step: of the metrics, from 1.
      metrics: with "loss", "grad_norm" and "grad_norms".
      last_saved: the step of the newest checkpoint; None if there is none.
      rows_at: step, from 0 -> the numbers of its rows; None if nobody knows.

    Raises:
      InputError: they are NaN or infinite.
    """
    loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
    if math.isfinite(loss) and math.isfinite(norm):
        return
    norms = {name: float(value) for name, value in metrics["grad_norms"].items()}
    # what is no number first
    largest = sorted(norms, key=lambda name: (math.isfinite(norms[name]), -norms[name]))
    named = ", ".join(f"{name} {norms[name]:.3g}" for name in largest[:NUM_GRADIENTS])
    rows = ""
    if rows_at is not None:
        numbers = rows_at(step - 1)
        rest = f" and {len(numbers) - NUM_ROWS} more" if len(numbers) > NUM_ROWS else ""
        rows = f", with the rows {', '.join(map(str, numbers[:NUM_ROWS]))}{rest} of the corpus"
    got = f"loss {loss:g}, gradient norm {norm:g} at step {step:,}{rows}; largest: {named}"
    kept = "no checkpoint was written" if last_saved is None else f"step {last_saved:,} is kept"
    next_step = f"lower optimizer.peak_lr, or look at these rows and the target ({kept})"
    raise InputError(out, "loss and gradients must be finite", got, next_step)
