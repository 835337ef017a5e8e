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
class Rows:
    """Shifted training rows: row i has token x[i+1], the taps of x[i], and the target's view after x[i+1].

    The runtime's alignment (peagle.md, section 3). `document` is -1 where row i would join two documents.
    """

    tokens: Int[Array, "B n"]
    taps: Float[Array, "B n A"]
    teacher: Float[Array, "B n E"]  # the target's final hidden state of x[i+1], which predicts x[i+2]
    document: Int[Array, "B n"]
    supervised: Bool[Array, "B n"]


def shifted(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(document, supervised) of the shifted rows, on the host: what COD sampling reads.

    Supervision follows the token that a row READS. A row joins x[i] and x[i+1], so both must be of one document; and
    nothing is learned after a document's last token, where the target predicts what nobody will decode.
    """
    document = np.where(batch.document[:, 1:] == batch.document[:, :-1], batch.document[:, 1:], -1)
    last = np.pad(batch.document[:, 2:] != batch.document[:, 1:-1], [(0, 0), (0, 1)])
    return document, batch.supervised[:, 1:] & (document >= 0) & ~last


def extract(target, batch: Batch) -> tuple[Float[Array, "B T A"], Float[Array, "B T E"]]:
    """Taps and final hidden states of packed rows; one target forward, documents apart."""
    positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape)
    out, _ = target(batch.tokens, positions, PackedCausal(batch.document), None)
    return out.features, out.hidden


def training_rows(target, batch: Batch, document: Int[Array, "B n"], supervised: Bool[Array, "B n"]) -> Rows:
    """`document` and `supervised` are those of `shifted`."""
    taps, hidden = jax.lax.stop_gradient(extract(target, batch))
    return Rows(batch.tokens[:, 1:], taps[:, :-1], hidden[:, 1:], document, supervised)
