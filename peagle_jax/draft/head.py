"""The draft head (arXiv:2503.01840, arXiv:2602.01469): fused taps and tokens in, draft logits out.

Reads top to bottom: config, layers, head. Semantics follow vLLM 0.33 llama_eagle3.py and speculators 0.9.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle_jax.draft import placeholders
from peagle_jax.draft.fusion import Fusion
from peagle_jax.layers import MLP, Attention, Embedding, Linear, RMSNorm, Rope
from peagle_jax.types import Attend, CacheShape, KVCache, Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Shape and options of one draft head. Every field is read below or by the exporter."""

    vocab: int  # of the target, and of the head's own embedding
    draft_vocab: (
        int  # of lm_head; smaller than `vocab` when the head drafts from a reduced vocabulary
    )
    dim: int
    layers: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float
    context: int  # max_position_embeddings
    target_dim: int  # width of one tap
    aux_hidden_state_layers: tuple[
        int, ...
    ]  # id i is the target's residual stream BEFORE layer i (vLLM's numbering)
    mask_token: (
        int | None
    )  # the placeholder's token; None for a head that only drafts autoregressively
    num_depths: int | None  # K it was trained for; None where its folder does not say
    placeholder_hidden: (
        str  # of `placeholders.HIDDEN`; without meaning where there is no mask token, as the next
    )
    placeholder_token: str  # of `placeholders.TOKEN`
    qk_norm: bool  # Qwen3-style attention
    attention_bias: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool  # EAGLE-3.1: the autoregressive feedback is post-norm
    windows: tuple[int | None, ...]  # sliding window of each layer, in tokens
    dtype: DTypeLike

    @property
    def parallel(self) -> bool:
        """Whether the head can draft in parallel: it has a mask token and `mask_hidden`."""
        return self.mask_token is not None

    @property
    def sizes(self) -> placeholders.Sizes:
        return placeholders.Sizes(
            len(self.aux_hidden_state_layers) * self.target_dim,
            self.dim,
            max(1, (self.num_depths or 2) - 1),
        )

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        shape = CacheShape(
            tuple(range(self.layers)), self.kv_heads, self.head_dim, None
        )  # windows by mask: a head's cache is small
        return KVCache.empty((shape,), batch, slots, self.dtype)


class Buffer(nnx.Variable):
    """An array that travels with the weights and is never trained."""


class DraftLayer(nnx.Module):
    """A Llama layer; the first one has attention of double width, over concat(norm(embedding), norm(feature))."""

    def __init__(self, cfg: HeadConfig, index: int, *, rngs: nnx.Rngs):
        width = 2 * cfg.dim if index == 0 else cfg.dim
        self.input_norm = RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)
        self.hidden_norm = RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype) if index == 0 else None
        self.attn = Attention(
            width,
            cfg.dim,
            cfg.heads,
            cfg.kv_heads,
            cfg.head_dim,
            cfg.rope,
            bias=cfg.attention_bias,
            qk_norm=cfg.qk_norm,
            eps=cfg.norm_eps,
            window=cfg.windows[index],
            dtype=cfg.dtype,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)
        self.mlp = MLP(cfg.dim, cfg.mlp_dim, dtype=cfg.dtype, rngs=rngs)
        self.norm_before_residual = cfg.norm_before_residual

    def __call__(self, x, embeddings, positions, layer: int, attend: Attend, state):
        if self.hidden_norm is None:
            inner, residual = self.input_norm(x), x
        else:
            normed = self.hidden_norm(x)
            inner = jnp.concatenate([self.input_norm(embeddings), normed], axis=-1)
            residual = normed if self.norm_before_residual else x
        y, state = self.attn(inner, positions, layer, attend, state)
        x = residual + y
        return x + self.mlp(self.mlp_norm(x)), state


