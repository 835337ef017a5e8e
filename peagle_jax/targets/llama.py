"""Llama 3 decoder (arXiv:2407.21783) with taps, as a pure function of (weights, tokens, attention).

Reads top to bottom: config, model, weight table. Numerics follow transformers' modeling_llama.py (5.23).
"""

import dataclasses
import json
from collections.abc import Mapping

from flax import nnx
from jax.typing import DTypeLike

from peagle_jax.layers import MLP, Attention, Decoder, PreNormBlock, RMSNorm, Rope
from peagle_jax.targets import config, names
from peagle_jax.weights import Fields, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(config.TargetConfig):
    """Shape of one Llama checkpoint."""

    mlp_bias: bool

    @classmethod
    def from_hf(cls, hf: Mapping, *, taps: tuple[int, ...] | None, dtype: DTypeLike, where: str) -> "LlamaConfig":
        """Builds the config from a checkpoint's config.json; `taps` None means vLLM's choice, (2, L//2, L-3).

        Raises:
          InputError: a key is missing, contradicts another one, or asks for what this model does not compute.
        """
        f = Fields(hf, where, "a Llama config")
        f.only("hidden_act", "silu", "the MLP is gated by SiLU")
        layers, dim, heads = config.read_layers(f), f.whole("hidden_size"), f.whole("num_attention_heads")
        kv_heads = f.whole("num_key_value_heads", heads)  # configuration_llama.py; so is head_dim
        head_dim = f.whole("head_dim", max(1, dim // heads))
        config.check_groups(f, heads, kv_heads, "num_key_value_heads")
        return cls(
            vocab=f.whole("vocab_size"), layers=layers, dim=dim, mlp_dim=f.whole("intermediate_size"), heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, rope=Rope.from_hf(hf, head_dim, where), norm_eps=float(f.number("rms_norm_eps")),
            # transformers writes only what differs from these class defaults
            attention_bias=f.flag("attention_bias", False), mlp_bias=f.flag("mlp_bias", False),
            tied_embeddings=f.flag("tie_word_embeddings", False), windows=(None,) * layers, context=f.whole("max_position_embeddings"),
            taps=config.read_taps(f, taps, layers), dtype=dtype, stop_ids=config.read_stops(hf), source=json.dumps(dict(hf)),
        )  # fmt: skip


class Llama(Decoder):
    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs):
        def block(layer: int) -> PreNormBlock:
            attention = Attention(
                cfg.dim, cfg.dim, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.rope, bias=cfg.attention_bias, qk_norm=False,
                eps=cfg.norm_eps, window=cfg.windows[layer], dtype=cfg.dtype, rngs=rngs,
            )  # fmt: skip
            return PreNormBlock(norm(), attention, norm(), MLP(cfg.dim, cfg.mlp_dim, bias=cfg.mlp_bias, dtype=cfg.dtype, rngs=rngs))

        norm = lambda: RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)  # noqa: E731
        super().__init__(cfg.vocab, cfg.dim, cfg.layers, block, norm(), taps=cfg.taps, tied=cfg.tied_embeddings, dtype=cfg.dtype, rngs=rngs)


def table(cfg: LlamaConfig) -> Table:
    """Checkpoint name -> (our path, layout): the one list that loading, exporting and completeness checks read."""
    result = names.frame(cfg.tied_embeddings)
    for i in range(cfg.layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        result |= names.block_norms(theirs, ours) | names.mlp(theirs, ours, bias=cfg.mlp_bias)
        result |= names.attention(theirs, ours, bias=cfg.attention_bias, qk_norm=False)
    return result
