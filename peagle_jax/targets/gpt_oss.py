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
from peagle_jax.targets import config, names
from peagle_jax.types import InputError
from peagle_jax.weights import SAME, Fields, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(config.TargetConfig):
    """Shape of one GPT-OSS checkpoint; `mlp_dim` is that of one expert."""

    experts: int
    chosen: int  # experts a token
    limit: float  # the experts' activations are clamped to
    alpha: float  # of their sigmoid
    packed: bool  # experts stay in MXFP4 and are decoded when used

    @classmethod
    def from_hf(cls, hf: Mapping, *, taps: tuple[int, ...] | None, dtype: DTypeLike, where: str) -> "GptOssConfig":
        """Builds the config from a checkpoint's config.json; `taps` None means vLLM's choice, (2, L//2, L-3).

        Raises:
          InputError: a key is missing, contradicts another one, or asks for what this model does not compute.
        """
        f = Fields(hf, where, "a GPT-OSS config")
        layers, head_dim = config.read_layers(f), f.whole("head_dim")
        heads, kv_heads = config.read_heads(f)
        experts, chosen = f.whole("num_local_experts"), f.whole("num_experts_per_tok")
        if chosen > experts:
            raise InputError(where, "num_experts_per_tok must be at most num_local_experts", f"{chosen} of {experts}", "mend the config")
        kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]  # configuration_gpt_oss.py
        return cls(
            vocab=f.whole("vocab_size"), layers=layers, dim=f.whole("hidden_size"), mlp_dim=f.whole("intermediate_size"),
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=Rope.from_hf(hf, head_dim, where),
            norm_eps=float(f.number("rms_norm_eps")), attention_bias=f.flag("attention_bias"),
            tied_embeddings=f.flag("tie_word_embeddings", False),
            windows=config.windows_of(config.read_kinds(f, layers, kinds), f.whole("sliding_window")),
            context=f.whole("max_position_embeddings"), taps=config.read_taps(f, taps, layers), dtype=dtype,
            stop_ids=config.read_stops(hf), source=json.dumps(dict(hf)), experts=experts, chosen=chosen,
            # the class defaults, of which older files say nothing; hidden_act "silu" is not what is computed
            limit=float(f.number("swiglu_limit", 7.0)), alpha=float(f.number("swiglu_alpha", 1.702)), packed=False,
        )  # fmt: skip


class SparseMLP(nnx.Module):
    """The k largest router logits, softmax over those alone, their clamped MLPs."""

    def __init__(self, cfg: GptOssConfig, *, rngs: nnx.Rngs):
        self.router = Linear(cfg.dim, cfg.experts, bias=True, dtype=cfg.dtype, rngs=rngs)
        self.experts = Experts(
            cfg.experts, cfg.dim, cfg.mlp_dim, Clamped(cfg.limit, cfg.alpha), bias=True, packed=cfg.packed, dtype=cfg.dtype, rngs=rngs
        )  # fmt: skip
        self.chosen = cfg.chosen

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        weight, chosen = jax.lax.top_k(self.router(x.reshape(-1, x.shape[-1])), self.chosen)
        return self.experts(x, chosen, jax.nn.softmax(weight, axis=-1))


@dataclasses.dataclass(frozen=True)
class Clamped:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, both clamped first; gate and up come in turns."""

    limit: float
    alpha: float

    def __call__(self, x: Float[Array, "*rows I2"]) -> Float[Array, "*rows I"]:
        gate, up = jnp.minimum(x[..., ::2], self.limit), jnp.clip(x[..., 1::2], -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class GptOss(Decoder):
    def __init__(self, cfg: GptOssConfig, *, rngs: nnx.Rngs):
        def block(layer: int) -> PreNormBlock:
            attention = Attention(
                cfg.dim, cfg.dim, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.rope, bias=cfg.attention_bias, qk_norm=False, sinks=True,
                eps=cfg.norm_eps, window=cfg.windows[layer], dtype=cfg.dtype, rngs=rngs,
            )  # fmt: skip
            return PreNormBlock(norm(), attention, norm(), SparseMLP(cfg, rngs=rngs))

        norm = lambda: LateRMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)  # noqa: E731
        super().__init__(cfg.vocab, cfg.dim, cfg.layers, block, norm(), taps=cfg.taps, tied=cfg.tied_embeddings, dtype=cfg.dtype, rngs=rngs)


def table(cfg: GptOssConfig) -> Table:
    """Checkpoint name -> (our path, layout): the one list that loading, exporting and completeness checks read."""
    result = names.frame(cfg.tied_embeddings)
    for i in range(cfg.layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        result |= names.block_norms(theirs, ours) | names.attention(theirs, ours, bias=cfg.attention_bias, qk_norm=False)
        result |= names.linear(f"{theirs}.mlp.router", f"{ours}.mlp.router", bias=True)
        result[f"{theirs}.self_attn.sinks"] = (f"{ours}.attn.sinks", SAME)
        for p in ("gate_up", "down"):  # without ".weight", and [in, out] already
            stack, bank = f"{theirs}.mlp.experts.{p}_proj", f"{ours}.mlp.experts.{p}"
            kept = {"_blocks": "blocks", "_scales": "scales"} if cfg.packed else {"": "kernel"}
            result |= {stack + suffix: (f"{bank}.{part}", SAME) for suffix, part in kept.items()}
            result[f"{stack}_bias"] = (f"{bank}.bias", SAME)
    return result
