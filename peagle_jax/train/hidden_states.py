"""What a head learns from: the target's taps and final hidden states, shifted so that rows line up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.train.attention import PackedCausal
from peagle_jax.types import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """Shifted training rows: row i has token x[i+1], the taps of x[i], and the target's view after x[i+1].

    The runtime's alignment (peagle.md, section 3). `document` is -1 where row i would join two documents.
    """

    tokens: Int[Array, "B n"]
    aux_hidden_states: Float[Array, "B n A"]
    teacher_hidden: Float[
        Array, "B n E"
    ]  # the target's final hidden state of x[i+1], which predicts x[i+2]
    segment_ids: Int[Array, "B n"]
    loss_mask: Bool[Array, "B n"]


def shifted(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(document, supervised) of the shifted rows, on the host: what COD sampling reads.

    Supervision follows the token that a row READS. A row joins x[i] and x[i+1], so both must be of one document; and
    nothing is learned after a document's last token, where the target predicts what nobody will decode.
    """
    segment_ids = np.where(
        batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1], batch.segment_ids[:, 1:], -1
    )
    last = np.pad(batch.segment_ids[:, 2:] != batch.segment_ids[:, 1:-1], [(0, 0), (0, 1)])
    return segment_ids, batch.loss_mask[:, 1:] & (segment_ids >= 0) & ~last


def compute_hidden_states(
    target, batch: Batch
) -> tuple[Float[Array, "B T A"], Float[Array, "B T E"]]:
    """Taps and final hidden states of packed rows; one target forward, documents apart."""
    positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape)
    out, _ = target(batch.tokens, positions, PackedCausal(batch.segment_ids), None)
    return out.aux_hidden_states, out.hidden


def training_rows(
    target, batch: Batch, segment_ids: Int[Array, "B n"], loss_mask: Bool[Array, "B n"]
) -> TrainingRows:
    """`document` and `supervised` are those of `shifted`."""
    aux_hidden_states, hidden = jax.lax.stop_gradient(compute_hidden_states(target, batch))
    return TrainingRows(
        batch.tokens[:, 1:], aux_hidden_states[:, :-1], hidden[:, 1:], segment_ids, loss_mask
    )
