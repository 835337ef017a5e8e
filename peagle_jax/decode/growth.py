"""How large the caches of a generation are: they begin small and grow with the text.

XLA computes attention over all slots of a cache, so that a step costs what the cache could hold.
Caches therefore have the fewest slots of a few sizes that hold what is written, and a generation
continues in the next larger size when they are full. A row of n tokens passes log2(n / 256)
sizes, and there is one compiled program for each size, whatever was reserved.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from peagle_jax.types import DecodeState, KVCache, KVGroup

# Slots of the smallest size. Every further size is twice as large.
FIRST_SLOTS = 256
# Where less than that is reserved, slots are a multiple of this.
SMALL_STEP = 16


def num_slots(needed: int, cache_size: int, k: int) -> int:
    """The slots of caches in which `needed` positions are written.

    Args:
      needed: positions that the next step writes, and all before them.
      cache_size: positions that the generation reserves: prompt + new tokens + K.
      k: draft tokens per step; 0 in plain decoding.
    """
    # A row whose last step went K tokens past its limit still takes part in the steps of others.
    most = max(needed, cache_size + k)
    step = FIRST_SLOTS if most > FIRST_SLOTS else SMALL_STEP
    most = -(-most // step) * step
    slots = FIRST_SLOTS
    while slots < needed:
        slots *= 2
    return min(slots, most)


def grow(state: DecodeState, slots: int) -> DecodeState:
    """The state with `slots` slots in its caches, except in rings, and in its output buffers.

    Array after array, and the old one is freed: never are there two caches.
    """
    k = state.num_accepted_per_pos.shape[1]
    draft = state.draft
    if draft.cache is not None:
        draft = dataclasses.replace(draft, cache=_grow_cache(draft.cache, slots + k))
    return dataclasses.replace(
        state,
        cache=_grow_cache(state.cache, slots),
        draft=draft,
        output=_grow_array(state.output, 1, slots),
        is_draft=_grow_array(state.is_draft, 1, slots),
    )


def _grow_cache(cache: KVCache, slots: int) -> KVCache:
    def grow_group(group: KVGroup) -> KVGroup:
        if group.ring:
            return group

        def grow_layers(layers: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(_grow_array(x, 2, slots) for x in layers)

        return dataclasses.replace(
            group,
            k=grow_layers(group.k),
            v=grow_layers(group.v),
            k_scale=grow_layers(group.k_scale),
            v_scale=grow_layers(group.v_scale),
        )

    return dataclasses.replace(cache, groups=tuple(map(grow_group, cache.groups)))


def _grow_array(x: Array, axis: int, size: int) -> Array:
    grown = _pad_end(x, axis, size)
    x.delete()
    return grown


@functools.partial(jax.jit, static_argnames=("axis", "size"))
def _pad_end(x: Array, axis: int, size: int) -> Array:
    """`x` with zeros after it, `size` entries along `axis` in all."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)
