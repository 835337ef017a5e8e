"""Qwen3 dense decoder (arXiv:2505.09388) with taps, as a pure function of (weights, tokens, attention).

Reads top to bottom: config, block, model, weight table. Numerics follow transformers' modeling_qwen3.py (5.23).
"""

import dataclasses
import json
from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle_jax.layers import MLP, Attention, Embedding, Linear, RMSNorm, Rope
from peagle_jax.types import Attend, InputError, KVCache, TargetOutput
from peagle_jax.weights import LINEAR, SAME, Fields, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Shape of one Qwen3 checkpoint. Every field is read by the model below."""

    vocab: int
    layers: int
    dim: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float
    attention_bias: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]  # sliding window of each layer in tokens, or None
    context: int  # longest sequence the checkpoint was made for, in tokens
    taps: tuple[int, ...]  # id i is the residual stream BEFORE layer i (vLLM's numbering); 0 is the embedding
    dtype: DTypeLike
    stop_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, hf: Mapping, *, taps: tuple[int, ...] | None, dtype: DTypeLike, where: str) -> "Qwen3Config":
        """Builds the config from a checkpoint's config.json; `taps` None means vLLM's choice, (2, L//2, L-3).

        Raises:
          InputError: a key is missing, contradicts another one, or asks for what this model does not compute.
        """
        f = Fields(hf, where, "a Qwen3 config")
        heads, layers, kv_heads, head_dim = (
            f.whole(key) for key in ("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim")
        )
        if heads % kv_heads:
            raise InputError(where, "num_attention_heads must be a multiple of num_key_value_heads", f"{heads} and {kv_heads}", "mend it")
        f.only("hidden_act", "silu", "the MLP is gated by SiLU")
        eos = hf.get("eos_token_id")
        config = cls(
            vocab=f.whole("vocab_size"), layers=layers, dim=f.whole("hidden_size"), mlp_dim=f.whole("intermediate_size"),
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=Rope.from_hf(hf, head_dim, where),
            norm_eps=float(f.number("rms_norm_eps")),
            # transformers writes only what differs from these class defaults (configuration_qwen3.py)
            attention_bias=f.flag("attention_bias", False), tied_embeddings=f.flag("tie_word_embeddings", False),
            windows=_windows(f, layers), context=f.whole("max_position_embeddings"),
            taps=default_taps(layers) if taps is None else tuple(taps), dtype=dtype,
            stop_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )  # fmt: skip
        if len(config.windows) != layers:
            raise InputError(where, f"layer_types must name all {layers} layers", len(config.windows), "mend the config")
        if bad := [t for t in config.taps if not 0 <= t <= layers]:
            raise InputError(where, f"tap ids must lie in 0..{layers} (0 is the embedding)", bad, "choose other taps")
        return config

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        return KVCache.empty(self.layers, batch, slots, self.kv_heads, self.head_dim, self.dtype)


def default_taps(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as vLLM and speculators choose them: (2, L//2, L-3).

    Below 7 layers those coincide or change order, and vLLM collects taps once each and in layer order; so there three
    ascending layers are spread out instead.
    """
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    return tuple(sorted({min(1, layers // 3), layers // 2, layers - 1}))


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    """Sliding only with `use_sliding_window`, and from layer `max_window_layers` on unless `layer_types` says which."""
    window = f.whole("sliding_window", None)
    if layers > 10_000:  # before as many are listed
        raise InputError(f.where, "num_hidden_layers must be at most 10,000", layers, "mend the config")
    if not f.flag("use_sliding_window", False) or window is None:
        return (None,) * layers
    first = f.whole("max_window_layers", 28, least=0)
    kinds = f.texts("layer_types", None) or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Block(nnx.Module):
    def __init__(self, cfg: Qwen3Config, layer: int, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)
        self.attn = Attention(
            cfg.dim, cfg.dim, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.rope, bias=cfg.attention_bias, qk_norm=True,
            eps=cfg.norm_eps, window=cfg.windows[layer], dtype=cfg.dtype, rngs=rngs,
        )  # fmt: skip
        self.mlp_norm = RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)
        self.mlp = MLP(cfg.dim, cfg.mlp_dim, dtype=cfg.dtype, rngs=rngs)

    def __call__(self, x, positions, layer: int, attend: Attend, state):
        y, state = self.attn(self.attn_norm(x), positions, layer, attend, state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


class Qwen3(nnx.Module):
    def __init__(self, cfg: Qwen3Config, *, rngs: nnx.Rngs):
        self.taps = cfg.taps
        self.embed = Embedding(cfg.vocab, cfg.dim, dtype=cfg.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(cfg, i, rngs=rngs) for i in range(cfg.layers)])
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)
        self.head = None if cfg.tied_embeddings else Linear(cfg.dim, cfg.vocab, dtype=cfg.dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend, state):
        """Returns (TargetOutput, attention state). Taps are part of the forward; jit drops those nobody reads."""
        x = self.embed(tokens)
        stream = [x]
        for i, block in enumerate(self.blocks):
            x, state = block(x, positions, i, attend, state)
            stream.append(x)
        features = jnp.concatenate([stream[t] for t in self.taps], axis=-1) if self.taps else x[..., :0]
        return TargetOutput(self.norm(x), features), state

    def unembed(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        return hidden @ self.output_weight()

    def output_weight(self) -> Float[Array, "D V"]:
        return self.embed.table[...].T if self.head is None else self.head.kernel[...]


def table(cfg: Qwen3Config) -> Table:
    """Checkpoint name -> (our path, layout): the one list that loading, exporting and completeness checks read."""
    names = {"model.embed_tokens.weight": ("embed.table", SAME), "model.norm.weight": ("norm.scale", SAME)}
    if not cfg.tied_embeddings:
        names["lm_head.weight"] = ("head.kernel", LINEAR)
    for i in range(cfg.layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        names |= {
            f"{theirs}.input_layernorm.weight": (f"{ours}.attn_norm.scale", SAME),
            f"{theirs}.post_attention_layernorm.weight": (f"{ours}.mlp_norm.scale", SAME),
            f"{theirs}.self_attn.q_norm.weight": (f"{ours}.attn.q_norm.scale", SAME),
            f"{theirs}.self_attn.k_norm.weight": (f"{ours}.attn.k_norm.scale", SAME),
        }
        for p in "qkvo":
            names[f"{theirs}.self_attn.{p}_proj.weight"] = (f"{ours}.attn.{p}.kernel", LINEAR)
            if cfg.attention_bias:
                names[f"{theirs}.self_attn.{p}_proj.bias"] = (f"{ours}.attn.{p}.bias", SAME)
        for p in ("gate", "up", "down"):
            names[f"{theirs}.mlp.{p}_proj.weight"] = (f"{ours}.mlp.{p}.kernel", LINEAR)
    return names


def to_hf(cfg: Qwen3Config, dtype_name: str) -> dict:
    """The config.json of an exported folder: `from_hf` reads back what this writes."""
    sliding = next((w for w in cfg.windows if w is not None), None)
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": cfg.vocab,
        "num_hidden_layers": cfg.layers, "hidden_size": cfg.dim, "intermediate_size": cfg.mlp_dim,
        "num_attention_heads": cfg.heads, "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.norm_eps, "rope_parameters": json.loads(cfg.rope.source),
        "attention_bias": cfg.attention_bias, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
        "tie_word_embeddings": cfg.tied_embeddings, "max_position_embeddings": cfg.context, "use_cache": True,
        "use_sliding_window": sliding is not None, "sliding_window": sliding,
        "max_window_layers": cfg.windows.index(sliding) if sliding is not None else cfg.layers,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in cfg.windows],
        "bos_token_id": None, "eos_token_id": list(cfg.stop_ids) if len(cfg.stop_ids) > 1 else next(iter(cfg.stop_ids), None),
        "pad_token_id": None, "dtype": dtype_name,
    }  # fmt: skip
