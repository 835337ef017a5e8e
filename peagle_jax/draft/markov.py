"""The Markov head: what the token before a draft says about the draft (DSpark, arXiv:2607.05147).

P-EAGLE predicts its K positions in one forward, each without knowing the drafts before it. A Markov
head adds a bias of low rank to the logits of every position, which depends on the previous token:

    logits[d] = lm_head(norm(hidden[d])) + w2(w1[token[d - 1]])

The previous token of the first draft is the last committed token. Drafts are then drawn one after
another, by products as small as the rank; the layers still run once. In training the previous
tokens are those of the text (teacher forcing), and all positions are computed at once.

Names and forms are those of DSpark's head as vLLM and DeepSpec have it: `markov_w1`, `markov_w2`,
`gate_proj`, and the kinds "vanilla" and "gated".
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle_jax.layers import Embedding, Linear
from peagle_jax.types import InputError

# The fields of a `HeadConfig` without such a head, as the papers of P-EAGLE and EAGLE have none.
NO_MARKOV: dict[str, Any] = {"markov_rank": None, "markov_gated": False}


class MarkovHead(nnx.Module):
    """A bias on the logits of a draft, from the token before it.

    It begins without any effect: `w2` is zero.

    Args:
      vocab: V, of the target; the previous token may be any of it.
      draft_vocab: W, whose logits get the bias.
      dim: D, the width of the hidden states that a gate reads.
      rank: of the bias.
      gated: a gate, sigmoid of a linear map of (hidden state, embedding of the previous token),
        multiplies that embedding.
      dtype: of the parameters.
      rngs: for the initial values.
    """

    def __init__(
        self,
        vocab: int,
        draft_vocab: int,
        dim: int,
        rank: int,
        *,
        gated: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.w1 = Embedding(vocab, rank, dtype=dtype, rngs=rngs)
        self.w2 = Linear(rank, draft_vocab, dtype=dtype, rngs=rngs)
        self.w2.kernel[...] = jnp.zeros_like(self.w2.kernel[...])
        gate = Linear(dim + rank, rank, bias=True, dtype=dtype, rngs=rngs) if gated else None
        self.gate = gate

    def code(
        self, previous: Int[Array, "*rows"], normed: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows r"]:
        """What `w2` multiplies: the previous token's embedding, gated where there is a gate.

        Args:
          previous: ids of the target's vocabulary.
          normed: hidden states after the final norm, which `lm_head` reads as well.
        """
        embedded = self.w1(previous)
        if self.gate is None:
            return embedded
        gate = jax.nn.sigmoid(self.gate(jnp.concatenate([normed, embedded], axis=-1)))
        return gate * embedded

    def __call__(
        self, previous: Int[Array, "*rows"], normed: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows W"]:
        """The bias of the logits; see `code`."""
        return self.w2(self.code(previous, normed))


def check_rank(
    rank: int | None, draft_vocab: int, parallel: bool, where: str, next_step: str
) -> None:
    """Raises InputError unless a head can have a Markov head of that rank; None is always right.

    Args:
      draft_vocab: a bias of a higher rank than this is not of low rank.
      parallel: whether the head drafts in parallel; the others have the previous token anyway.
      where: the key or the file, for the error.
      next_step: what to do, for the error.
    """
    if rank is None:
        return
    if not parallel:
        rule = "a Markov head is for heads that draft in parallel"
        raise InputError(where, rule, "a head without a mask token", next_step)
    if not 1 <= rank <= draft_vocab:
        rule = f"the Markov head's rank must lie in 1..{draft_vocab}, the draft vocabulary"
        raise InputError(where, rule, rank, next_step)
