"""P-EAGLE's loss on one batch: NTP rows and COD-sampled placeholder rows, packed, in one forward of the head."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.draft import placeholders
from peagle_jax.draft.head import DraftHead
from peagle_jax.draft.placeholders import Slot
from peagle_jax.train.attention import PrefixChain
from peagle_jax.train.features import Rows
from peagle_jax.train.loss import distill
from peagle_jax.types import CodSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blur:
    """Regularisation: a head that never sees a wrong feature in training may lean on it too much.

    `feature_noise` bounds uniform noise of either sign on every tap, in the tap's own units, as speculators' `noise_std` does;
    `feature_dropout` is the share of real rows whose feature becomes that of a placeholder of depth 1 behind the row before.
    """

    feature_noise: float
    feature_dropout: float

    def __post_init__(self):
        if self.feature_noise < 0 or not 0 <= self.feature_dropout < 1:
            raise ValueError(f"blur needs feature_noise >= 0 and 0 <= feature_dropout < 1; got {self}")


def teacher_columns(head: DraftHead, output_weight: Float[Array, "E V"]) -> Float[Array, "E W"]:
    """The target's output matrix restricted to the draft vocabulary."""
    return output_weight if head.d2t is None else output_weight[:, head.target_ids()]


def peagle_loss(
    head: DraftHead, rows: Rows, cod: CodSample, depths: int, output_weight: Float[Array, "E V"], logit_cap: float | None = None,
    loss: str = "forward_kl", blur: Blur | None = None, key: Array | None = None,
):  # fmt: skip
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
    embeddings, features = head.embed(rows.tokens), _real_features(head, rows, blur, key)
    if depths > 1:
        take = lambda x: jnp.take_along_axis(x, cod.anchor[..., None], axis=1)  # noqa: E731
        masks = placeholders.rows(head, Slot(jnp.maximum(cod.depth, 1), take(embeddings), take(features)))
        embeddings, features = (jnp.concatenate([x, mask], axis=1) for x, mask in zip((embeddings, features), masks, strict=True))
        depth = jnp.concatenate([jnp.zeros((B, n), jnp.int32), cod.depth], axis=1)
        positions = jnp.concatenate([here, cod.anchor + cod.depth], axis=1)
        learns = jnp.take_along_axis(rows.supervised, positions, axis=1)
        learns &= jnp.concatenate([jnp.ones((B, n), bool), cod.real], axis=1)
        attend = PrefixChain(cod.anchor, cod.depth, rows.document, depths)
    else:
        depth, positions, learns = jnp.zeros((B, n), jnp.int32), here, rows.supervised
        attend = PrefixChain(here[:, :0], here[:, :0], rows.document, 1)
    hidden, _ = head(embeddings, features, positions, attend, None)

    weight = learns.astype(jnp.float32)
    where = positions + n * jnp.arange(B)[:, None]
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    total, by_depth = distill(
        head.norm, head.lm_head.kernel[...], flat(hidden), teacher_columns(head, output_weight), flat(rows.teacher), flat(where),
        flat(weight), flat(depth), depths, logit_cap, loss,
    )  # fmt: skip
    return total / jnp.maximum(jax.lax.stop_gradient(weight.sum()), 1), by_depth


def _real_features(head: DraftHead, rows: Rows, blur: Blur | None, key: Array | None) -> Float[Array, "B n D"]:
    """Fused taps of the depth-0 rows, less sure than they are when decoding if `blur` says so."""
    if blur is None or not (blur.feature_noise or blur.feature_dropout):
        return head.fuse(rows.taps)
    noise_key, drop_key = jax.random.split(key)
    taps = rows.taps
    if blur.feature_noise:
        taps += blur.feature_noise * jax.random.uniform(noise_key, taps.shape, taps.dtype, -1, 1)
    features = head.fuse(taps)
    if blur.feature_dropout:
        document = jnp.pad(rows.document, [(0, 0), (1, 0)], constant_values=-2)  # a document's first row has itself before it
        starts = (document[:, 1:] != document[:, :-1])[..., None]
        before = lambda x: jnp.where(starts, x, jnp.concatenate([x[:, :1], x[:, :-1]], axis=1))  # noqa: E731
        slots = Slot(jnp.ones(rows.tokens.shape, jnp.int32), before(head.embed(rows.tokens)), before(features))
        dropped = jax.random.bernoulli(drop_key, blur.feature_dropout, rows.tokens.shape)
        features = jnp.where(dropped[..., None], placeholders.rows(head, slots)[1], features)
    return features
