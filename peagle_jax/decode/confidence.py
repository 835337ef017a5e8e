"""What a confidence head says of the drafts of a step."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decode.drafters import Drafter, ParallelDrafter
from peagle_jax.draft.confidence import KINDS
from peagle_jax.types import DecodeState, InputError, Params, SamplingParams


def confidence_logits(
    drafter: ParallelDrafter, params: Params, state: DecodeState, drafts: Int[Array, "B K"]
) -> Float[Array, "B K"]:
    """Logits, without calibration, of the chance that drafts are accepted if those before were.

    That of a draft depends on the drafts before it, and not on the draft.

    Args:
      drafter: of a head with a confidence head.
      params: the head's.
      state: before the step.
      drafts: of the step.
    """
    unread = state.tokens[:, : drafter.k + 1], state.aux_hidden_states[:, : drafter.k + 1]
    head, hidden, _ = drafter.read(params, state.draft, *unread, state.count)
    last = jnp.take_along_axis(unread[0], (state.count - 1)[:, None], axis=1)
    previous = jnp.concatenate([last, drafts[:, :-1]], axis=1)
    return head.confidence_logits(head.final_norm(hidden), previous)


def has_confidence(drafter: Drafter | None) -> bool:
    """Whether a drafter has a calibrated confidence head."""
    if not isinstance(drafter, ParallelDrafter) or drafter.synthetic_rates is not None:
        return False
    return drafter.config.confidence_calibration is not None


def check_calibrated(drafter: Drafter | None) -> None:
    """Raises InputError where a confidence head that was not calibrated is to choose K."""
    if not isinstance(drafter, ParallelDrafter) or not drafter.config.confidence:
        return
    if drafter.config.confidence_calibration is None:
        raise InputError(
            "adaptive_k",
            rule="a confidence head must be calibrated before it chooses how many tokens to draft",
            got="one that is not",
            next_step="run peagle calibrate, or peagle convert --drop-confidence",
        )


def count_expected(
    drafter: Drafter | None,
    params: Any,
    state: DecodeState,
    drafts: Int[Array, "B K"],
    sampling: SamplingParams | None,
    new: DecodeState,
) -> DecodeState:
    """Adds to a state how likely the drafts of the step were accepted, position by position.

    It is what a confidence head says before the target has read them. XLA runs the head once for
    this and for the drafts.

    Args:
      drafter: None where nobody wants to know.
      params: the head's.
      state: before the step.
      drafts: of the step.
      sampling: how the rows sample.
      new: the state after the step.
    """
    if not has_confidence(drafter):
        return new
    drafter = cast(ParallelDrafter, drafter)
    logits = confidence_logits(drafter, params, state, drafts)
    chances = survival_chances(drafter, logits, sampling)
    padding = [(0, 0), (0, state.num_expected_per_pos.shape[1] - drafter.k)]
    chances = jnp.where(state.done[:, None], 0, chances)
    total = state.num_expected_per_pos + jnp.pad(chances, padding)
    return dataclasses.replace(new, num_expected_per_pos=total)


def survival_chances(
    drafter: ParallelDrafter, logits: Float[Array, "B K"], sampling: SamplingParams | None
) -> Float[Array, "B K"]:
    """The chance that a step accepts its first 1, 2, ..., K drafts.

    Args:
      drafter: of a head whose confidence head is calibrated.
      logits: from `confidence_logits`.
      sampling: how the rows sample.
    """
    calibration = drafter.config.confidence_calibration
    assert calibration is not None
    greedy, sampled = (calibration.of_kind(kind, drafter.k)[:, None] for kind in KINDS)
    scale, shift = greedy
    if sampling is not None:
        is_greedy = jnp.asarray(sampling.temperature)[None, :, None] == 0
        scale, shift = jnp.where(is_greedy, greedy, sampled)
    return jnp.cumprod(jax.nn.sigmoid(scale * logits + shift), axis=1)
