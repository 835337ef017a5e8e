"""Attention in training: what each row of a packed sequence attends to.

Element (a, d), of anchor a and depth d, attends to every depth-0 element of its document at
positions up to a, and to its own chain (a, 1) .. (a, d), or to what another design of attention
says (`placeholder_attention.ATTENTION_DESIGNS`). That is exactly what it attends to when decoding.
No mask of packed by packed rows exists, and the cost is packed * context instead of packed**2.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import packed_attention
from peagle_jax.kernels.packed_attention import AttentionIntervals
from peagle_jax.types import AttentionRule


def causal(
    segment_ids: Int[Array, "B n"], window: int | None, ahead: int = 0
) -> AttentionIntervals:
    """Causal attention within documents: each row attends to its document's rows up to itself.

    Args:
      segment_ids: documents, each in one piece; rows of -1 attend to nothing, and nothing to them.
      window: the query at position p attends to p - window + 1 .. p; None: to all before it.
      ahead: how far a row's position is ahead of its place in the sequence (EAGLE-3's later steps).
    """
    here = jnp.broadcast_to(jnp.arange(segment_ids.shape[1])[None], segment_ids.shape)
    first = segment_starts(segment_ids)
    if window is not None:
        first = jnp.maximum(first, here + ahead - window + 1)
    last = jnp.where(segment_ids >= 0, here, -1)
    return AttentionIntervals(first, last, jnp.zeros_like(here), segment_ids.shape[1], 0)


def segment_starts(segment_ids: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """The first row of each row's document."""
    here = jnp.broadcast_to(jnp.arange(segment_ids.shape[1])[None], segment_ids.shape)
    is_start = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], [(0, 0), (1, 0)])
    return jax.lax.cummax(jnp.where(is_start, here, 0), axis=1)


def with_sinks(
    y: Float[Array, "B P N H"], lse: Float[Array, "B P N"], sinks: Float[Array, " N"] | None
) -> Float[Array, "B P N H"]:
    """Attention output `y` as if one more logit per head, a sink, had been in the softmax.

    Args:
      y: attention output without sinks.
      lse: log-sum-exp of its scores.
      sinks: the logits; None: there are none.
    """
    if sinks is None:
        return y
    share = jnp.exp(lse - jnp.logaddexp(lse, sinks.astype(lse.dtype)[None, None]))
    return y * share[..., None].astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class PackedCausal:
    """Causal attention within documents over whole rows, as the target has it."""

    segment_ids: Int[Array, "B T"]

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T G H"] | None,
        v: Float[Array, "B T G H"] | None,
        state: dict | None,
        rule: AttentionRule,
    ) -> tuple[Float[Array, "B T N H"], dict]:
        """`state` has the keys and values of the layers before, for layers that share them."""
        keys_and_values = {} if state is None else state
        if k is None or v is None:
            k, v = cast(tuple[Array, Array], keys_and_values[layer])
        intervals = causal(self.segment_ids, rule.window)
        y, lse = packed_attention.attend(q, k, v, intervals, rule.scale, form="auto")
        return with_sinks(y, lse, rule.sinks), {**keys_and_values, layer: (k, v)}


@dataclasses.dataclass(frozen=True)
class PrefixChain:
    """Attention over [n depth-0 rows, M packed rows of depth 1 and more] of a draft head.

    The packed rows are ordered by (anchor, depth), so the chain of packed row m is the rows
    m - depth + 1 .. m; with bidirectional placeholders also those of its anchor that follow. Rows
    of depth 0 among them are padding: they attend to nothing, and nothing to them. There are no
    sinks, and every layer has keys of its own.
    """

    anchor: Int[Array, "B M"]
    depth: Int[Array, "B M"]
    segment_ids: Int[Array, "B n"]  # of the depth-0 rows
    num_depths: int  # K
    design: str = "causal"  # a name in `placeholder_attention.ATTENTION_DESIGNS`

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B P N H"],
        k: Float[Array, "B P G H"] | None,
        v: Float[Array, "B P G H"] | None,
        state: Any,
        rule: AttentionRule,
    ) -> tuple[Float[Array, "B P N H"], Any]:
        if k is None or v is None:
            raise ValueError("every layer of a draft head has keys of its own")
        intervals = self.intervals(rule.window)
        y, _ = packed_attention.attend(q, k, v, intervals, rule.scale, form="auto")
        return y, state

    def intervals(self, window: int | None) -> AttentionIntervals:
        """What each of the n + M rows attends to."""

        def at_anchor(rows: Int[Array, "B n"]) -> Int[Array, "B M"]:
            return jnp.take_along_axis(rows, self.anchor, axis=1)

        first, chain_len = at_anchor(segment_starts(self.segment_ids)), self.depth
        if self.design == "committed":
            chain_len = jnp.minimum(chain_len, 1)
        if window is not None:
            first = jnp.maximum(first, self.anchor + self.depth - window + 1)
            chain_len = jnp.minimum(chain_len, window)
        is_real = (self.depth > 0) & (at_anchor(self.segment_ids) >= 0)
        last = jnp.where(is_real, self.anchor, -1)
        depth0 = causal(self.segment_ids, window)
        none = jnp.zeros_like(depth0.first)
        ahead = None
        if self.design == "bidirectional":
            ahead = jnp.concatenate([none, self._rows_ahead()], axis=1)
        return AttentionIntervals(
            jnp.concatenate([depth0.first, first], axis=1),
            jnp.concatenate([depth0.last, last], axis=1),
            jnp.concatenate([none, chain_len], axis=1),
            depth0.depth0,
            self.num_depths - 1,
            ahead,
        )

    def _rows_ahead(self) -> Int[Array, "B M"]:
        """How many rows of its own chain stand behind each packed row."""
        num_rows = self.anchor.shape[1]
        ahead = jnp.zeros_like(self.depth)
        for distance in range(1, min(self.num_depths - 1, num_rows)):
            # no row of another chain is as much deeper as it is further behind
            depth = jnp.pad(self.depth[:, distance:], [(0, 0), (0, distance)])
            ahead += (depth == self.depth + distance) & (self.depth > 0)
        return ahead


@dataclasses.dataclass(frozen=True)
class Partition(PrefixChain):
    """Attention of packed rows alone, as `PrefixChain` has it: of one partition of a sequence.

    The depth-0 rows have been computed before, and the state maps each layer to their keys and
    values, as `PackedCausal` leaves it.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B M N H"],
        k: Float[Array, "B M G H"] | None,
        v: Float[Array, "B M G H"] | None,
        state: dict,
        rule: AttentionRule,
    ) -> tuple[Float[Array, "B M N H"], dict]:
        if k is None or v is None:
            raise ValueError("every layer of a draft head has keys of its own")
        keys, values = state[layer]
        y = packed_attention.attend_packed(
            q,
            jnp.concatenate([keys, k], axis=1),
            jnp.concatenate([values, v], axis=1),
            self.intervals(rule.window),
            rule.scale,
        )
        return y, state
