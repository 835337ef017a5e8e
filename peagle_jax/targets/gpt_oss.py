"""GPT-OSS decoder (arXiv:2508.10925) with taps: attention sinks, alternating windows, clamped experts, MXFP4.

Reads top to bottom: config, router and experts, model, weight table. Numerics follow transformers' modeling_gpt_oss.py (5.23).
"""

import dataclasses
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from peagle_jax.layers import Attention, Decoder, Experts, LateRMSNorm, Linear, PreNormBlock, Rope
from peagle_jax.targets import config, param_names
from peagle_jax.types import InputError
from peagle_jax.weights import IDENTITY, Fields, ParamTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(config.TargetConfig):
    """Shape of one GPT-OSS checkpoint; `mlp_dim` is that of one expert."""

    experts: int
    chosen: int  # experts a token
    limit: float  # the experts' activations are clamped to
    alpha: float  # of their sigmoid
    packed: bool  # experts stay in MXFP4 and are decoded when used

    @classmethod
    def from_hf(
        cls,
        hf: Mapping,
        *,
        aux_hidden_state_layers: tuple[int, ...] | None,
        dtype: DTypeLike,
        where: str,
    ) -> "GptOssConfig":
        """Builds the config from a checkpoint's config.json; `taps` None means vLLM's choice, (2, L//2, L-3).

        Raises:
          InputError: a key is missing, contradicts another one, or asks for what this model does not compute.
        """
        f = Fields(hf, where, "a GPT-OSS config")
        layers, head_dim = config.read_layers(f), f.get_int("head_dim")
        heads, kv_heads = config.read_heads(f)
        experts, chosen = f.get_int("num_local_experts"), f.get_int("num_experts_per_tok")
        if chosen > experts:
            raise InputError(
                where,
                "num_experts_per_tok must be at most num_local_experts",
                f"{chosen} of {experts}",
                "mend the config",
            )
        kinds = [
            "sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)
        ]  # configuration_gpt_oss.py
        return cls(
            vocab=f.get_int("vocab_size"),
            layers=layers,
            dim=f.get_int("hidden_size"),
            mlp_dim=f.get_int("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=Rope.from_hf(hf, head_dim, where),
            norm_eps=float(f.get_float("rms_norm_eps")),
            attention_bias=f.get_bool("attention_bias"),
            tied_embeddings=f.get_bool("tie_word_embeddings", False),
            windows=config.windows_of(
                config.read_kinds(f, layers, kinds), f.get_int("sliding_window")
            ),
            context=f.get_int("max_position_embeddings"),
            aux_hidden_state_layers=config.read_aux_layers(f, aux_hidden_state_layers, layers),
            dtype=dtype,
            stop_ids=config.read_stops(hf),
            source=json.dumps(dict(hf)),
            experts=experts,
            chosen=chosen,
            # the class defaults, of which older files say nothing; hidden_act "silu" is not what is computed
            limit=float(f.get_float("swiglu_limit", 7.0)),
            alpha=float(f.get_float("swiglu_alpha", 1.702)),
            packed=False,
        )


class SparseMLP(nnx.Module):
    """The k largest router logits, softmax over those alone, their clamped MLPs."""

    def __init__(self, cfg: GptOssConfig, *, rngs: nnx.Rngs):
        self.router = Linear(cfg.dim, cfg.experts, bias=True, dtype=cfg.dtype, rngs=rngs)
        self.experts = Experts(
            cfg.experts,
            cfg.dim,
            cfg.mlp_dim,
            ClampedSwiGLU(cfg.limit, cfg.alpha),
            bias=True,
            packed=cfg.packed,
            dtype=cfg.dtype,
            rngs=rngs,
        )
        self.chosen = cfg.chosen

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        weight, chosen = jax.lax.top_k(self.router(x.reshape(-1, x.shape[-1])), self.chosen)
        return self.experts(x, chosen, jax.nn.softmax(weight, axis=-1))


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, both clamped first; gate and up come in turns."""

    limit: float
    alpha: float

    def __call__(self, x: Float[Array, "*rows I2"]) -> Float[Array, "*rows I"]:
        gate, up = (
            jnp.minimum(x[..., ::2], self.limit),
            jnp.clip(x[..., 1::2], -self.limit, self.limit),
        )
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class GptOss(Decoder):
    def __init__(self, cfg: GptOssConfig, *, rngs: nnx.Rngs):
        def block(layer: int) -> PreNormBlock:
            attention = Attention(
                cfg.dim,
                cfg.dim,
                cfg.heads,
                cfg.kv_heads,
                cfg.head_dim,
                cfg.rope,
                bias=cfg.attention_bias,
                qk_norm=False,
                sinks=True,
                eps=cfg.norm_eps,
                window=cfg.windows[layer],
                dtype=cfg.dtype,
                rngs=rngs,
            )
            return PreNormBlock(norm(), attention, norm(), SparseMLP(cfg, rngs=rngs))

        def norm():
            return LateRMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

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


def table(cfg: GptOssConfig) -> ParamTable:
    """Checkpoint name -> (our path, layout): the one list that loading, exporting and completeness checks read."""
    result = param_names.frame(cfg.tied_embeddings)
    for i in range(cfg.layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        result |= param_names.block_norms(theirs, ours) | param_names.attention(
            theirs, ours, bias=cfg.attention_bias, qk_norm=False
        )
        result |= param_names.linear(f"{theirs}.mlp.router", f"{ours}.mlp.router", bias=True)
        result[f"{theirs}.self_attn.sinks"] = (f"{ours}.attn.sinks", IDENTITY)
        for p in ("gate_up", "down"):  # without ".weight", and [in, out] already
            stack, bank = f"{theirs}.mlp.experts.{p}_proj", f"{ours}.mlp.experts.{p}"
            kept = {"_blocks": "blocks", "_scales": "scales"} if cfg.packed else {"": "kernel"}
            result |= {
                stack + suffix: (f"{bank}.{part}", IDENTITY) for suffix, part in kept.items()
            }
            result[f"{stack}_bias"] = (f"{bank}.bias", IDENTITY)
    return result
