"""P-EAGLE's loss on one batch: NTP rows and COD-sampled placeholder rows, packed, in one forward of the head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.draft import placeholders
from peagle_jax.draft.head import DraftHead
from peagle_jax.train.attention import PrefixChain
from peagle_jax.train.features import Rows
from peagle_jax.train.loss import distill
from peagle_jax.types import CodSample


def teacher_columns(head: DraftHead, output_weight: Float[Array, "E V"]) -> Float[Array, "E W"]:
    """The target's output matrix restricted to the draft vocabulary."""
    return output_weight if head.d2t is None else output_weight[:, head.target_ids()]


def peagle_loss(
    head: DraftHead, rows: Rows, cod: CodSample, depths: int, output_weight: Float[Array, "E V"], logit_cap: float | None = None
):  # fmt: skip
    """Mean KL over supervised elements of all depths, with one denominator for the batch.

    Args:
      rows: shifted rows; all n of them are depth 0.
      cod: the depth >= 1 elements.
      depths: K.
      output_weight: of the target, over its whole vocabulary.
      logit_cap: of the target's logits (Gemma).

    Returns:
      loss in nats, {"correct", "total"} by depth [K].
    """
    B, n = rows.tokens.shape
    here = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
    tokens, features = rows.tokens, head.fuse(rows.taps)
    if depths > 1:
        mask_tokens, mask_features = placeholders.rows(head, jnp.arange(1, depths))
        slot = jnp.maximum(cod.depth - 1, 0)
        tokens = jnp.concatenate([tokens, mask_tokens[slot]], axis=1)
        features = jnp.concatenate([features, mask_features[slot]], axis=1)
        depth = jnp.concatenate([jnp.zeros((B, n), jnp.int32), cod.depth], axis=1)
        positions = jnp.concatenate([here, cod.anchor + cod.depth], axis=1)
        learns = jnp.take_along_axis(rows.supervised, positions, axis=1)
        learns &= jnp.concatenate([jnp.ones((B, n), bool), cod.real], axis=1)
        attend = PrefixChain(cod.anchor, cod.depth, rows.document, depths)
    else:
        depth, positions, learns = jnp.zeros((B, n), jnp.int32), here, rows.supervised
        attend = PrefixChain(here[:, :0], here[:, :0], rows.document, 1)
    hidden, _ = head(tokens, features, positions, attend, None)

    weight = learns.astype(jnp.float32)
    where = positions + n * jnp.arange(B)[:, None]
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    total, by_depth = distill(
        head.logits, flat(hidden), teacher_columns(head, output_weight), flat(rows.teacher), flat(where), flat(weight), flat(depth), depths,
        logit_cap,
    )  # fmt: skip
    return total / jnp.maximum(jax.lax.stop_gradient(weight.sum()), 1), by_depth
