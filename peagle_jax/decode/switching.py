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


def change_places(
    drafter: Drafter, draft_params: Any, num_places: int, state: DecodeState
) -> DecodeState:
    """The state with `num_places` places for unread tokens.

    Where these may be too few, the draft head reads all unread tokens but the last.
    """
    names = ("tokens", "aux_hidden_states", "count", "draft")
    changed = _change_places(
        drafter, num_places, draft_params, *(getattr(state, name) for name in names)
    )
    return dataclasses.replace(state, **dict(zip(names, changed, strict=True)))


@functools.partial(jax.jit, static_argnames=("drafter", "num_places"), donate_argnames="draft")
def _change_places(
    drafter: Drafter,
    num_places: int,
    draft_params: Any,
    tokens: Int[Array, "B R"],
    aux_hidden_states: Float[Array, "B R A"],
    count: Int[Array, " B"],
    draft: DraftState,
) -> tuple[Int[Array, "B new"], Float[Array, "B new A"], Int[Array, " B"], DraftState]:
    """The fields of a state that `change_places` changes."""
    tokens, aux_hidden_states, count = _sort_unread(tokens, aux_hidden_states, count)
    if num_places < tokens.shape[1]:
        draft = drafter.prefill(draft_params, draft, tokens, aux_hidden_states, count - 1)
        last = (count - 1)[:, None]
        tokens = jnp.take_along_axis(tokens, last, axis=1)
        aux_hidden_states = jnp.take_along_axis(aux_hidden_states, last[..., None], axis=1)
        count = jnp.ones_like(count)
    return _fit(tokens, num_places), _fit(aux_hidden_states, num_places), count, draft


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


def fit_places(state: DecodeState, num_places: int) -> DecodeState:
    """The state with `num_places` places; no row may have more unread tokens."""
    tokens, aux = _fit(state.tokens, num_places), _fit(state.aux_hidden_states, num_places)
    return dataclasses.replace(state, tokens=tokens, aux_hidden_states=aux)


def _fit(x: Array, num_places: int) -> Array:
    """`x` with `num_places` entries along axis 1: the first ones, or zeros behind them."""
    if x.shape[1] == num_places:
        return x
    x = x[:, :num_places]
    return jnp.pad(x, [(0, 0), (0, num_places - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
