"""EAGLE-3's loss on one batch: test-time training (arXiv:2503.01840, section 3.2).

The head is unrolled as it will draft: at step j every row reads the true token j places on, and its own hidden state of
step j-1 in the place of the feature. A row of step j sees the step-0 rows up to itself, and itself at steps 1 .. j.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.draft.head import DraftHead
from peagle_jax.kernels import packed_attention
from peagle_jax.train.attention import causal
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.loss import distill
from peagle_jax.train.peagle_loss import teacher_columns
from peagle_jax.types import AttentionRule


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Causal attention over step 0, plus the diagonals of later steps. State: the (k, v) of each layer and step."""

    segment_ids: Int[Array, "B n"]
    step: int

    def __call__(self, layer: int, q, k, v, state: dict, rule: AttentionRule):
        state = {**state, (layer, self.step): (k, v)}
        y, lse = packed_attention.attend(
            q,
            *state[layer, 0],
            causal(self.segment_ids, rule.window, ahead=self.step),
            rule.scale,
            form="auto",
        )
        own = []
        for step in range(1, self.step + 1):
            here = jnp.full(q.shape[:2], rule.window is None or self.step - step < rule.window)
            own.append((*state[layer, step], here))
        return packed_attention.merge(q, y, lse, own, rule.scale)[0], state


def eagle3_loss(
    head: DraftHead,
    rows: TrainingRows,
    steps: int,
    decay: float,
    lm_head_weight: Float[Array, "E V"],
    logit_cap: float | None = None,
    loss: str = "forward_kl",
):
    """Sum over steps of decay**j times the mean loss of step j, each over its own supervised rows, as speculators does.

    Returns:
      loss, {"correct", "total"} by step.
    """
    B, n = rows.tokens.shape
    here = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
    fused, state, summed, correct, total = head.fuse(rows.aux_hidden_states), {}, 0.0, [], []
    columns = teacher_columns(head, lm_head_weight)

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    for step in range(steps):
        tokens = jnp.pad(rows.tokens[:, step:], [(0, 0), (0, step)])
        hidden, state = head(
            head.embed(tokens), fused, here + step, Unrolled(rows.segment_ids, step), state
        )
        fused = head.feedback(hidden)
        # row i of this step learns position i + step, if that still lies in row i's document
        ahead = lambda x, fill: jnp.pad(x[:, step:], [(0, 0), (0, step)], constant_values=fill)  # noqa: B023, E731
        learns = ahead(rows.loss_mask, False) & (ahead(rows.segment_ids, -2) == rows.segment_ids)
        weight = learns.astype(jnp.float32)
        where = jnp.minimum(here + step, n - 1) + n * jnp.arange(B)[:, None]
        part, by_depth = distill(
            head.norm,
            head.lm_head.kernel[...],
            flat(hidden),
            columns,
            flat(rows.teacher_hidden),
            flat(where),
            flat(weight),
            jnp.zeros(B * n, jnp.int32),
            1,
            logit_cap,
            loss,
        )
        summed += decay**step * part / jnp.maximum(weight.sum(), 1)
        correct, total = [*correct, by_depth["correct"]], [*total, by_depth["total"]]
    return summed, {"correct": jnp.concatenate(correct), "total": jnp.concatenate(total)}
