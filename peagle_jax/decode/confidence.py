"""What a confidence head says of the drafts of a step."""

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decode.drafters import ParallelDrafter
from peagle_jax.types import DecodeState, Params


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


def survival_chances(
    drafter: ParallelDrafter, logits: Float[Array, "B K"], kind: str
) -> Float[Array, "B K"]:
    """The chance that a step accepts its first 1, 2, ..., K drafts.

    Args:
      drafter: of a head whose confidence head is calibrated.
      logits: from `confidence_logits`.
      kind: "greedy" or "sampled".
    """
    calibration = drafter.config.confidence_calibration
    assert calibration is not None
    scale, shift = cast(tuple, calibration.of_kind(kind, drafter.k))
    confidence = jax.nn.sigmoid(scale[None] * logits + shift[None])
    return jnp.cumprod(confidence, axis=1)
