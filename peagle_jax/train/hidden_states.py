"""What a head learns from: hidden states of the target, shifted so that the rows line up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.layers import Decoder
from peagle_jax.train.attention import PackedCausal
from peagle_jax.types import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """Shifted training rows, n = T - 1 of them for every sequence of T tokens.

    Row i has the token x[i+1], the aux hidden states of x[i], and the target's final hidden state
    of x[i+1], which predicts x[i+2]. When decoding, too, the head gets each token with the hidden
    states of the token before it. `segment_ids` is -1 where row i would join two documents.
    """

    tokens: Int[Array, "B n"]
    aux_hidden_states: Float[Array, "B n A"]
    teacher_hidden: Float[Array, "B n E"]
    segment_ids: Int[Array, "B n"]
    loss_mask: Bool[Array, "B n"]


def shifted(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(segment_ids, loss_mask) of the shifted rows, on the host: what COD sampling reads.

    A row joins x[i] and x[i+1], so both must belong to one document. The loss mask is that of the
    token that a row READS. A document's last token is taken out of it, because what the target
    predicts there is never decoded.
    """
    segments = np.asarray(batch.segment_ids)
    segment_ids = np.where(segments[:, 1:] == segments[:, :-1], segments[:, 1:], -1)
    is_last = np.pad(segments[:, 2:] != segments[:, 1:-1], [(0, 0), (0, 1)])
    return segment_ids, np.asarray(batch.loss_mask)[:, 1:] & (segment_ids >= 0) & ~is_last


def compute_hidden_states(
    target: Decoder, batch: Batch
) -> tuple[Float[Array, "B T A"], Float[Array, "B T E"]]:
    """Aux hidden states and final hidden states of packed rows, in one forward of the target.

    Documents are kept apart by attention.

    Args:
      target: a bound target module.
      batch: packed rows.
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    out, _ = target(tokens, positions, PackedCausal(segment_ids), None)
    return out.aux_hidden_states, out.hidden


def training_rows(
    target: Decoder, batch: Batch, segment_ids: Int[Array, "B n"], loss_mask: Bool[Array, "B n"]
) -> TrainingRows:
    """Runs the target on packed rows, and shifts what comes out.

    Args:
      target: a bound target module.
      batch: packed rows.
      segment_ids: of the shifted rows, from `shifted`.
      loss_mask: likewise.
    """
    aux_hidden_states, hidden = jax.lax.stop_gradient(compute_hidden_states(target, batch))
    tokens = jnp.asarray(batch.tokens)[:, 1:]
    return TrainingRows(tokens, aux_hidden_states[:, :-1], hidden[:, 1:], segment_ids, loss_mask)
