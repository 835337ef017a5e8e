"""What a confidence head says of the drafts of a step."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decode.draft_tokens import draft_tokens, last_committed
from peagle_jax.decode.drafters import Drafter, ParallelDrafter
from peagle_jax.draft.confidence import KINDS
from peagle_jax.types import DecodeState, DraftState, InputError, SamplingParams

# What `Drafter.step` returns, and logits of a confidence head, or None.
Confident = tuple[
    Int[Array, "B K"], Float[Array, "B K V"] | None, DraftState, Float[Array, "B K"] | None
]


def step_with_confidence(
    drafter: Drafter,
    params: Any,
    state: DraftState,
    tokens: Int[Array, "B R"],
    aux_hidden_states: Float[Array, "B R A"],
    count: Int[Array, " B"],
) -> Confident:
    """A step of a drafter, and what a confidence head says of its drafts.

    The head runs once for both: XLA does not merge two runs of it, which write to its cache.

    Returns:
      Beside what `Drafter.step` returns the logits, without calibration, of the chance that each
      draft is accepted if those before it were. They depend on the drafts before it, and not on the
      draft. None where the drafter has no confidence head, or does not draft in parallel.
    """
    inputs = params, state, tokens, aux_hidden_states, count
    if not isinstance(drafter, ParallelDrafter) or not drafter.config.confidence:
        return *drafter.step(*inputs), None
    head, hidden, new_state = drafter.read(*inputs)
    last = last_committed(tokens, count)
    drafts, draft_logits = draft_tokens(head, hidden, last, state.sampling)
    previous = jnp.concatenate([last[:, None], drafts[:, :-1]], axis=1)
    logits = head.confidence_logits(head.final_norm(hidden), previous)
    return drafts, draft_logits, new_state, logits


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
    state: DecodeState,
    logits: Float[Array, "B K"] | None,
    sampling: SamplingParams | None,
    new: DecodeState,
) -> DecodeState:
    """Adds to a state how likely the drafts of the step were accepted, position by position.

    It is what a confidence head says before the target has read them.

    Args:
      drafter: whose drafts the target has verified.
      state: before the step. It has no such count where nobody wants to know.
      logits: of the confidence head, from `step_with_confidence`.
      sampling: how the rows sample.
      new: the state after the step.
    """
    before = state.num_expected_per_pos
    if before is None or logits is None:
        return new
    chances = survival_chances(cast(ParallelDrafter, drafter), logits, sampling)
    chances = jnp.where(state.done[:, None], 0, chances)
    padding = [(0, 0), (0, before.shape[1] - chances.shape[1])]
    return dataclasses.replace(new, num_expected_per_pos=before + jnp.pad(chances, padding))


def survival_chances(
    drafter: ParallelDrafter, logits: Float[Array, "B K"], sampling: SamplingParams | None
) -> Float[Array, "B K"]:
    """The chance that a step accepts its first 1, 2, ..., K drafts; 0 from a NaN on.

    Args:
      drafter: of a head whose confidence head is calibrated.
      logits: from `step_with_confidence`.
      sampling: how the rows sample.
    """
    calibration = drafter.config.confidence_calibration
    assert calibration is not None
    greedy, sampled = (calibration.of_kind(kind, drafter.k)[:, None] for kind in KINDS)
    scale, shift = greedy
    if sampling is not None:
        is_greedy = jnp.asarray(sampling.temperature)[None, :, None] == 0
        scale, shift = jnp.where(is_greedy, greedy, sampled)
    return jnp.nan_to_num(jnp.cumprod(jax.nn.sigmoid(scale * logits + shift), axis=1))
