"""The frame that decoders share: embedding, blocks, taps, final norm, output matrix."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import vocab
from peagle_jax.layers.attention import Attention
from peagle_jax.layers.basic import Embedding, Linear, RMSNorm, soft_cap
from peagle_jax.types import Attend, TargetOutput


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
        state,
    ):
        y, state = self.attn(self.attn_norm(x), positions, layer, attend, state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


class Decoder(nnx.Module):
    """Blocks over a residual stream that can be tapped.

    Args:
      taps: id i is the stream BEFORE block i (vLLM's numbering); 0 is the embedding.
      tied: the output matrix is the embedding's transpose.
      logit_cap: Gemma's soft cap.
      block: makes the block of a layer.
    """

    def __init__(
        self,
        words: int,
        dim: int,
        layers: int,
        block: Callable[[int], nnx.Module],
        norm: RMSNorm,
        *,
        aux_hidden_state_layers: Sequence[int],
        tied: bool,
        dtype,
        rngs: nnx.Rngs,
        logit_cap: float | None = None,
    ):
        self.aux_hidden_state_layers, self.logit_cap = tuple(aux_hidden_state_layers), logit_cap
        self.embed = Embedding(words, dim, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([block(i) for i in range(layers)])
        self.norm = norm
        self.lm_head = None if tied else Linear(dim, words, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend, state
    ):
        """Returns (TargetOutput, attention state). Taps are part of the forward; jit drops those nobody reads."""
        x = self.embed(tokens)
        stream = [x]
        for i, block in enumerate(self.blocks):
            x, state = block(x, positions, i, attend, state)
            stream.append(x)
        return TargetOutput(self.norm(x), self.tapped(stream)), state

    def tapped(self, stream: Sequence[Float[Array, "B T D"]]) -> Float[Array, "B T A"]:
        return (
            jnp.concatenate([stream[t] for t in self.aux_hidden_state_layers], axis=-1)
            if self.aux_hidden_state_layers
            else stream[0][..., :0]
        )

    def compute_logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        return soft_cap(hidden @ self.lm_head_weight(), self.logit_cap)

    def argmax_logits(self, hidden: Float[Array, "*rows D"]) -> Int[Array, "*rows"]:
        """The argmax of `unembed`, the next token of greedy decoding. A cap changes no order."""
        tied = self.lm_head is None
        ids = vocab.argmax_logits(
            hidden, self.embed.table[...] if tied else self.lm_head.kernel[...], by_word=tied
        )
        return jnp.argmax(self.compute_logits(hidden), axis=-1) if ids is None else ids

    def lm_head_weight(self) -> Float[Array, "D V"]:
        return self.embed.table[...].T if self.lm_head is None else self.lm_head.kernel[...]
