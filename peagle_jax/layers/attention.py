"""Attention layers, and the cached attention that decoding passes to them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.kernels import attention, cache_write
from peagle_jax.layers.basic import Linear, RMSNorm
from peagle_jax.layers.rope import Rope
from peagle_jax.types import Attend, AttentionRule, KVCache, KVGroup


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """Writes this call's keys and values at `positions`, then attends over the whole cache.

    The positions of a row follow each other, and lie inside the cache where this is no ring.

    Rows may be followed by padding at later positions. No real token looks past its own position,
    and the next call overwrites what padding wrote. In a ring cache, though, padding would
    overwrite what is still needed: there `real` must say which tokens are real.
    """

    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"] | None = None  # None: all of them

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T G H"] | None,
        v: Float[Array, "B T G H"] | None,
        state: KVCache,
        rule: AttentionRule,
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """The attention of one layer, and the cache with its new keys and values.

        A layer without `k` and `v` reads what an earlier layer, which `layer` names, has written.
        """
        g, i = state.find(layer)
        group = state.groups[g]
        if k is not None and v is not None:
            group = self._write(group, i, k, v)
            groups = (*state.groups[:g], group, *state.groups[g + 1 :])
            state = dataclasses.replace(state, groups=groups)
        scales = {}
        if group.k_scale:
            scales = {"k_scale": group.k_scale[i], "v_scale": group.v_scale[i]}
        y = attention.attend(
            q,
            group.k[i],
            group.v[i],
            self.positions,
            self._slot_positions(group, state.length),
            window=rule.window,
            scale=rule.scale,
            sinks=rule.sinks,
            form="auto",
            **scales,
        )
        return y, state

    def _write(self, group: KVGroup, i: int, k, v) -> KVGroup:
        """The group with new keys and values of its i-th layer."""
        size = group.k[i].shape[2]
        slots = self.positions % size if group.ring else self.positions
        if group.ring and self.real is not None:
            slots = jnp.where(self.real, slots, size)  # there is no such slot
        names = ("k", "v", "k_scale", "v_scale") if group.k_scale else ("k", "v")
        old = tuple(getattr(group, name)[i] for name in names)
        changes = {}
        written = cache_write.write(k, v, slots, old, are_consecutive=not group.ring)
        for name, array in zip(names, written, strict=True):
            layers = getattr(group, name)
            changes[name] = (*layers[:i], array, *layers[i + 1 :])
        return dataclasses.replace(group, **changes)

    def _slot_positions(self, group: KVGroup, length: Int[Array, " B"]) -> Int[Array, "B S"] | None:
        """The position whose key and value lie in each slot; None: slot s holds position s.

        In a ring, position p lies in slot p mod S. A slot holds the latest of its positions that
        was written; below 0, none was.
        """
        if not group.ring:
            return None
        slots = jnp.arange(group.k[0].shape[2])[None]
        written = self.positions if self.real is None else jnp.where(self.real, self.positions, -1)
        latest = jnp.maximum(written.max(axis=1), length - 1)[:, None]
        return latest - (latest - slots) % slots.shape[1]


class Attention(nnx.Module):
    """Grouped-query attention.

    With `qk_norm` each head's q and k are normalized before the rotation (Qwen3). With `sinks` each
    head has one more logit, whose share of the softmax goes nowhere (GPT-OSS).
    """

    def __init__(
        self,
        inputs: int,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope,
        *,
        bias: bool,
        qk_norm: bool,
        eps: float,
        window: int | None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        sinks: bool = False,
    ):
        self.q = Linear(inputs, heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.k = Linear(inputs, kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.v = Linear(inputs, kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.o = Linear(heads * head_dim, dim, bias=bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(head_dim, eps, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, dtype=dtype) if qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(heads, dtype)) if sinks else None
        self.head_dim, self.rope, self.window = head_dim, rope, window

    def __call__(
        self,
        x: Float[Array, "B T I"],
        positions: Int[Array, "B T"],
        layer: int,
        attend: Attend,
        state: Any,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The layer's output, and the state that `attend` returns."""
        q, k, v = (p(x).reshape(*x.shape[:2], -1, self.head_dim) for p in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        sinks = None if self.sinks is None else self.sinks[...]
        rule = AttentionRule(self.window, self.head_dim**-0.5, sinks)
        y, state = attend(layer, self.rope(q, positions), self.rope(k, positions), v, state, rule)
        return self.o(y.reshape(*x.shape[:2], -1)), state
