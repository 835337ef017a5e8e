"""What a confidence head says of the drafts of a step."""

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
