"""What passes between steps with different numbers of drafts: the tokens that no head has read.

A step leaves the tokens that it committed, with their aux hidden states, for the draft head to read
in the next step: at most K + 1. The state has places for those of the largest K. Before steps with
a smaller K, and after plain ones, the head reads what is too much. Plain steps do not run the head;
they keep the newest tokens instead. What is older the head never reads: its own cache then has no
such token, as if the text had been shorter. Drafts may become worse by that. What is committed does
not, because the target decides about every draft.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.decode.drafters import Drafter
from peagle_jax.types import DecodeState, DraftState

# Tokens that plain steps keep for the draft head, at least. Rows need as many slots more.
LOOKBACK = 8


def append_unread(
    state: DecodeState, tokens: Int[Array, "B 1"], aux_hidden_states: Float[Array, "B 1 A"]
) -> tuple[Int[Array, "B R"], Float[Array, "B R A"], Int[Array, " B"]]:
    """The fields `tokens`, `aux_hidden_states` and `count` after a further token of each row.

    Where all places are taken, it takes that of the oldest. `_sort_unread` puts them in order.
    """
    rows, place = jnp.arange(len(tokens)), state.count % state.tokens.shape[1]
    new_tokens = state.tokens.at[rows, place].set(tokens[:, 0])
    new_states = state.aux_hidden_states.at[rows, place].set(aux_hidden_states[:, 0])
    return new_tokens, new_states, state.count + 1


def replace_unread(
    state: DecodeState,
    tokens: Int[Array, "B R"],
    aux_hidden_states: Float[Array, "B R A"],
    count: Int[Array, " B"],
) -> tuple[Int[Array, "B P"], Float[Array, "B P A"], Int[Array, " B"]]:
    """The fields `tokens`, `aux_hidden_states` and `count` after a step that drafted.

    What is behind the step's places stays there, and is valid for nobody: to fill all P of them in
    every step takes 3 % of one with K = 3 of 7 (LOG.md, 2026-11-30, noon).
    """
    new_tokens = jax.lax.dynamic_update_slice(state.tokens, tokens, (0, 0))
    new_states = jax.lax.dynamic_update_slice(state.aux_hidden_states, aux_hidden_states, (0, 0, 0))
    return new_tokens, new_states, count


def change_k(drafter: Drafter, draft_params: Any, k: int, state: DecodeState) -> DecodeState:
    """The state before steps with `k` drafts: at most k + 1 tokens are unread, the oldest first.

    Where a row has more, the draft head reads all of every row but the last.

    Args:
      drafter: whose K is the largest.
    """
    names = ("tokens", "aux_hidden_states", "count", "draft")
    fields = (getattr(state, name) for name in names)
    changed = _change_k(drafter, draft_params, np.int32(k), *fields)
    return dataclasses.replace(state, **dict(zip(names, changed, strict=True)))


# K is no static argument: one program serves all changes.
@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="draft")
def _change_k(
    drafter: Drafter,
    draft_params: Any,
    k: Int[Array, ""],
    tokens: Int[Array, "B R"],
    aux_hidden_states: Float[Array, "B R A"],
    count: Int[Array, " B"],
    draft: DraftState,
) -> tuple[Int[Array, "B R"], Float[Array, "B R A"], Int[Array, " B"], DraftState]:
    """The fields of a state that `change_k` changes."""
    num_places = tokens.shape[1]
    tokens, aux_hidden_states, count = _sort_unread(tokens, aux_hidden_states, count)

    def read_all_but_last(draft: DraftState) -> tuple[Array, Array, Array, DraftState]:
        draft = drafter.prefill(draft_params, draft, tokens, aux_hidden_states, count - 1)
        last = (count - 1)[:, None]
        newest = jnp.take_along_axis(tokens, last, axis=1)
        its_states = jnp.take_along_axis(aux_hidden_states, last[..., None], axis=1)
        return pad(newest, num_places), pad(its_states, num_places), jnp.ones_like(count), draft

    def leave(draft: DraftState) -> tuple[Array, Array, Array, DraftState]:
        return tokens, aux_hidden_states, count, draft

    return jax.lax.cond(count.max() > k + 1, read_all_but_last, leave, draft)


def _sort_unread(
    tokens: Int[Array, "B R"], aux_hidden_states: Float[Array, "B R A"], count: Int[Array, " B"]
) -> tuple[Int[Array, "B R"], Float[Array, "B R A"], Int[Array, " B"]]:
    """What plain steps kept, the oldest token first, and how many tokens that is, 1 to R."""
    num_places = tokens.shape[1]
    oldest = jnp.where(count > num_places, count % num_places, 0)
    order = (jnp.arange(num_places)[None] + oldest[:, None]) % num_places
    tokens = jnp.take_along_axis(tokens, order, axis=1)
    aux_hidden_states = jnp.take_along_axis(aux_hidden_states, order[..., None], axis=1)
    return tokens, aux_hidden_states, jnp.minimum(count, num_places)


def pad(x: Array, num_places: int) -> Array:
    """`x` with zeros after its entries along axis 1: `num_places` in all."""
    return jnp.pad(x, [(0, 0), (0, num_places - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def last_token(state: DecodeState) -> Int[Array, "B 1"]:
    """The newest token of every row, which the target has not read."""
    place = (state.count - 1) % state.tokens.shape[1]  # `append_unread` counts on
    return jnp.take_along_axis(state.tokens, place[:, None], axis=1)
