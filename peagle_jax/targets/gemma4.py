"""Gemma 4 text decoder, which also returns aux hidden states.

Layers have sliding or full attention with shapes of their own, and a norm before and after both
attention and MLP. Some checkpoints have experts beside the MLP, per-layer embeddings (PLE), or
layers that share keys and values; gemma4_config.py explains these options. The file reads top to
bottom: attention, experts, per-layer embeddings, block, model, param table. Numerics follow
transformers' modeling_gemma4.py (5.23).
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from peagle_jax.layers import (
    GLU,
    MLP,
    Decoder,
    Embedding,
    Experts,
    LateRMSNorm,
    Linear,
    attention_operands,
    gelu_tanh,
    normal,
    normalize,
    product,
)
from peagle_jax.targets import param_names
from peagle_jax.targets.gemma4_config import Gemma4Config
from peagle_jax.types import Attend, AttentionRule, TargetOutput
from peagle_jax.weights import IDENTITY, TRANSPOSE, TRANSPOSE_EXPERTS, ParamTable


class SelfAttention(nnx.Module):
    """Attention whose scores are not scaled, and whose queries, keys and values are normalized.

    The norm of values has no weight. A layer that shares keys and values has only the projections
    of queries and of the output.
    """

    def __init__(self, cfg: Gemma4Config, layer: int, *, rngs: nnx.Rngs):
        is_full = cfg.is_full(layer)
        self.head_dim = cfg.full_head_dim if is_full else cfg.head_dim
        self.rope = cfg.full_rope if is_full else cfg.rope
        self.kv_source_layer = cfg.kv_source_layer(layer)
        self.window, self.eps = cfg.windows[layer], cfg.norm_eps
        self.operands = attention_operands(cfg.dtype)
        q_dim = cfg.heads * self.head_dim
        kv_dim = cfg.kv_heads_of(layer) * self.head_dim

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, bias=cfg.attention_bias, dtype=cfg.dtype, rngs=rngs)

        def norm() -> LateRMSNorm:
            return LateRMSNorm(self.head_dim, cfg.norm_eps, dtype=cfg.dtype)

        has_kv = self.kv_source_layer == layer
        has_v = has_kv and not (is_full and cfg.attention_k_eq_v)
        self.q, self.o = linear(cfg.dim, q_dim), linear(q_dim, cfg.dim)
        self.k = linear(cfg.dim, kv_dim) if has_kv else None
        self.v = linear(cfg.dim, kv_dim) if has_v else None
        self.q_norm = norm()
        self.k_norm = norm() if has_kv else None

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], attend: Attend, state: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns (output, attention state). `state` is whatever `attend` threads through."""

        def heads(y: Float[Array, "B T NH"]) -> Float[Array, "B T N H"]:
            return y.reshape(*x.shape[:2], -1, self.head_dim)

        q = self.rope(self.q_norm(heads(self.q(x))), positions)
        k = v = None
        if self.k is not None and self.k_norm is not None:
            raw_k = heads(self.k(x))
            raw_v = raw_k if self.v is None else heads(self.v(x))
            k = self.rope(self.k_norm(raw_k), positions)
            v = normalize(raw_v, self.eps).astype(x.dtype)
        rule = AttentionRule(self.window, scale=1.0, operands=self.operands)
        y, state = attend(self.kv_source_layer, q, k, v, state, rule)
        return self.o(y.reshape(*x.shape[:2], -1)), state