class DraftHead(nnx.Module):
    """The whole head. Attention is an argument, so one module serves cached drafting and packed training."""

    def __init__(self, cfg: HeadConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = Embedding(cfg.vocab, cfg.dim, dtype=cfg.dtype, rngs=rngs)
        self.fusion = Fusion(
            len(cfg.aux_hidden_state_layers),
            cfg.target_dim,
            cfg.dim,
            cfg.norm_eps,
            before_fc=cfg.norm_before_fc,
            per_tap=cfg.fc_norm,
            dtype=cfg.dtype,
            rngs=rngs,
        )
        keys = iter(
            jax.random.split(rngs.params(), 8)
        )  # one draw for all of a placeholder: layers begin alike whatever its design

        def small(shape):
            return nnx.Param(0.02 * jax.random.normal(next(keys), shape).astype(cfg.dtype))

        reads = cfg.parallel and placeholders.HIDDEN_DESIGNS[cfg.placeholder_hidden].mask_hidden
        self.mask_hidden = small((cfg.sizes.aux_dim,)) if reads else None
        own = placeholders.own_shapes(cfg, cfg.sizes) if cfg.parallel else {}
        self.placeholder = (
            nnx.Dict({name: small(shape) for name, shape in own.items()}) if own else None
        )
        self.layers = nnx.List([DraftLayer(cfg, i, rngs=rngs) for i in range(cfg.layers)])
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)
        self.lm_head = Linear(cfg.dim, cfg.draft_vocab, dtype=cfg.dtype, rngs=rngs)
        # target id = draft id + d2t[draft id]; absent at full vocabulary, where it would be zero
        self.d2t = (
            Buffer(jnp.zeros(cfg.draft_vocab, jnp.int32)) if cfg.draft_vocab != cfg.vocab else None
        )

    def __call__(
        self,
        embeddings: Float[Array, "B T D"],
        fused: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        attend: Attend,
        state,
    ):
        """Runs rows of (token embedding, fused feature, position).

        Row i carries the token one AHEAD of its feature and predicts the token after that (peagle.md, section 3).

        Returns:
          The residual stream before the final norm [B T D], and the attention state.
        """
        x = fused
        for i, layer in enumerate(self.layers):
            x, state = layer(x, embeddings, positions, i, attend, state)
        return x, state

    def fuse(self, aux_hidden_states: Float[Array, "*rows A"]) -> Float[Array, "*rows D"]:
        return self.fusion(aux_hidden_states)

    def compute_logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows W"]:
        """Over the draft vocabulary."""
        return self.lm_head(self.norm(hidden))

    def argmax_logits(self, hidden: Float[Array, "*rows D"]) -> Int[Array, "*rows"]:
        """The argmax of `logits`."""
        return self.lm_head.argmax_logits(self.norm(hidden))

    def feedback(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """What stands in the place of the feature when the head drafts autoregressively."""
        return self.norm(hidden) if self.cfg.norm_output else hidden

    def target_ids(self) -> Int[Array, " W"]:
        """The target's token id of every draft id."""
        ids = jnp.arange(self.cfg.draft_vocab)
        return ids if self.d2t is None else ids + self.d2t[...]


def random_head(
    config: HeadConfig,
    *,
    seed: int,
    embedding: jax.Array,
    output: jax.Array,
    ids: np.ndarray | None,
) -> Model:
    """A head to train: random layers, the target's embedding and output rows where the widths agree.

    Args:
      embedding: of the target [V E]; copied when E is the head's width.
      output: the target's output matrix [E V], likewise, its columns restricted to the draft vocabulary.
      ids: target ids of a reduced draft vocabulary; None at full vocabulary.
    """
    head = Model.of(DraftHead(config, rngs=nnx.Rngs(seed)), config)
    params = dict(head.params)
    if ids is not None:
        params["d2t"] = jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
    if embedding.shape[1] == config.dim:
        params["embed"] = {"table": jnp.asarray(embedding, config.dtype)}
        params["lm_head"] = {
            "kernel": jnp.asarray(output if ids is None else output[:, ids], config.dtype)
        }
    return dataclasses.replace(head, params=params)
