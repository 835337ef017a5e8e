"""Placeholders of one depth that are the same for all anchors: training multiplies them once.

With the paper's design two thirds of a head's rows are placeholders, and in layer 0 they differ by
their positions alone, which queries and keys get behind the products.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.draft import placeholders
from peagle_jax.draft.placeholders import PlaceholderHead, PlaceholderRow


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepeatedRows:
    """Rows of a sequence, of which all behind the first ones repeat a few.

    Attributes:
      which: of the rows behind the first ones, which of the few each of them is.
      num_first: n, rows that stand for themselves.
    """

    which: Int[Array, "B M"]
    num_first: int = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Float[Array, "B R D"]) -> Float[Array, "B P D"]:
        """R = n + F rows become P = n + M: the first n stay, and row n + m is row n + which[m].

        By a product: its gradient, a sum over all rows that are the same, is one, too.
        """
        few = x[:, self.num_first :]
        one_hot = jax.nn.one_hot(self.which, few.shape[1], dtype=x.dtype)
        repeated = jnp.einsum("BMR,BRD->BMD", one_hot, few, precision=jax.lax.Precision.HIGHEST)
        return jnp.concatenate([x[:, : self.num_first], repeated.astype(x.dtype)], axis=1)


def are_alike_by_depth(cfg: Any) -> bool:
    """Whether all placeholders of a depth enter the head's layers as the same numbers."""
    hidden = placeholders.HIDDEN_DESIGNS[cfg.placeholder_hidden]
    token = placeholders.TOKEN_DESIGNS[cfg.placeholder_token]
    # where context is injected, each layer reads every row of a sequence
    is_injected = cfg.placeholder_context == "injected"
    return hidden.by_depth_alone and token.by_depth_alone and not is_injected


def rows_by_depth(
    head: PlaceholderHead,
    num_depths: int,
    embeddings: Float[Array, "B n D"],
    fused: Float[Array, "B n D"],
) -> tuple[Float[Array, "B R D"], Float[Array, "B R D"]]:
    """The R = K - 1 placeholder rows of a head whose rows `are_alike_by_depth`.

    Args:
      head: a `DraftHead`.
      num_depths: K.
      embeddings, fused: of other rows, for their shapes and dtypes.

    Returns:
      Embeddings and fused hidden states of the depths 1, 2, ..
    """
    shape = fused.shape[0], num_depths - 1
    depth = jnp.broadcast_to(jnp.arange(1, num_depths)[None], shape)
    nothing = (jnp.zeros((*shape, x.shape[2]), x.dtype) for x in (embeddings, fused))
    return placeholders.rows(head, PlaceholderRow(depth, *nothing))
