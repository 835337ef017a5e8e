"""Qwen3 mixture-of-experts decoder (arXiv:2505.09388; Qwen3-Coder-30B-A3B) with taps.

Reads top to bottom: config, router and experts, model, weight table. Numerics follow transformers' modeling_qwen3_moe.py (5.23).
"""

import dataclasses
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

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
from peagle_jax.types import InputError
from peagle_jax.weights import TRANSPOSE, Fields, ParamTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(config.TargetConfig):
    """Shape of one Qwen3-MoE checkpoint; `mlp_dim` is that of its dense layers, of which most have none."""

    experts: int
    chosen: int  # experts a token
    expert_dim: int
    normalize_chosen: bool  # whether the chosen experts' probabilities are divided by their sum
    sparse: tuple[bool, ...]  # which layers have experts

    @classmethod
    def from_hf(
        cls,
        hf: Mapping,
        *,
        aux_hidden_state_layers: tuple[int, ...] | None,
        dtype: DTypeLike,
        where: str,
    ) -> "Qwen3MoeConfig":
        """Builds the config from a checkpoint's config.json; `taps` None means vLLM's choice, (2, L//2, L-3).

        Raises:
          InputError: a key is missing, contradicts another one, or asks for what this model does not compute.
        """
        f = Fields(hf, where, "a Qwen3-MoE config")
        f.require("hidden_act", "silu", "the MLP is gated by SiLU")
        layers, dim = config.read_layers(f), f.get_int("hidden_size")
        heads, kv_heads = config.read_heads(f)
        head_dim = f.get_int(
            "head_dim", max(1, dim // heads)
        )  # transformers' config class has none of its own
        # one name is the hub's, the other the one transformers writes
        experts = f.get_int("num_local_experts" if hf.get("num_experts") is None else "num_experts")
        chosen, step, dense = (
            f.get_int("num_experts_per_tok"),
            f.get_int("decoder_sparse_step"),
            f.get_ints("mlp_only_layers", []),
        )
        if chosen > experts:
            raise InputError(
                where,
                "num_experts_per_tok must be at most num_experts",
                f"{chosen} of {experts}",
                "mend the config",
            )
        window = (
            f.get_int("sliding_window", None) if f.get_bool("use_sliding_window", False) else None
        )
        return cls(
            vocab=f.get_int("vocab_size"),
            layers=layers,
            dim=dim,
            mlp_dim=f.get_int("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=Rope.from_hf(hf, head_dim, where),
            norm_eps=float(f.get_float("rms_norm_eps")),
            attention_bias=f.get_bool("attention_bias", False),
            tied_embeddings=f.get_bool("tie_word_embeddings", False),
            windows=(window,) * layers,
            context=f.get_int("max_position_embeddings"),
            aux_hidden_state_layers=config.read_aux_layers(f, aux_hidden_state_layers, layers),
            dtype=dtype,
            stop_ids=config.read_stops(hf),
            source=json.dumps(dict(hf)),
            experts=experts,
            chosen=chosen,
            expert_dim=f.get_int("moe_intermediate_size"),
            normalize_chosen=f.get_bool("norm_topk_prob"),
            sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        )


class SparseMLP(nnx.Module):
    """Probabilities of all experts in float32, the k most probable ones, their gated MLPs."""

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
        self.chosen, self.normalize = cfg.chosen, cfg.normalize_chosen

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        logits = self.router(x.reshape(-1, x.shape[-1]))
        weight, chosen = jax.lax.top_k(
            jax.nn.softmax(logits.astype(jnp.float32), axis=-1), self.chosen
        )
        if self.normalize:
            weight = weight / weight.sum(axis=-1, keepdims=True)
        return self.experts(x, chosen, weight.astype(logits.dtype))


class Qwen3Moe(Decoder):
    def __init__(self, cfg: Qwen3MoeConfig, *, rngs: nnx.Rngs):
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
            mlp = (
                SparseMLP(cfg, rngs=rngs)
                if cfg.sparse[layer]
                else MLP(cfg.dim, cfg.mlp_dim, dtype=cfg.dtype, rngs=rngs)
            )
            return PreNormBlock(norm(), attention, norm(), mlp)

        def norm():
            return RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

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
    """Checkpoint name -> (our path, layout): the one list that loading, exporting and completeness checks read."""
    result = param_names.frame(cfg.tied_embeddings)
    halves = {"gate": slice(0, cfg.expert_dim), "up": slice(cfg.expert_dim, None)}
    for i in range(cfg.layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        result |= param_names.block_norms(theirs, ours) | param_names.attention(
            theirs, ours, bias=cfg.attention_bias, qk_norm=True
        )
        if not cfg.sparse[i]:
            result |= param_names.mlp(theirs, ours, bias=False)
            continue
        result[f"{theirs}.mlp.gate.weight"] = (f"{ours}.mlp.router.kernel", TRANSPOSE)
        for e in range(cfg.experts):  # one tensor an expert on disk, one stack of all here
            expert = f"{theirs}.mlp.experts.{e}"
            for p, half in halves.items():
                result[f"{expert}.{p}_proj.weight"] = (
                    f"{ours}.mlp.experts.gate_up.kernel",
                    TRANSPOSE.at(e, slice(None), half),
                )
            result[f"{expert}.down_proj.weight"] = (
                f"{ours}.mlp.experts.down.kernel",
                TRANSPOSE.at(e),
            )
    return result