class SparseMLP(nnx.Module):
    """A mixture of experts whose router has a norm and scales of its own.

    Args:
      cfg: of a checkpoint with experts.
    """

    def __init__(self, cfg: Gemma4Config, *, rngs: nnx.Rngs):
        if cfg.experts is None or cfg.experts_per_token is None or cfg.expert_dim is None:
            raise ValueError("a checkpoint without experts has no SparseMLP")
        self.router = Linear(cfg.dim, cfg.experts, dtype=cfg.dtype, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(cfg.dim, cfg.dtype))
        self.expert_scale = nnx.Param(jnp.ones(cfg.experts, cfg.dtype))
        self.experts = Experts(
            cfg.experts,
            cfg.dim,
            cfg.expert_dim,
            GLU(gelu_tanh),
            bias=False,
            packed=False,
            dtype=cfg.dtype,
            rngs=rngs,
        )
        self.experts_per_token, self.eps = cfg.experts_per_token, cfg.norm_eps

    def __call__(
        self, x: Float[Array, "B T D"], normed: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """The sum of the experts' outputs.

        Args:
          x: the residual stream, which the router reads.
          normed: the same behind a norm, which the experts read.
        """
        rows = normalize(x.reshape(-1, x.shape[-1]), self.eps).astype(x.dtype)
        logits = self.router(rows * self.scale[...][None] * x.shape[-1] ** -0.5)
        probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        routing_weights, topk_ids = jax.lax.top_k(probs, self.experts_per_token)
        routing_weights = routing_weights / routing_weights.sum(axis=-1, keepdims=True)
        return self.experts(normed, topk_ids, routing_weights * self.expert_scale[...][topk_ids])


class LayerEmbedding(nnx.Module):
    """Adds the layer's own embedding of the token to the residual stream, through a gate.

    The gate is a function of the stream.
    """

    def __init__(self, cfg: Gemma4Config, *, rngs: nnx.Rngs):
        self.gate = Linear(cfg.dim, cfg.ple_dim, dtype=cfg.dtype, rngs=rngs)
        self.out = Linear(cfg.ple_dim, cfg.dim, dtype=cfg.dtype, rngs=rngs)
        self.norm = LateRMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

    def __call__(
        self, x: Float[Array, "B T D"], layer_embedding: Float[Array, "B T P"]
    ) -> Float[Array, "B T D"]:
        return x + self.norm(self.out(gelu_tanh(self.gate(x)) * layer_embedding))


class Block(nnx.Module):
    """One layer: attention, MLP with or without experts beside it, per-layer embedding, scale."""

    def __init__(self, cfg: Gemma4Config, layer: int, *, rngs: nnx.Rngs):
        def norm() -> LateRMSNorm:
            return LateRMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

        self.attn_norm, self.attn_post_norm = norm(), norm()
        self.attn = SelfAttention(cfg, layer, rngs=rngs)
        shares_kv = cfg.kv_source_layer(layer) != layer
        mlp_dim = 2 * cfg.mlp_dim if shares_kv and cfg.use_double_wide_mlp else cfg.mlp_dim
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.mlp = MLP(cfg.dim, mlp_dim, act=gelu_tanh, dtype=cfg.dtype, rngs=rngs)
        has_experts = cfg.experts is not None
        self.moe = SparseMLP(cfg, rngs=rngs) if has_experts else None
        self.moe_norm = norm() if has_experts else None
        self.moe_post_norm = norm() if has_experts else None
        self.dense_post_norm = norm() if has_experts else None
        self.ple = LayerEmbedding(cfg, rngs=rngs) if cfg.ple_dim else None
        self.scale = nnx.Param(jnp.ones(1, cfg.dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        layer_embedding: Float[Array, "B T P"] | None,
        positions: Int[Array, "B T"],
        attend: Attend,
        state: Any,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns (residual stream, attention state).

        Args:
          layer_embedding: the layer's own embedding of each token; None without PLE.
        """
        y, state = self.attn(self.attn_norm(x), positions, attend, state)
        x = x + self.attn_post_norm(y)
        x = x + self.mlp_post_norm(self._mlp_and_experts(x))
        if self.ple is not None and layer_embedding is not None:
            x = self.ple(x, layer_embedding)
        return x * self.scale[...][None, None], state

    def _mlp_and_experts(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = self.mlp(x, self.mlp_norm)
        if self.moe is None:
            return y
        # made together with the experts
        assert self.moe_norm is not None
        assert self.moe_post_norm is not None and self.dense_post_norm is not None
        experts = self.moe(x, self.moe_norm(x))
        return self.dense_post_norm(y) + self.moe_post_norm(experts)


class Gemma4(Decoder):
    """Gemma 4's text model."""

    def __init__(self, cfg: Gemma4Config, *, rngs: nnx.Rngs):
        def block(layer: int) -> Block:
            return Block(cfg, layer, rngs=rngs)

        super().__init__(
            cfg.vocab,
            cfg.dim,
            cfg.layers,
            block,
            LateRMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype),
            aux_hidden_state_layers=cfg.aux_hidden_state_layers,
            tied=cfg.tied_embeddings,
            dtype=cfg.dtype,
            rngs=rngs,
            logit_cap=cfg.logit_cap,
        )
        self.ple_dim = cfg.ple_dim
        if cfg.ple_dim:
            width = cfg.layers * cfg.ple_dim
            self.ple_embed = Embedding(cfg.ple_vocab, width, dtype=cfg.dtype, rngs=rngs)
            self.ple_in = normal(rngs, (cfg.dim, width), cfg.dtype)
            self.ple_norm = LateRMSNorm(cfg.ple_dim, cfg.norm_eps, dtype=cfg.dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend, state: Any
    ) -> tuple[TargetOutput, Any]:
        """Returns (TargetOutput, attention state)."""
        x = self.embed(tokens)
        # rounded to the weights' dtype first
        x = x * jnp.asarray(x.shape[-1] ** 0.5, self.embed.table.dtype).astype(x.dtype)
        layer_embeddings = self._layer_embeddings(tokens, x) if self.ple_dim else None
        stream = [x]
        for i, block in enumerate(self.blocks):
            layer_embedding = None if layer_embeddings is None else layer_embeddings[:, :, i]
            x, state = cast(Block, block)(x, layer_embedding, positions, attend, state)
            stream.append(x)
        hidden = self.norm(x)
        return TargetOutput(hidden, self.select_aux_hidden_states(stream, hidden)), state

    def _layer_embeddings(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T L P"]:
        """Every layer's embedding of the tokens.

        It is the sum of an entry of the second embedding table and of a projection of `x`, the
        first embedding.
        """

        def by_layer(y: Float[Array, "B T LP"]) -> Float[Array, "B T L P"]:
            return y.reshape(*tokens.shape, -1, self.ple_dim)

        factor = jnp.asarray(self.ple_dim**0.5, self.ple_embed.table.dtype).astype(x.dtype)
        embedded = by_layer(self.ple_embed(tokens)) * factor
        scaled = product(x, self.ple_in[...]) * x.shape[-1] ** -0.5
        projected = self.ple_norm(by_layer(scaled))
        return (projected + embedded) * 2**-0.5


# ---------------------------------------------------------------- param table

# of a layer, without the prefix of either side
NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
EXPERT_NORMS = {
    "post_feedforward_layernorm_1": "dense_post_norm",
    "post_feedforward_layernorm_2": "moe_post_norm",
    "pre_feedforward_layernorm_2": "moe_norm",
}


def table(cfg: Gemma4Config) -> ParamTable:
    """Checkpoint name -> (path of our parameter, transform), of every tensor."""
    names = param_names.embedding_norm_and_lm_head(tied=cfg.tied_embeddings)
    if cfg.ple_dim:
        names["model.embed_tokens_per_layer.weight"] = ("ple_embed.table", IDENTITY)
        names["model.per_layer_model_projection.weight"] = ("ple_in", TRANSPOSE)
        names |= _norm("model.per_layer_projection_norm", "ple_norm")
    for i in range(cfg.layers):
        hf_name, path = f"model.layers.{i}", f"blocks.{i}"
        names |= _attention(cfg, i, hf_name, path)
        names |= param_names.mlp(hf_name, path, bias=False)
        names[f"{hf_name}.layer_scalar"] = (f"{path}.scale", IDENTITY)
        for hf_norm, norm in NORMS.items():
            names |= _norm(f"{hf_name}.{hf_norm}", f"{path}.{norm}")
        if cfg.experts is not None:
            names |= _experts(hf_name, path)
        if cfg.ple_dim:
            for hf_linear, linear in {"input_gate": "gate", "projection": "out"}.items():
                names |= param_names.linear(
                    f"{hf_name}.per_layer_{hf_linear}", f"{path}.ple.{linear}", bias=False
                )
            names |= _norm(f"{hf_name}.post_per_layer_input_norm", f"{path}.ple.norm")
    return names


def _norm(hf_name: str, path: str) -> param_names.Names:
    return {f"{hf_name}.weight": (f"{path}.scale", IDENTITY)}


def _attention(cfg: Gemma4Config, layer: int, hf_name: str, path: str) -> param_names.Names:
    """The projections and norms that the attention of this layer has."""
    names: param_names.Names = {}
    projections, norms = ["q", "o"], ["q"]
    if cfg.kv_source_layer(layer) == layer:
        projections.append("k")
        norms.append("k")
        if not (cfg.is_full(layer) and cfg.attention_k_eq_v):
            projections.append("v")
    for p in projections:
        names |= param_names.linear(
            f"{hf_name}.self_attn.{p}_proj", f"{path}.attn.{p}", bias=cfg.attention_bias
        )
    for p in norms:
        names |= _norm(f"{hf_name}.self_attn.{p}_norm", f"{path}.attn.{p}_norm")
    return names


def _experts(hf_name: str, path: str) -> param_names.Names:
    """The router, the experts, and the norms around them."""
    names: param_names.Names = {}
    for hf_norm, norm in EXPERT_NORMS.items():
        names |= _norm(f"{hf_name}.{hf_norm}", f"{path}.{norm}")
    names |= param_names.linear(f"{hf_name}.router.proj", f"{path}.moe.router", bias=False)
    names[f"{hf_name}.router.scale"] = (f"{path}.moe.scale", IDENTITY)
    names[f"{hf_name}.router.per_expert_scale"] = (f"{path}.moe.expert_scale", IDENTITY)
    for p in ("gate_up", "down"):
        kernel = f"{path}.moe.experts.{p}.kernel"
        names[f"{hf_name}.experts.{p}_proj"] = (kernel, TRANSPOSE_EXPERTS)
    return names


def unused(cfg: Gemma4Config) -> frozenset[str]:
    """Names of keys and values in released checkpoints, of layers that share another's."""
    shared = [i for i in range(cfg.layers) if cfg.kv_source_layer(i) != i]
    return frozenset(
        f"model.layers.{i}.self_attn.{part}.weight"
        for i in shared
        for part in ("k_proj", "v_proj", "k_norm")
    )
