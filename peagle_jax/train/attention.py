"""Training attention: what every row sees of the depth-0 rows, and of its own chain.

Element (a, d) sees every depth-0 element of its document with anchor <= a, and its own chain (a, 1) .. (a, d): exactly
what the runtime shows it. No packed-by-packed mask exists, and the cost is packed * context, not packed^2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import packed_attention
from peagle_jax.kernels.packed_attention import AttentionIntervals
from peagle_jax.types import AttentionRule


def causal(
    segment_ids: Int[Array, "B n"], window: int | None, ahead: int = 0
) -> AttentionIntervals:
    """Of n rows, each what its document holds up to itself; documents are contiguous, -1 sees nothing and is seen by nothing.

    Args:
      window: the query at position p sees p - window + 1 .. p.
      ahead: how far a row's position lies behind its own place.
    """
    here = jnp.broadcast_to(jnp.arange(segment_ids.shape[1])[None], segment_ids.shape)
    first = starts(segment_ids)
    if window is not None:
        first = jnp.maximum(first, here + ahead - window + 1)
    return AttentionIntervals(
        first, jnp.where(segment_ids >= 0, here, -1), jnp.zeros_like(here), segment_ids.shape[1], 0
    )


def starts(segment_ids: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """The first row of each row's document."""
    here = jnp.broadcast_to(jnp.arange(segment_ids.shape[1])[None], segment_ids.shape)
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], [(0, 0), (1, 0)])
    return jax.lax.cummax(jnp.where(begins, here, 0), axis=1)


def with_sinks(
    y: Float[Array, "B P N H"], lse: Float[Array, "B P N"], sinks: Float[Array, " N"] | None
) -> Float[Array, "B P N H"]:
    """What the softmax gives when one more logit a head takes part in it."""
    if sinks is None:
        return y
    share = jnp.exp(lse - jnp.logaddexp(lse, sinks.astype(lse.dtype)[None, None]))
    return y * share[..., None].astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class PackedCausal:
    """Causal attention within documents, for whole rows: the target's, and depth 0 of a head's."""

    segment_ids: Int[Array, "B T"]

    def __call__(self, layer: int, q, k, v, state, rule: AttentionRule):
        """`state` holds the keys and values of every layer called so far, for those that share them."""
        held = {} if state is None else state
        k, v = held[layer] if k is None else (k, v)
        y, lse = packed_attention.attend(
            q, k, v, causal(self.segment_ids, rule.window), rule.scale, form="auto"
        )
        return with_sinks(y, lse, rule.sinks), {**held, layer: (k, v)}


@dataclasses.dataclass(frozen=True)
class PrefixChain:
    """Attention over [n depth-0 rows, M packed depth >= 1 rows], of a draft head: no sinks, every layer its own keys.

    The packed rows are ordered by (anchor, depth), so the chain of row m is the rows m-depth+1 .. m: a band. Those of depth 0 are
    padding, see nothing and are seen by nothing.
    """

    anchor: Int[Array, "B M"]
    depth: Int[Array, "B M"]
    segment_ids: Int[Array, "B n"]  # of the depth-0 rows
    num_depths: int  # K

    def __call__(self, layer: int, q, k, v, state, rule: AttentionRule):
        y, _ = packed_attention.attend(q, k, v, self.seen(rule.window), rule.scale, form="auto")
        return y, state

    def seen(self, window: int | None) -> AttentionIntervals:
        def of(rows):
            return jnp.take_along_axis(rows, self.anchor, axis=1)

        first, own = of(starts(self.segment_ids)), self.depth
        if window is not None:
            first, own = (
                jnp.maximum(first, self.anchor + self.depth - window + 1),
                jnp.minimum(own, window),
            )
        last = jnp.where((self.depth > 0) & (of(self.segment_ids) >= 0), self.anchor, -1)
        flat = causal(self.segment_ids, window)

        def join(a, b):
            return jnp.concatenate([a, b], axis=1)

        return AttentionIntervals(
            join(flat.first, first),
            join(flat.last, last),
            join(flat.own, own),
            flat.depth0,
            self.num_depths - 1,
        )
