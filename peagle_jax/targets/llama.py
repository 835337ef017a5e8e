"""Llama 3 decoder (arXiv:2407.21783), which also returns aux hidden states.

The file reads top to bottom: config, model, param table. Numerics follow transformers'
modeling_llama.py (5.23).
"""

import dataclasses
import json
from collections.abc import Mapping

from flax import nnx
from jax.typing import DTypeLike

from peagle_jax.layers import MLP, Attention, Decoder, PreNormBlock, RMSNorm, Rope
from peagle_jax.targets import config, param_names
from peagle_jax.weights import Fields, ParamTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(config.TargetConfig):
    """Shape of one Llama checkpoint.

    Attributes:
      mlp_bias: whether the matrices of the MLP have biases.
    """

    mlp_bias: bool

    @classmethod
    def from_hf(
        cls,
        hf: Mapping,
        *,
        aux_hidden_state_layers: tuple[int, ...] | None,
        dtype: DTypeLike,
        where: str,
    ) -> "LlamaConfig":
        """Reads a checkpoint's config.json; see TargetConfig.from_hf."""
        f = Fields(hf, where, "a Llama config")
        f.require("hidden_act", "silu", "the MLP is gated by SiLU")
        layers = config.read_num_layers(f)
        dim, heads = f.get_int("hidden_size"), f.get_int("num_attention_heads")
        # these defaults, and those of the booleans below, are configuration_llama.py's:
        # transformers writes only what differs from them
        kv_heads = f.get_int("num_key_value_heads", heads)
        head_dim = f.get_int("head_dim", max(1, dim // heads))
        config.check_kv_heads(f, heads, kv_heads, "num_key_value_heads")
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
            mlp_bias=f.get_bool("mlp_bias", False),
            tied_embeddings=f.get_bool("tie_word_embeddings", False),
            windows=(None,) * layers,
            context=f.get_int("max_position_embeddings"),
            aux_hidden_state_layers=config.read_aux_layers(f, aux_hidden_state_layers, layers),
            dtype=dtype,
            stop_ids=config.read_stop_ids(hf, where),
            source=json.dumps(dict(hf)),
        )


class Llama(Decoder):
    """Pre-norm decoder with grouped-query attention and a gated MLP."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

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
                eps=cfg.norm_eps,
                window=cfg.windows[layer],
                dtype=cfg.dtype,
                rngs=rngs,
            )
            mlp = MLP(cfg.dim, cfg.mlp_dim, bias=cfg.mlp_bias, dtype=cfg.dtype, rngs=rngs)
            return PreNormBlock(norm(), attention, norm(), mlp)

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


def table(cfg: LlamaConfig) -> ParamTable:
    """Checkpoint name -> (path of our parameter, transform), of every tensor."""
    names = param_names.embedding_norm_and_lm_head(tied=cfg.tied_embeddings)
    for i in range(cfg.layers):
        hf_name, path = f"model.layers.{i}", f"blocks.{i}"
        names |= param_names.pre_norms(hf_name, path)
        names |= param_names.mlp(hf_name, path, bias=cfg.mlp_bias)
        names |= param_names.attention(hf_name, path, bias=cfg.attention_bias, qk_norm=False)
    return names
