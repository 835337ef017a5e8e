"""EAGLE-3's loss on one batch: test-time training (arXiv:2503.01840, section 3.2).

The head is unrolled the way it will draft. At step j every row reads the true token j places on,
and in the place of the fused hidden state its own one of step j-1. A row of step j attends to the
rows of step 0 up to itself, and to itself at steps 1 .. j.
"""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.draft.head import DraftHead
from peagle_jax.kernels import packed_attention
from peagle_jax.train.attention import causal
from peagle_jax.train.compute_dtype import in_compute_dtype, rows_in_compute_dtype
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.loss import DepthCounts, distill
from peagle_jax.train.recipe_sections import ComputeConfig
from peagle_jax.train.teacher import teacher_columns
from peagle_jax.types import AttentionRule


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Attention of one unrolled step: causal over step 0, plus each row's own later steps.

    The state maps (layer, step) to the keys and values computed there.
    """

    segment_ids: Int[Array, "B n"]
    step: int

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B n N H"],
        k: Float[Array, "B n G H"] | None,
        v: Float[Array, "B n G H"] | None,
        state: dict,
        rule: AttentionRule,
    ) -> tuple[Float[Array, "B n N H"], dict]:
        state = {**state, (layer, self.step): (k, v)}
        intervals = causal(self.segment_ids, rule.window, ahead=self.step)
        k0, v0 = state[layer, 0]
        y, lse = packed_attention.attend(q, k0, v0, intervals, rule.scale, form="auto")
        later_steps = []
        for step in range(1, self.step + 1):
            in_window = rule.window is None or self.step - step < rule.window
            later_steps.append((*state[layer, step], jnp.full(q.shape[:2], in_window)))
        return packed_attention.merge(q, y, lse, later_steps, rule.scale)[0], state


def eagle3_loss(
    head: DraftHead,
    rows: TrainingRows,
    steps: int,
    decay: float,
    lm_head_weight: Float[Array, "E V"],
    logit_cap: float | None = None,
    loss: str = "forward_kl",
    denominators: Float[Array, " steps"] | None = None,
    compute: ComputeConfig | None = None,
) -> tuple[Float[Array, ""], DepthCounts]:
    """Sum over steps of decay**j times the mean loss of step j, as speculators computes it.

    Each step's mean is over its own positions in the loss.

    Args:
      head: the draft head.
      rows: shifted rows.
      steps: how often the head is unrolled.
      decay: weight of a step relative to the step before.
      lm_head_weight: the target's output matrix over its whole vocabulary.
      logit_cap: soft cap of the target's logits (Gemma).
      loss: a name of `loss.LOSSES`.
      denominators: what the sum of each step is divided by, where these rows are a part of a
        batch: the numbers of its positions in the loss; None: theirs.
      compute: how; None: in the head's dtype, and nothing twice.

    Returns:
      The loss, and {"correct", "total"} by step: how often the head's argmax is the target's, and
      of how many elements.
    """
    B, n = rows.tokens.shape
    recompute = compute is not None and compute.recompute == "layers"
    head, rows = in_compute_dtype(head, compute), rows_in_compute_dtype(rows, compute)
    here = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
    summed, correct, total = jnp.zeros(()), [], []
    columns = teacher_columns(head, lm_head_weight)
    for step, hidden in enumerate(unrolled_hidden(head, rows, steps, recompute)):
        weight = positions_in_loss(rows.loss_mask, rows.segment_ids, step).astype(jnp.float32)
        teacher_row = jnp.minimum(here + step, n - 1) + n * jnp.arange(B)[:, None]
        step_loss, counts = distill(
            head.final_norm,
            head.lm_head.kernel[...],
            hidden.reshape(B * n, -1),
            columns,
            rows.teacher_hidden.reshape(B * n, -1),
            teacher_row.reshape(-1),
            weight.reshape(-1),
            jnp.zeros(B * n, jnp.int32),
            1,
            logit_cap,
            loss,
            batch_size=B,
        )
        count = jnp.maximum(weight.sum(), 1) if denominators is None else denominators[step]
        summed += decay**step * step_loss / count
        correct.append(counts["correct"])
        total.append(counts["total"])
    return summed, {"correct": jnp.concatenate(correct), "total": jnp.concatenate(total)}


def unrolled_hidden(
    head: DraftHead, rows: TrainingRows, steps: int, recompute: bool = False
) -> Iterator[Float[Array, "B n D"]]:
    """The head's residual stream of all rows, step by step, as it drafts the rows' own tokens.

    Args:
      head: the draft head.
      rows: shifted rows.
      steps: how often the head is unrolled.
      recompute: as `DraftHead` takes it.
    """
    B, n = rows.tokens.shape
    here = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
    fused, state = head.fuse(rows.aux_hidden_states), {}
    for step in range(steps):
        embeddings = head.embed(_ahead(rows.tokens, step, 0))
        attend = Unrolled(rows.segment_ids, step)
        hidden, state = head(embeddings, fused, here + step, attend, state, recompute=recompute)
        fused = head.feedback(hidden)
        yield hidden


def positions_in_loss(
    loss_mask: Bool[Array, "B n"], segment_ids: Int[Array, "B n"], step: int
) -> Bool[Array, "B n"]:
    """Which rows have a loss at an unrolled step.

    Row i learns position i + step then, if that is still in row i's document.
    """
    in_loss = _ahead(loss_mask, step, False)
    return in_loss & (_ahead(segment_ids, step, -2) == segment_ids)


def _ahead(x: Array, step: int, fill: int | bool) -> Array:
    """x[:, i + step] in the place of x[:, i]; `fill` behind the row's end."""
    return jnp.pad(x[:, step:], [(0, 0), (0, step)], constant_values=fill)
