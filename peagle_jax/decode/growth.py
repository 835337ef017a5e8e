"""The sizes of a batch: how many rows it has, and how many slots the caches of a row.

XLA computes attention over all slots of a cache and all rows of a batch, so that a step costs what
these could hold. Both therefore follow what is in use. Caches begin small and double with the text:
a row of n tokens passes log2(n / 256) sizes, and there is one compiled program for each, whatever
was reserved. Rows that are done make place for others, or leave a smaller batch behind.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from peagle_jax.types import DecodeState, KVCache, KVGroup

# Slots of the smallest size. Every further size is twice as large.
FIRST_SLOTS = 256
# Where less than that is reserved, slots are a multiple of this, so that there are four sizes. Each
# has programs of its own to be compiled, and some tens of slots more are little to read.
SMALL_STEP = 64


def num_slots(needed: int, reserved: int) -> int:
    """The slots of caches in which `needed` positions are written.

    Args:
      needed: positions that the next step writes, and all before them.
      reserved: the most positions that the requests at hand will ever need.
    """
    slots = FIRST_SLOTS
    while slots < needed:
        slots *= 2
    # no more than is reserved, but of a few sizes
    step = SMALL_STEP if slots == FIRST_SLOTS else max(FIRST_SLOTS, slots // 16)
    most = -(-max(needed, reserved) // step) * step
    return min(slots, most)


def num_rows(needed: int, most: int) -> int:
    """The rows of a batch for `needed` requests: a power of two, but at most `most`."""
    return min(1 << (needed - 1).bit_length(), most)


def resize(state: DecodeState, slots: int, rows: Sequence[int], num_rows: int) -> DecodeState:
    """The state with other rows, and other slots in its caches, except in rings, and outputs.

    Array after array, and the old one is freed: never are there two caches. The slots may not be
    fewer than a row's tokens.

    Args:
      rows: which rows to keep, in their new order.
      num_rows: of the new batch. Rows after those of `rows` are done.
    """
    k = state.num_accepted_per_pos.shape[1]
    num_old = len(state.done)
    index = None
    if list(rows) != list(range(num_old)) or num_rows != num_old:
        index = np.zeros(num_rows, np.int32)
        index[: len(rows)] = rows

    def with_slots(x: Array, axis: int, size: int) -> Array:
        return _replace(x, index, axis, size)

    def same_slots(x: Array) -> Array:
        return _replace(x, index, 0, num_rows)

    draft = state.draft
    if draft.cache is not None:
        draft = dataclasses.replace(draft, cache=resize_cache(draft.cache, slots + k, index))
    per_row = {
        field.name: jax.tree.map(same_slots, getattr(state, field.name))
        for field in dataclasses.fields(state)
        if field.name not in ("cache", "draft", "output", "is_draft", "logprobs")
    }
    if len(rows) < num_rows:
        per_row["done"] = jnp.asarray(per_row["done"]).at[len(rows) :].set(True)
    return dataclasses.replace(
        state,
        cache=resize_cache(state.cache, slots, index),
        draft=draft,
        output=with_slots(state.output, 1, slots),
        is_draft=with_slots(state.is_draft, 1, slots),
        logprobs=with_slots(state.logprobs, 1, slots),
        **per_row,
    )


def resize_cache(cache: KVCache, slots: int, rows: np.ndarray | None = None) -> KVCache:
    """The cache with `slots` slots, except in rings. The arrays of the old one are freed.

    Args:
      rows: which rows to keep, in their new order; None for all.
    """
    num_rows = len(cache.length) if rows is None else len(rows)

    def resize_group(group: KVGroup) -> KVGroup:
        def resize_layers(layers: tuple[Array, ...]) -> tuple[Array, ...]:
            axis, size = (0, num_rows) if group.ring else (2, slots)
            return tuple(_replace(x, rows, axis, size) for x in layers)

        names = ("k", "v", "k_scale", "v_scale")
        return dataclasses.replace(
            group, **{name: resize_layers(getattr(group, name)) for name in names}
        )

    length = _replace(cache.length, rows, 0, num_rows)
    return dataclasses.replace(cache, groups=tuple(map(resize_group, cache.groups)), length=length)


def _replace(x: Array, rows: np.ndarray | None, axis: int, size: int) -> Array:
    """`x` with other rows, and `size` entries along `axis`. The old array is freed."""
    if rows is None and x.shape[axis] == size:
        return x
    resized = _resized(x, rows, axis, size)
    x.delete()
    return resized


@functools.partial(jax.jit, static_argnames=("axis", "size"))
def _resized(x: Array, rows: Int[Array, " rows"] | None, axis: int, size: int) -> Array:
    """`x` with other rows; and `size` entries along `axis`, the new ones zero."""
    if rows is not None:
        x = x[rows]
    if x.shape[axis] >= size:
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    return _pad_end(x, axis, size)


def _pad_end(x: Array, axis: int, size: int) -> Array:
    """`x` with zeros after it, `size` entries along `axis` in all."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)


@functools.partial(jax.jit, donate_argnames="state")
def put_row(
    state: DecodeState, new: DecodeState, source: Int[Array, ""], row: Int[Array, ""]
) -> DecodeState:
    """`state` with row `source` of `new` in the place of its row `row`.

    The new row may have fewer slots; the others become zero, so that nothing of the old row stays.
    """

    def put(old: Array, new: Array) -> Array:
        update = jax.lax.dynamic_slice_in_dim(new, source, 1)
        for axis in range(1, old.ndim):
            update = _pad_end(update, axis, old.shape[axis])
        return jax.lax.dynamic_update_slice_in_dim(old, update, row, 0)

    return jax.tree.map(put, state, new)
