"""EAGLE-1's loss on one batch (arXiv:2401.15077, section 3.2).

A row reads a token and the target's final hidden state of the token before, and learns the final
hidden state of its own token: by regression, and by the tokens that the target's output matrix
makes of the predicted and of the true one. All rows read true hidden states, in one forward.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from peagle_jax.draft.head import DraftHead
from peagle_jax.train.attention import PackedCausal
from peagle_jax.train.compute_dtype import in_compute_dtype, rows_in_compute_dtype
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.loss import DepthCounts, distill
from peagle_jax.train.recipe_sections import ComputeConfig
from peagle_jax.train.settings import check
from peagle_jax.train.teacher import teacher_columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionConfig:
    """What EAGLE-1 heads learn (arXiv:2401.15077): the target's next final hidden state."""

    weight: float = 1.0  # of the smooth L1 distance between predicted and true hidden state
    token_weight: float = 0.1  # of `loss`, between the tokens that the target makes of the two
    # Bound of uniform noise of either sign on the hidden states that the head reads.
    noise: float = 0.1

    def __post_init__(self) -> None:
        for key in ("weight", "token_weight", "noise"):
            value = getattr(self, key)
            check(value >= 0, key, "must be 0 or more", value, "use 0.1")
        positive = self.weight > 0 or self.token_weight > 0
        check(positive, "weight", "must be above 0 where token_weight is 0", self.weight, "use 1.0")


def eagle_loss(
    head: DraftHead,
    rows: TrainingRows,
    regression: RegressionConfig,
    lm_head_weight: Float[Array, "E V"],
    logit_cap: float | None = None,
    loss: str = "forward_kl",
    keys: Key[Array, " B"] | None = None,
    denominators: Float[Array, " steps"] | None = None,
    compute: ComputeConfig | None = None,
) -> tuple[Float[Array, ""], DepthCounts]:
    """Weighted sum of the regression and of the loss of tokens, each a mean over the loss mask.

    The paper's cross entropy against the target's distribution differs from "forward_kl" by the
    entropy of that distribution, which has no gradient.

    Args:
      head: the draft head.
      rows: shifted rows, whose aux hidden states are final hidden states.
      regression: weights of the two parts, and the noise on what the head reads.
      lm_head_weight: the target's output matrix.
      logit_cap: soft cap of the target's logits (Gemma).
      loss: a name of `loss.LOSSES`, for the tokens.
      keys: PRNG keys for the noise, one for each row; needed only if there is any.
      denominators: what the sums are divided by, where these rows are a part of a batch: the
        number of its positions in the loss; None: theirs.
      compute: how; None: in the head's dtype, and nothing twice.

    Returns:
      The loss, and {"correct", "total"} of the one step [1]: how often the head's argmax is the
      target's, and of how many elements.
    """
    B, n = rows.tokens.shape
    here = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
    recompute = compute is not None and compute.recompute == "layers"
    head, rows = in_compute_dtype(head, compute), rows_in_compute_dtype(rows, compute)
    features = rows.aux_hidden_states
    if regression.noise:
        if keys is None:
            raise ValueError("noise needs PRNG keys")
        shape, dtype = features.shape[1:], features.dtype
        uniform = jax.vmap(lambda key: jax.random.uniform(key, shape, dtype, -1, 1))(keys)
        features += regression.noise * uniform
    attend = PackedCausal(rows.segment_ids)
    embeddings, fused = head.embed(rows.tokens), head.fuse(features)
    hidden, _ = head(embeddings, fused, here, attend, None, recompute=recompute)

    weight = rows.loss_mask.astype(jnp.float32)
    truth = rows.teacher_hidden.astype(jnp.float32)
    distance = jnp.mean(smooth_l1(hidden.astype(jnp.float32) - truth), axis=-1)
    of_tokens, counts = distill(
        head.final_norm,
        head.lm_head.kernel[...],
        hidden.reshape(B * n, -1),
        teacher_columns(head, lm_head_weight),
        rows.teacher_hidden.reshape(B * n, -1),
        jnp.arange(B * n),
        weight.reshape(-1),
        jnp.zeros(B * n, jnp.int32),
        1,
        logit_cap,
        loss,
        batch_size=B,
    )
    count = jnp.maximum(weight.sum(), 1) if denominators is None else denominators[0]
    of_features = jnp.sum(weight * distance)
    summed = regression.weight * of_features + regression.token_weight * of_tokens
    return summed / count, counts


def smooth_l1(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x**2 / 2 up to 1 and |x| - 1/2 beyond: torch's SmoothL1Loss with beta = 1."""
    size = jnp.abs(x)
    return jnp.where(size < 1, 0.5 * x**2, size - 0.5)
