"""What passes between steps with different numbers of drafts: the tokens that no head has read.

A step leaves the tokens that it committed, with their aux hidden states, for the draft head to read
in the next step: at most K + 1. Before steps with another K these are put into as many places as
such steps have. Plain steps do not run the head; they keep the newest tokens instead. What is older
the head never reads: its own cache then has no such token, as if the text had been shorter. Drafts
may become worse by that. What is committed does not, because the target decides about every draft.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decode.drafters import Drafter
from peagle_jax.types import DecodeState, DraftState

# Tokens that plain steps keep for the draft head.
LOOKBACK = 16


def append_unread(
    state: DecodeState, tokens: Int[Array, "B 1"], aux_hidden_states: Float[Array, "B 1 A"]
) -> tuple[Int[Array, "B R"], Float[Array, "B R A"], Int[Array, " B"]]:
    """The fields `tokens`, `aux_hidden_states` and `count` after a further token of each row.

    Where all places are taken, it takes that of the oldest. `sort_unread` puts them in order.
    """
    rows, place = jnp.arange(len(tokens)), state.count % state.tokens.shape[1]
    new_tokens = state.tokens.at[rows, place].set(tokens[:, 0])
    new_states = state.aux_hidden_states.at[rows, place].set(aux_hidden_states[:, 0])
    return new_tokens, new_states, state.count + 1


@functools.partial(jax.jit, donate_argnames=("tokens", "aux_hidden_states"))
def sort_unread(
    tokens: Int[Array, "B R"], aux_hidden_states: Float[Array, "B R A"], count: Int[Array, " B"]
) -> tuple[Int[Array, "B R"], Float[Array, "B R A"], Int[Array, " B"]]:
    """What plain steps kept, the oldest token first, and how many tokens that is, 1 to R."""
    num_places = tokens.shape[1]
    oldest = jnp.where(count > num_places, count % num_places, 0)
    order = (jnp.arange(num_places)[None] + oldest[:, None]) % num_places
    tokens = jnp.take_along_axis(tokens, order, axis=1)
    aux_hidden_states = jnp.take_along_axis(aux_hidden_states, order[..., None], axis=1)
    return tokens, aux_hidden_states, jnp.minimum(count, num_places)


def change_places(
    drafter: Drafter, draft_params: Any, num_places: int, state: DecodeState
) -> DecodeState:
    """The state with `num_places` places for unread tokens.

    Where these may be too few, the draft head reads all unread tokens but the last.
    """
    draft = state.draft
    unread = sort_unread(state.tokens, state.aux_hidden_states, state.count)
    if num_places < unread[0].shape[1]:
        draft, *last = _read_all_but_last(drafter, draft_params, draft, *unread)
        unread = *last, jnp.ones_like(state.count)
    tokens, aux_hidden_states, count = unread
    state = dataclasses.replace(
        state, draft=draft, tokens=tokens, aux_hidden_states=aux_hidden_states, count=count
    )
    return fit_places(state, num_places)


@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="draft")
def _read_all_but_last(
    drafter: Drafter,
    draft_params: Any,
    draft: DraftState,
    tokens: Int[Array, "B R"],
    aux_hidden_states: Float[Array, "B R A"],
    count: Int[Array, " B"],
) -> tuple[DraftState, Int[Array, "B 1"], Float[Array, "B 1 A"]]:
    """The drafter's state after all unread tokens but the last, and that one."""
    draft = drafter.prefill(draft_params, draft, tokens, aux_hidden_states, count - 1)

    def last(x: Array) -> Array:
        at = (count - 1).reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.take_along_axis(x, at, axis=1)

    return draft, last(tokens), last(aux_hidden_states)


def fit_places(state: DecodeState, num_places: int) -> DecodeState:
    """The state with `num_places` places; no row may have more unread tokens."""

    def fit(x: Array) -> Array:
        x = x[:, :num_places]
        return jnp.pad(x, [(0, 0), (0, num_places - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])

    return dataclasses.replace(
        state, tokens=fit(state.tokens), aux_hidden_states=fit(state.aux_hidden_states)
    )
