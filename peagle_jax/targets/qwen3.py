"""Qwen3 dense decoder (arXiv:2505.09388), which also returns aux hidden states.

The file reads top to bottom: config, model, param table, export. Numerics follow transformers'
modeling_qwen3.py (5.23).
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
class Qwen3Config(config.TargetConfig):
    """Shape of one Qwen3 checkpoint."""

    @classmethod
    def from_hf(
        cls,
        hf: Mapping,
        *,
        aux_hidden_state_layers: tuple[int, ...] | None,
        dtype: DTypeLike,
        where: str,
    ) -> "Qwen3Config":
        """Reads a checkpoint's config.json; see TargetConfig.from_hf."""
        f = Fields(hf, where, "a Qwen3 config")
        f.require("hidden_act", "silu", "the MLP is gated by SiLU")
        layers, head_dim = config.read_num_layers(f), f.get_int("head_dim")
        heads, kv_heads = config.read_heads(f)
        return cls(
            vocab=f.get_int("vocab_size"),
            layers=layers,
            dim=f.get_int("hidden_size"),
            mlp_dim=f.get_int("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=Rope.from_hf(hf, head_dim, where),
            norm_eps=f.get_float("rms_norm_eps"),
            # configuration_qwen3.py's defaults: transformers writes only what differs from them
            attention_bias=f.get_bool("attention_bias", False),
            tied_embeddings=f.get_bool("tie_word_embeddings", False),
            windows=_windows(f, layers),
            context=f.get_int("max_position_embeddings"),
            aux_hidden_state_layers=config.read_aux_layers(f, aux_hidden_state_layers, layers),
            dtype=dtype,
            stop_ids=config.read_stop_ids(hf, where),
            source=None,
        )


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer.

    Layers only slide with `use_sliding_window`, and then from layer `max_window_layers` on, unless
    `layer_types` says which.
    """
    window = config.read_window(f)
    if not f.get_bool("use_sliding_window", False) or window is None:
        return (None,) * layers
    first = f.get_int("max_window_layers", 28, least=0)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return config.windows_of_layers(config.read_layer_types(f, layers, default), window)


class Qwen3(Decoder):
    """Pre-norm decoder whose queries and keys are normalized."""

    def __init__(self, cfg: Qwen3Config, *, rngs: nnx.Rngs):
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
                qk_norm=True,
                eps=cfg.norm_eps,
                window=cfg.windows[layer],
                dtype=cfg.dtype,
                rngs=rngs,
            )
            mlp = MLP(cfg.dim, cfg.mlp_dim, dtype=cfg.dtype, rngs=rngs)
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


def table(cfg: Qwen3Config) -> ParamTable:
    """Checkpoint name -> (path of our parameter, transform), of every tensor."""
    names = param_names.embedding_norm_and_lm_head(tied=cfg.tied_embeddings)
    for i in range(cfg.layers):
        hf_name, path = f"model.layers.{i}", f"blocks.{i}"
        names |= param_names.pre_norms(hf_name, path)
        names |= param_names.mlp(hf_name, path, bias=False)
        names |= param_names.attention(hf_name, path, bias=cfg.attention_bias, qk_norm=True)
    return names


def to_hf(cfg: Qwen3Config, dtype_name: str) -> dict:
    """The config.json of an exported folder; `from_hf` reads back what this writes.

    Args:
      dtype_name: of the exported weights, for example "bfloat16".
    """
    window = next((w for w in cfg.windows if w is not None), None)
    stop_ids = list(cfg.stop_ids) if len(cfg.stop_ids) > 1 else next(iter(cfg.stop_ids), None)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": cfg.vocab,
        "num_hidden_layers": cfg.layers,
        "hidden_size": cfg.dim,
        "intermediate_size": cfg.mlp_dim,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": json.loads(cfg.rope.source),
        "attention_bias": cfg.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": cfg.tied_embeddings,
        "max_position_embeddings": cfg.context,
        "use_cache": True,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": cfg.layers if window is None else cfg.windows.index(window),
        "layer_types": [
            "full_attention" if w is None else "sliding_attention" for w in cfg.windows
        ],
        "bos_token_id": None,
        "eos_token_id": stop_ids,
        "pad_token_id": None,
        "dtype": dtype_name,
    }
