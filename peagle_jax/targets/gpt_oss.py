"""GPT-OSS decoder (arXiv:2508.10925), which also returns aux hidden states.

It has attention sinks, a sliding window in every other layer, and experts with a clamped SwiGLU
that may stay in MXFP4. The file reads top to bottom: config, router and experts, model, param
table. Numerics follow transformers' modeling_gpt_oss.py (5.23).
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
from peagle_jax.layers import Attention, Decoder, Experts, LateRMSNorm, Linear, PreNormBlock, Rope
from peagle_jax.targets import config, param_names
from peagle_jax.weights import IDENTITY, Fields, ParamTable

DEFAULT_THETA = 150_000.0  # configuration_gpt_oss.py, as what `_with_rope` adds


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(config.TargetConfig):
    """Shape of one GPT-OSS checkpoint.

    Attributes:
      mlp_dim: width of one expert's MLP.
      experts: number of experts in a layer.
      experts_per_token: how many of them each token goes to.
      swiglu_limit: to which the inputs of an expert's SwiGLU are clamped.
      swiglu_alpha: factor in the sigmoid of that SwiGLU.
      packed: the experts stay in MXFP4 and are decoded when they are used.
    """

    experts: int
    experts_per_token: int
    swiglu_limit: float
    swiglu_alpha: float
    packed: bool

    @classmethod
    def from_hf(
        cls,
        hf: Mapping,
        *,
        aux_hidden_state_layers: tuple[int, ...] | None,
        dtype: DTypeLike,
        where: str,
    ) -> "GptOssConfig":
        """Reads a checkpoint's config.json, with `packed` False; see TargetConfig.from_hf."""
        f = Fields(hf, where, "a GPT-OSS config")
        layers, head_dim = config.read_num_layers(f), f.get_int("head_dim")
        heads, kv_heads = config.read_heads(f)
        experts = f.get_int("num_local_experts")
        experts_per_token = f.get_int("num_experts_per_tok")
        config.check_experts_per_token(f, experts_per_token, experts, "num_local_experts")
        # the defaults of configuration_gpt_oss.py, here and for swiglu_limit and swiglu_alpha
        alternating = ["sliding_attention", "full_attention"] * layers
        layer_types = config.read_layer_types(f, layers, alternating[:layers])
        return cls(
            vocab=f.get_int("vocab_size"),
            layers=layers,
            dim=f.get_int("hidden_size"),
            mlp_dim=f.get_int("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=Rope.from_hf(_with_rope(hf), head_dim, where, DEFAULT_THETA),
            norm_eps=f.get_float("rms_norm_eps"),
            attention_bias=f.get_bool("attention_bias"),
            tied_embeddings=f.get_bool("tie_word_embeddings", False),
            windows=config.windows_of_layers(layer_types, f.get_int("sliding_window")),
            context=f.get_int("max_position_embeddings"),
            aux_hidden_state_layers=config.read_aux_layers(f, aux_hidden_state_layers, layers),
            dtype=dtype,
            stop_ids=config.read_stop_ids(hf, where),
            source=json.dumps(dict(hf)),
            experts=experts,
            experts_per_token=experts_per_token,
            # older files have neither key; their hidden_act "silu" is not what is computed
            swiglu_limit=f.get_float("swiglu_limit", 7.0),
            swiglu_alpha=f.get_float("swiglu_alpha", 1.702),
            packed=False,
        )


def _with_rope(hf: Mapping) -> Mapping:
    """The config with what configuration_gpt_oss.py (transformers 5.24) says where it is silent."""
    if hf.get("rope_parameters") is not None or hf.get("rope_scaling"):
        return hf
    parameters = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    parameters |= {"truncate": False, "original_max_position_embeddings": 4096}
    return {**hf, "rope_parameters": parameters}


class SparseMLP(nnx.Module):
    """A mixture of experts: the k largest router logits, then softmax over those alone."""

    def __init__(self, cfg: GptOssConfig, *, rngs: nnx.Rngs):
        self.router = Linear(cfg.dim, cfg.experts, bias=True, dtype=cfg.dtype, rngs=rngs)
        self.experts = Experts(
            cfg.experts,
            cfg.dim,
            cfg.mlp_dim,
            ClampedSwiGLU(cfg.swiglu_limit, cfg.swiglu_alpha),
            bias=True,
            packed=cfg.packed,
            dtype=cfg.dtype,
            rngs=rngs,
        )
        self.experts_per_token = cfg.experts_per_token

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        rows, k, router = x.reshape(-1, x.shape[-1]), self.experts_per_token, self.router
        assert router.bias is not None
        routed = routing.route(rows, router.kernel[...], router.bias[...], k, normalized=True)
        if routed is not None:
            routing_weights, topk_ids = routed
            return self.experts(x, topk_ids, routing_weights)
        topk_logits, topk_ids = jax.lax.top_k(router(rows), k)
        return self.experts(x, topk_ids, jax.nn.softmax(topk_logits, axis=-1))


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """`(up + 1) * gate * sigmoid(alpha * gate)` of clamped gate and up.

    The columns of gate and up alternate: gate, up, gate, up, ..

    Attributes:
      limit: gate is clamped to at most this, up to -limit .. limit.
      alpha: factor in the sigmoid.
    """

    limit: float
    alpha: float

    def __call__(self, x: Float[Array, "*rows I2"]) -> Float[Array, "*rows I"]:
        gate = jnp.minimum(x[..., ::2], self.limit)
        up = jnp.clip(x[..., 1::2], -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class GptOss(Decoder):
    """Pre-norm decoder with attention sinks, whose MLPs are mixtures of experts."""

    def __init__(self, cfg: GptOssConfig, *, rngs: nnx.Rngs):
        def norm() -> LateRMSNorm:
            return LateRMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

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
    """Checkpoint name -> (path of our parameter, transform), of every tensor."""
    names = param_names.embedding_norm_and_lm_head(tied=cfg.tied_embeddings)
    for i in range(cfg.layers):
        hf_name, path = f"model.layers.{i}", f"blocks.{i}"
        names |= param_names.pre_norms(hf_name, path)
        names |= param_names.attention(hf_name, path, bias=cfg.attention_bias, qk_norm=False)
        names |= param_names.linear(f"{hf_name}.mlp.router", f"{path}.mlp.router", bias=True)
        names[f"{hf_name}.self_attn.sinks"] = (f"{path}.attn.sinks", IDENTITY)
        for p in ("gate_up", "down"):
            hf_experts, experts = f"{hf_name}.mlp.experts.{p}_proj", f"{path}.mlp.experts.{p}"
            if cfg.packed:
                names[f"{hf_experts}_blocks"] = (f"{experts}.blocks", IDENTITY)
                names[f"{hf_experts}_scales"] = (f"{experts}.scales", IDENTITY)
            else:  # without ".weight", and stored as [E, in, out]
                names[hf_experts] = (f"{experts}.kernel", IDENTITY)
            names[f"{hf_experts}_bias"] = (f"{experts}.bias", IDENTITY)
    return names
