"""P-EAGLE's loss on one batch: NTP rows and COD-sampled placeholder rows, packed, in one forward of the head."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.draft import placeholders
from peagle_jax.draft.head import DraftHead
from peagle_jax.draft.placeholders import Slot
from peagle_jax.train.attention import PrefixChain
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.loss import distill
from peagle_jax.types import CodSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureNoise:
    """Regularisation: a head that never sees a wrong feature in training may lean on it too much.

    `feature_noise` bounds uniform noise of either sign on every tap, in the tap's own units, as speculators' `noise_std` does;
    `feature_dropout` is the share of real rows whose feature becomes that of a placeholder of depth 1 behind the row before.
    """

    noise: float
    dropout: float

    def __post_init__(self):
        if self.noise < 0 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"blur needs feature_noise >= 0 and 0 <= feature_dropout < 1; got {self}"
            )


def teacher_columns(head: DraftHead, lm_head_weight: Float[Array, "E V"]) -> Float[Array, "E W"]:
    """The target's output matrix restricted to the draft vocabulary."""
    return lm_head_weight if head.d2t is None else lm_head_weight[:, head.target_ids()]


def peagle_loss(
    head: DraftHead,
    rows: TrainingRows,
    cod: CodSample,
    num_depths: int,
    lm_head_weight: Float[Array, "E V"],
    logit_cap: float | None = None,
    loss: str = "forward_kl",
    feature_noise: FeatureNoise | None = None,
    key: Array | None = None,
):
    """Mean loss over supervised elements of all depths, with one denominator for the batch.

    Args:
      rows: shifted rows; all n of them are depth 0.
      cod: the depth >= 1 elements.
      depths: K.
      output_weight: of the target, over its whole vocabulary.
      logit_cap: of the target's logits (Gemma).
      loss: of `loss.LOSSES`.
      blur: what happens to real features while training; None or zeros: nothing.
      key: for `blur`'s draws.

    Returns:
      loss, {"correct", "total"} by depth [K].
    """
    B, n = rows.tokens.shape
    here = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
    embeddings, fused = head.embed(rows.tokens), _real_features(head, rows, feature_noise, key)
    if num_depths > 1:

        def take(x):
            return jnp.take_along_axis(x, cod.anchor[..., None], axis=1)

        masks = placeholders.rows(
            head, Slot(jnp.maximum(cod.depth, 1), take(embeddings), take(fused))
        )
        embeddings, fused = (
            jnp.concatenate([x, mask], axis=1)
            for x, mask in zip((embeddings, fused), masks, strict=True)
        )
        depth = jnp.concatenate([jnp.zeros((B, n), jnp.int32), cod.depth], axis=1)
        positions = jnp.concatenate([here, cod.anchor + cod.depth], axis=1)
        learns = jnp.take_along_axis(rows.loss_mask, positions, axis=1)
        learns &= jnp.concatenate([jnp.ones((B, n), bool), cod.real], axis=1)
        attend = PrefixChain(cod.anchor, cod.depth, rows.segment_ids, num_depths)
    else:
        depth, positions, learns = jnp.zeros((B, n), jnp.int32), here, rows.loss_mask
        attend = PrefixChain(here[:, :0], here[:, :0], rows.segment_ids, 1)
    hidden, _ = head(embeddings, fused, positions, attend, None)

    weight = learns.astype(jnp.float32)
    where = positions + n * jnp.arange(B)[:, None]

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    total, by_depth = distill(
        head.norm,
        head.lm_head.kernel[...],
        flat(hidden),
        teacher_columns(head, lm_head_weight),
        flat(rows.teacher_hidden),
        flat(where),
        flat(weight),
        flat(depth),
        num_depths,
        logit_cap,
        loss,
    )
    return total / jnp.maximum(jax.lax.stop_gradient(weight.sum()), 1), by_depth


def _real_features(
    head: DraftHead, rows: TrainingRows, feature_noise: FeatureNoise | None, key: Array | None
) -> Float[Array, "B n D"]:
    """Fused taps of the depth-0 rows, less sure than they are when decoding if `blur` says so."""
    if feature_noise is None or not (feature_noise.noise or feature_noise.dropout):
        return head.fuse(rows.aux_hidden_states)
    noise_key, drop_key = jax.random.split(key)
    aux_hidden_states = rows.aux_hidden_states
    if feature_noise.noise:
        aux_hidden_states += feature_noise.noise * jax.random.uniform(
            noise_key, aux_hidden_states.shape, aux_hidden_states.dtype, -1, 1
        )
    fused = head.fuse(aux_hidden_states)
    if feature_noise.dropout:
        segment_ids = jnp.pad(
            rows.segment_ids, [(0, 0), (1, 0)], constant_values=-2
        )  # a document's first row has itself before it
        starts = (segment_ids[:, 1:] != segment_ids[:, :-1])[..., None]

        def before(x):
            return jnp.where(starts, x, jnp.concatenate([x[:, :1], x[:, :-1]], axis=1))

        slots = Slot(
            jnp.ones(rows.tokens.shape, jnp.int32), before(head.embed(rows.tokens)), before(fused)
        )
        dropped = jax.random.bernoulli(drop_key, feature_noise.dropout, rows.tokens.shape)
        fused = jnp.where(dropped[..., None], placeholders.rows(head, slots)[1], fused)
    return fused
