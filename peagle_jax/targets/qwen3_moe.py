"""Qwen3 mixture-of-experts decoder (arXiv:2505.09388; Qwen3-Coder-30B-A3B) with aux hidden states.

The file reads top to bottom: config, router and experts, model, param table. Numerics follow
transformers' modeling_qwen3_moe.py (5.23).
"""

import dataclasses
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from peagle_jax.kernels import routing
from peagle_jax.layers import (
    GLU,
    MLP,
    Attention,
    Decoder,
    Experts,
    Linear,
    PreNormBlock,
    RMSNorm,
    Rope,
)
from peagle_jax.targets import config, param_names
from peagle_jax.weights import TRANSPOSE, Fields, ParamTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(config.TargetConfig):
    """Shape of one Qwen3-MoE checkpoint.

    Attributes:
      mlp_dim: width of the MLP of layers without experts; most checkpoints have no such layer.
      experts: number of experts in a layer.
      experts_per_token: how many of them each token goes to.
      expert_dim: width of one expert's MLP.
      norm_topk_prob: whether the routing weights of a token are divided by their sum.
      is_moe_layer: for each layer, whether it has experts.
    """

    experts: int
    experts_per_token: int
    expert_dim: int
    norm_topk_prob: bool
    is_moe_layer: tuple[bool, ...]

    @classmethod
    def from_hf(
        cls,
        hf: Mapping,
        *,
        aux_hidden_state_layers: tuple[int, ...] | None,
        dtype: DTypeLike,
        where: str,
    ) -> "Qwen3MoeConfig":
        """Reads a checkpoint's config.json; see TargetConfig.from_hf."""
        f = Fields(hf, where, "a Qwen3-MoE config")
        f.require("hidden_act", "silu", "the MLP is gated by SiLU")
        layers, dim = config.read_num_layers(f), f.get_int("hidden_size")
        heads, kv_heads = config.read_heads(f)
        # transformers' config class has no head_dim of its own
        head_dim = f.get_int("head_dim", max(1, dim // heads))
        # checkpoints on the hub say num_experts, transformers writes num_local_experts
        has_num_experts = hf.get("num_experts") is not None
        experts = f.get_int("num_experts" if has_num_experts else "num_local_experts")
        experts_per_token = f.get_int("num_experts_per_tok")
        config.check_experts_per_token(f, experts_per_token, experts, "num_experts")
        # every `step`-th layer has experts, but for those that are listed as dense
        step, dense_layers = f.get_int("decoder_sparse_step"), f.get_ints("mlp_only_layers", [])
        is_moe_layer = tuple(i not in dense_layers and (i + 1) % step == 0 for i in range(layers))
        window = None
        if f.get_bool("use_sliding_window", False):
            window = config.read_window(f)
        return cls(
            vocab=f.get_int("vocab_size"),
            layers=layers,
            dim=dim,
            mlp_dim=f.get_int("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=Rope.from_hf(hf, head_dim, where),
            norm_eps=f.get_float("rms_norm_eps"),
            attention_bias=f.get_bool("attention_bias", False),
            tied_embeddings=f.get_bool("tie_word_embeddings", False),
            windows=(window,) * layers,
            context=f.get_int("max_position_embeddings"),
            aux_hidden_state_layers=config.read_aux_layers(f, aux_hidden_state_layers, layers),
            dtype=dtype,
            stop_ids=config.read_stop_ids(hf, where),
            source=json.dumps(dict(hf)),
            experts=experts,
            experts_per_token=experts_per_token,
            expert_dim=f.get_int("moe_intermediate_size"),
            norm_topk_prob=f.get_bool("norm_topk_prob"),
            is_moe_layer=is_moe_layer,
        )


class SparseMLP(nnx.Module):
    """A mixture of experts: softmax over all router logits in float32, then the top k of it."""

    def __init__(self, cfg: Qwen3MoeConfig, *, rngs: nnx.Rngs):
        self.router = Linear(cfg.dim, cfg.experts, dtype=cfg.dtype, rngs=rngs)
        self.experts = Experts(
            cfg.experts,
            cfg.dim,
            cfg.expert_dim,
            GLU(jax.nn.silu),
            bias=False,
            packed=False,
            dtype=cfg.dtype,
            rngs=rngs,
        )
        self.experts_per_token, self.norm_topk_prob = cfg.experts_per_token, cfg.norm_topk_prob

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        rows, k = x.reshape(-1, x.shape[-1]), self.experts_per_token
        routed = routing.route(
            rows, self.router.kernel[...], None, k, normalized=self.norm_topk_prob
        )
        if routed is not None:
            routing_weights, topk_ids = routed
            return self.experts(x, topk_ids, routing_weights)
        logits = self.router(rows)
        probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        routing_weights, topk_ids = jax.lax.top_k(probs, k)
        if self.norm_topk_prob:
            routing_weights = routing_weights / routing_weights.sum(axis=-1, keepdims=True)
        return self.experts(x, topk_ids, routing_weights.astype(logits.dtype))


class Qwen3Moe(Decoder):
    """Pre-norm decoder whose MLPs are mixtures of experts, in all layers or in some."""

    def __init__(self, cfg: Qwen3MoeConfig, *, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

        def mlp(layer: int) -> SparseMLP | MLP:
            if cfg.is_moe_layer[layer]:
                return SparseMLP(cfg, rngs=rngs)
            return MLP(cfg.dim, cfg.mlp_dim, dtype=cfg.dtype, rngs=rngs)

        def block(layer: int) -> PreNormBlock:
            attention = Attention(
                cfg.dim,
                cfg.dim,
                cfg.heads,
                cfg.kv_heads,
                cfg.head_dim,
                cfg.rope,
                bias=cfg.attention_bias,
                qk_norm=True,
                eps=cfg.norm_eps,
                window=cfg.windows[layer],
                dtype=cfg.dtype,
                rngs=rngs,
            )
            return PreNormBlock(norm(), attention, norm(), mlp(layer))

        super().__init__(
            cfg.vocab,
            cfg.dim,
            cfg.layers,
            block,
            norm(),
            aux_hidden_state_layers=cfg.aux_hidden_state_layers,
            tied=cfg.tied_embeddings,
            dtype=cfg.dtype,
            rngs=rngs,
        )


def table(cfg: Qwen3MoeConfig) -> ParamTable:
    """Checkpoint name -> (path of our parameter, transform), of every tensor."""
    names = param_names.embedding_norm_and_lm_head(tied=cfg.tied_embeddings)
    for i in range(cfg.layers):
        hf_name, path = f"model.layers.{i}", f"blocks.{i}"
        names |= param_names.pre_norms(hf_name, path)
        names |= param_names.attention(hf_name, path, bias=cfg.attention_bias, qk_norm=True)
        if cfg.is_moe_layer[i]:
            names |= _expert_names(cfg, f"{hf_name}.mlp", f"{path}.mlp")
        else:
            names |= param_names.mlp(hf_name, path, bias=False)
    return names


def _expert_names(cfg: Qwen3MoeConfig, hf_name: str, path: str) -> param_names.Names:
    """The router and the experts of a layer.

    The checkpoint has three tensors for each expert. Ours has two for all experts, of which the
    first holds the columns of `gate_proj` and then those of `up_proj`.
    """
    names: param_names.Names = {f"{hf_name}.gate.weight": (f"{path}.router.kernel", TRANSPOSE)}
    columns = {"gate": slice(0, cfg.expert_dim), "up": slice(cfg.expert_dim, None)}
    gate_up, down = f"{path}.experts.gate_up.kernel", f"{path}.experts.down.kernel"
    for e in range(cfg.experts):
        expert = f"{hf_name}.experts.{e}"
        for p, part in columns.items():
            names[f"{expert}.{p}_proj.weight"] = (gate_up, TRANSPOSE.at(e, slice(None), part))
        names[f"{expert}.down_proj.weight"] = (down, TRANSPOSE.at(e))
    return names
