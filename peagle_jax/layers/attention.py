"""Attention layers, and the cached attention that decoding passes to them."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.kernels import attention, cache_write
from peagle_jax.layers.basic import Linear, RMSNorm
from peagle_jax.layers.rope import Rope
from peagle_jax.types import Attend, AttentionRule, KVCache, KVGroup


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """Writes this call's keys and values at `positions`, then attends over the whole cache.

    Rows may be followed by padding at later positions: nothing real looks past its own position, and the next call
    overwrites what padding wrote. In a ring padding would overwrite what is still needed; there `real` must say which
    tokens are. Writes outside the cache are dropped.
    """

    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"] | None = None  # None: all of them

    def __call__(self, layer: int, q, k, v, state: KVCache, rule: AttentionRule):
        g, i = state.find(layer)
        group = state.groups[g]
        if k is not None:
            group = self._write(group, i, k, v)
            state = dataclasses.replace(
                state, groups=(*state.groups[:g], group, *state.groups[g + 1 :])
            )
        held = self._held(group, state.length)
        y = attention.attend(
            q,
            group.k[i],
            group.v[i],
            self.positions,
            held,
            window=rule.window,
            scale=rule.scale,
            sinks=rule.sinks,
            form="auto",
            **({"k_scale": group.k_scale[i], "v_scale": group.v_scale[i]} if group.k_scale else {}),
        )
        return y, state

    def _write(self, group: KVGroup, i: int, k, v) -> KVGroup:
        slots = group.k[i].shape[2]
        slot = self.positions % slots if group.ring else self.positions
        if group.ring and self.real is not None:
            slot = jnp.where(self.real, slot, slots)
        names = ("k", "v", "k_scale", "v_scale") if group.k_scale else ("k", "v")
        held = cache_write.write(k, v, slot, tuple(getattr(group, name)[i] for name in names))

        def swap(all_, new):
            return (*all_[:i], new, *all_[i + 1 :])

        return dataclasses.replace(
            group,
            **{name: swap(getattr(group, name), x) for name, x in zip(names, held, strict=True)},
        )

    def _held(self, group: KVGroup, length: Int[Array, " B"]) -> Int[Array, "B S"] | None:
        """The position that lies in each slot of a ring: the latest one written that belongs there. None: every slot holds its own."""
        if not group.ring:
            return None
        slots = jnp.arange(group.k[0].shape[2])[None]
        written = self.positions if self.real is None else jnp.where(self.real, self.positions, -1)
        latest = jnp.maximum(written.max(axis=1), length - 1)[:, None]
        return latest - (latest - slots) % slots.shape[1]


class Attention(nnx.Module):
    """Grouped-query attention; with `qk_norm` each head's q and k are normalised before the rotation (Qwen3)."""

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
        dtype,
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
        state,
    ):
        q, k, v = (p(x).reshape(*x.shape[:2], -1, self.head_dim) for p in (self.q, self.k, self.v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rule = AttentionRule(
            self.window, self.head_dim**-0.5, None if self.sinks is None else self.sinks[...]
        )
        y, state = attend(layer, self.rope(q, positions), self.rope(k, positions), v, state, rule)
        return self.o(y.reshape(*x.shape[:2], -1)), state
