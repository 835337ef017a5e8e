"""The frame that decoders share: embedding, blocks, aux hidden states, norm, output matrix."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import vocab
from peagle_jax.layers.attention import Attention
from peagle_jax.layers.basic import MLP, Embedding, Linear, RMSNorm, soft_cap
from peagle_jax.layers.matrix_layouts import to_plain
from peagle_jax.layers.products import product_of_layout
from peagle_jax.types import Attend, TargetOutput

# The id of an aux hidden state that is no layer's input: what the output matrix reads, after the
# final norm. It is transformers' `hidden_states[-1]`, and what EAGLE-1 calls a feature.
FINAL_HIDDEN_STATE = -1


class PreNormBlock(nnx.Module):
    """`x + attn(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, attn_norm: RMSNorm, attn: Attention, mlp_norm: RMSNorm, mlp: nnx.Module):
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        layer: int,
        attend: Attend,
        state: Any,
    ) -> tuple[Float[Array, "B T D"], Any]:
        y, state = self.attn(x, positions, layer, attend, state, norm=self.attn_norm)
        x = x + y
        if isinstance(self.mlp, MLP):
            return x + self.mlp(x, self.mlp_norm), state
        return x + self.mlp(self.mlp_norm(x)), state


class Decoder(nnx.Module):
    """Blocks over a residual stream, some of whose states are returned.

    Args:
      block: makes the block of a layer, by its number.
      aux_hidden_state_layers: id i is the INPUT of block i (vLLM's numbering); 0 is the embedding,
        and `FINAL_HIDDEN_STATE` what follows the final norm.
      tied: the output matrix is the embedding's transpose.
      logit_cap: Gemma's soft cap.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        layers: int,
        block: Callable[[int], nnx.Module],
        norm: RMSNorm,
        *,
        aux_hidden_state_layers: Sequence[int],
        tied: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        logit_cap: float | None = None,
    ):
        self.aux_hidden_state_layers = tuple(aux_hidden_state_layers)
        self.logit_cap = logit_cap
        self.embed = Embedding(vocab, dim, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([block(i) for i in range(layers)])
        self.norm = norm
        self.lm_head = None if tied else Linear(dim, vocab, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        state: Any,
    ) -> tuple[TargetOutput, Any]:
        """The final and aux hidden states, and the state that `attend` returns.

        Aux hidden states are always part of the forward; jit drops those that nobody reads.
        """
        x = self.embed(tokens)
        stream = [x]
        for i, block in enumerate(self.blocks):
            x, state = block(x, positions, i, attend, state)
            stream.append(x)
        hidden = self.norm(x)
        return TargetOutput(hidden, self.select_aux_hidden_states(stream, hidden)), state

    def select_aux_hidden_states(
        self, stream: Sequence[Float[Array, "B T D"]], hidden: Float[Array, "B T D"]
    ) -> Float[Array, "B T A"]:
        """Aux hidden states: those that were asked for, concatenated.

        Args:
          stream: the inputs of the blocks, and the output of the last.
          hidden: after the final norm.
        """
        if not self.aux_hidden_state_layers:
            return hidden[..., :0]
        states = [
            hidden if i == FINAL_HIDDEN_STATE else stream[i] for i in self.aux_hidden_state_layers
        ]
        return jnp.concatenate(states, axis=-1)

    def compute_logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits of hidden states that the final norm has been applied to."""
        if self.lm_head is None:
            table = self.embed.table[...]
            weight = self.lm_head_weight() if table.ndim == 2 else table
            logits = product_of_layout(hidden.reshape(-1, hidden.shape[-1]), weight)
            logits = logits.reshape(*hidden.shape[:-1], -1)
        else:
            logits = self.lm_head(hidden)
        return soft_cap(logits, self.logit_cap)

    def argmax_logits(self, hidden: Float[Array, "*rows D"]) -> Int[Array, "*rows"]:
        """The argmax of `compute_logits`, greedy decoding's next token. A cap changes no order."""
        if self.lm_head is None:
            table = self.embed.table[...]
            is_plain = table.ndim == 2
            ids = vocab.argmax_logits(hidden, table, vocab_first=True) if is_plain else None
        else:
            ids = self.lm_head.argmax_by_kernel(hidden)
        return vocab.argmax(self.compute_logits(hidden)) if ids is None else ids

    def lm_head_weight(self) -> Float[Array, "D V"]:
        """The output matrix; the embedding's transpose where they are tied."""
        if self.lm_head is None:
            table = self.embed.table[...]
            return table.T if table.ndim == 2 else to_plain(table)
        return to_plain(self.lm_head.kernel[...])
