"""Gemma 4 text decoder with taps: two kinds of attention, four norms a layer, experts beside the MLP, per-layer embeddings, shared KV.

Reads top to bottom: config, attention, experts, block, model, weight table. Numerics follow transformers' modeling_gemma4.py (5.23).
"""

import dataclasses
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle_jax.layers import (
    GLU,
    MLP,
    Decoder,
    Embedding,
    Experts,
    LateRMSNorm,
    Linear,
    Rope,
    gelu_tanh,
    normal,
    normalize,
)
from peagle_jax.targets import config, param_names
from peagle_jax.types import Attend, AttentionRule, CacheShape, InputError, TargetOutput
from peagle_jax.weights import IDENTITY, TRANSPOSE, TRANSPOSE_EXPERTS, Fields, ParamTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(config.TargetConfig):
    """Shape of one Gemma 4 checkpoint. `kv_heads`, `head_dim` and `rope` are those of its sliding layers."""

    full_kv_heads: int  # of the layers that see everything; so are the next two
    full_head_dim: int
    full_rope: Rope
    k_is_v: bool  # full layers: values are the keys before their norm and rotation
    shared: int  # the last so many layers read the keys and values of the last layer before them of their kind
    double_wide: bool  # those layers' MLPs
    logit_cap: float | None
    experts: int | None  # beside every MLP; None: none
    chosen: int | None
    expert_dim: int | None
    ple_dim: int  # width of the embedding that every layer has of its own; 0: none
    ple_vocab: int

    @classmethod
    def from_hf(
        cls,
        hf: Mapping,
        *,
        aux_hidden_state_layers: tuple[int, ...] | None,
        dtype: DTypeLike,
        where: str,
    ) -> "Gemma4Config":
        """Builds the config from a checkpoint's config.json, of the text model or of the multimodal one around it.

        Raises:
          InputError: a key is missing, contradicts another one, or asks for what this model does not compute.
        """
        outer = Fields(hf, where, "a Gemma 4 config")
        f = (
            outer
            if hf.get("text_config") is None
            else Fields(outer.child("text_config").raw, where, "text_config")
        )
        _refuse_what_is_not_computed(f)
        layers, dim = config.read_layers(f), f.get_int("hidden_size")
        heads, kv_heads = config.read_heads(f)
        kinds = config.read_kinds(
            f,
            layers,
            ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        )
        kinds = (*kinds[:-1], "full_attention")  # configuration_gemma4.py
        shared, k_is_v = (
            f.get_int("num_kv_shared_layers", 0, least=0),
            f.get_bool("attention_k_eq_v", False),
        )
        if shared and set(kinds[: layers - shared]) != set(kinds):
            rule = "the layers before the num_kv_shared_layers last ones must hold one of every kind that these are of"
            raise InputError(where, rule, shared, "mend the config")
        full_head_dim, full_kv_heads = _full_layers(f, kinds, k_is_v, kv_heads)
        config.check_groups(f, heads, full_kv_heads, "num_global_key_value_heads")
        ropes, head_dim = f.child("rope_parameters"), f.get_int("head_dim")

        def rope(kind, size):
            return Rope.from_hf(
                {"rope_parameters": dict(ropes.child(kind).raw)}, size, f"{where}: {kind}"
            )

        moe, vocab = f.get_bool("enable_moe_block", False), f.get_int("vocab_size")
        ple_dim, ple_vocab = (
            f.get_int("hidden_size_per_layer_input", 0, least=0),
            f.get_int("vocab_size_per_layer_input", vocab),
        )
        if ple_dim and ple_vocab < vocab:
            rule = f"vocab_size_per_layer_input must be at least vocab_size, {vocab}"
            raise InputError(where, rule, ple_vocab, "use another checkpoint")
        width = (
            "expert_intermediate_size"
            if f.raw.get("moe_intermediate_size") is None
            else "moe_intermediate_size"
        )
        return cls(
            vocab=vocab,
            layers=layers,
            dim=dim,
            mlp_dim=f.get_int("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope("sliding_attention", head_dim),
            norm_eps=float(f.get_float("rms_norm_eps")),
            attention_bias=f.get_bool("attention_bias", False),
            tied_embeddings=outer.get_bool(
                "tie_word_embeddings", f.get_bool("tie_word_embeddings", True)
            ),
            windows=config.windows_of(kinds, f.get_int("sliding_window")),
            context=f.get_int("max_position_embeddings"),
            aux_hidden_state_layers=config.read_aux_layers(f, aux_hidden_state_layers, layers),
            dtype=dtype,
            stop_ids=config.read_stops(hf) or config.read_stops(f.raw),
            source=json.dumps(dict(hf)),
            full_kv_heads=full_kv_heads,
            full_head_dim=full_head_dim,
            full_rope=rope("full_attention", full_head_dim),
            k_is_v=k_is_v,
            shared=shared,
            double_wide=f.get_bool("use_double_wide_mlp", False),
            logit_cap=f.get_float("final_logit_softcapping", None),
            experts=f.get_int("num_experts") if moe else None,
            chosen=f.get_int("top_k_experts") if moe else None,
            expert_dim=f.get_int(width) if moe else None,
            ple_dim=ple_dim,
            ple_vocab=ple_vocab,
        )

    def kv_heads_of(self, layer: int) -> int:
        return self.full_kv_heads if self.is_full(layer) else self.kv_heads

    def is_full(self, layer: int) -> bool:
        return self.windows[layer] is None

    def reads_from(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: its own, or the last unshared one of its kind."""
        own = self.layers - self.shared
        return (
            layer
            if layer < own
            else max(i for i in range(own) if self.is_full(i) == self.is_full(layer))
        )

    def cache_shapes(self) -> tuple[CacheShape, ...]:
        own = range(self.layers - self.shared)
        sliding, full = (tuple(i for i in own if self.is_full(i) == kind) for kind in (False, True))
        window = next((w for w in self.windows if w is not None), None)
        shapes = (
            CacheShape(sliding, self.kv_heads, self.head_dim, window),
            CacheShape(full, self.full_kv_heads, self.full_head_dim, None),
        )
        return tuple(shape for shape in shapes if shape.layers)


def _refuse_what_is_not_computed(f: Fields) -> None:
    f.require(
        "hidden_activation", "gelu_pytorch_tanh", "the MLP is gated by GELU's tanh approximation"
    )
    if f.raw.get("attn_logit_softcapping") is not None:
        rule = "attn_logit_softcapping must be null: Gemma 4's attention has none"
        raise InputError(f.where, rule, f.raw["attn_logit_softcapping"], "use another checkpoint")
    if f.raw.get("use_bidirectional_attention") == "all":
        raise InputError(
            f.where,
            "use_bidirectional_attention must be null or vision: text is decoded causally",
            "all",
            "use another",
        )


def _full_layers(f: Fields, kinds: tuple[str, ...], k_is_v: bool, kv_heads: int) -> tuple[int, int]:
    """Head size and KV heads of the full layers: named once (hub) or layer by layer (transformers 5.2x writes it so)."""
    if f.raw.get("per_layer_config") is None:
        return f.get_int("global_head_dim"), f.get_int(
            "num_global_key_value_heads", kv_heads
        ) if k_is_v else kv_heads
    said = f.child("per_layer_config")
    full = {str(i) for i, kind in enumerate(kinds) if kind == "full_attention"}
    each = {json.dumps(said.child(i).raw, sort_keys=True) for i in full}
    if (
        said.raw.keys() - full
        or len(each) != 1
        or said.child(min(full)).raw.keys() - {"head_dim", "num_key_value_heads"}
    ):
        rule = "per_layer_config must give every full_attention layer the same head_dim and num_key_value_heads, and no other layer any"
        raise InputError(f.where, rule, json.dumps(said.raw), "use another checkpoint")
    one = said.child(min(full))
    return one.get_int("head_dim", f.get_int("head_dim")), one.get_int(
        "num_key_value_heads", kv_heads
    )


class SelfAttention(nnx.Module):
    """Scores are not scaled; q, k and v are normalised, v without a weight. A layer that shares KV has only q and o."""

    def __init__(self, cfg: Gemma4Config, layer: int, *, rngs: nnx.Rngs):
        full = cfg.is_full(layer)
        self.head_dim, self.rope = (
            (cfg.full_head_dim, cfg.full_rope) if full else (cfg.head_dim, cfg.rope)
        )
        kv_heads = cfg.kv_heads_of(layer)

        def linear(i, o):
            return Linear(i, o, bias=cfg.attention_bias, dtype=cfg.dtype, rngs=rngs)

        def norm():
            return LateRMSNorm(self.head_dim, cfg.norm_eps, dtype=cfg.dtype)

        own = cfg.reads_from(layer) == layer
        self.q, self.o = (
            linear(cfg.dim, cfg.heads * self.head_dim),
            linear(cfg.heads * self.head_dim, cfg.dim),
        )
        self.k = linear(cfg.dim, kv_heads * self.head_dim) if own else None
        self.v = (
            linear(cfg.dim, kv_heads * self.head_dim) if own and not (full and cfg.k_is_v) else None
        )
        self.q_norm, self.k_norm = norm(), norm() if own else None
        self.source, self.window, self.eps = cfg.reads_from(layer), cfg.windows[layer], cfg.norm_eps

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], attend: Attend, state
    ):
        def heads(y):
            return y.reshape(*x.shape[:2], -1, self.head_dim)

        q, k, v = self.rope(self.q_norm(heads(self.q(x))), positions), None, None
        if self.k is not None:
            raw = heads(self.k(x))
            v = normalize(raw if self.v is None else heads(self.v(x)), self.eps).astype(x.dtype)
            k = self.rope(self.k_norm(raw), positions)
        y, state = attend(self.source, q, k, v, state, AttentionRule(self.window, scale=1.0))
        return self.o(y.reshape(*x.shape[:2], -1)), state


class SparseMLP(nnx.Module):
    """Experts with a router of its own norm and scales."""

    def __init__(self, cfg: Gemma4Config, *, rngs: nnx.Rngs):
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
        self.chosen, self.eps = cfg.chosen, cfg.norm_eps

    def __call__(
        self, x: Float[Array, "B T D"], normed: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """The router reads `x`, the residual stream; the experts read `normed`."""
        rows = (
            normalize(x.reshape(-1, x.shape[-1]), self.eps).astype(x.dtype)
            * self.scale[...][None]
            * x.shape[-1] ** -0.5
        )
        weight, chosen = jax.lax.top_k(
            jax.nn.softmax(self.router(rows).astype(jnp.float32), axis=-1), self.chosen
        )
        weight = weight / weight.sum(axis=-1, keepdims=True) * self.expert_scale[...][chosen]
        return self.experts(normed, chosen, weight)


class LayerEmbedding(nnx.Module):
    """Lets the layer's own embedding of the token into the stream, through a gate that the stream sets."""

    def __init__(self, cfg: Gemma4Config, *, rngs: nnx.Rngs):
        self.gate = Linear(cfg.dim, cfg.ple_dim, dtype=cfg.dtype, rngs=rngs)
        self.out = Linear(cfg.ple_dim, cfg.dim, dtype=cfg.dtype, rngs=rngs)
        self.norm = LateRMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

    def __call__(
        self, x: Float[Array, "B T D"], own: Float[Array, "B T P"]
    ) -> Float[Array, "B T D"]:
        return x + self.norm(self.out(gelu_tanh(self.gate(x)) * own))


class Block(nnx.Module):
    def __init__(self, cfg: Gemma4Config, layer: int, *, rngs: nnx.Rngs):
        def norm():
            return LateRMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

        self.attn_norm, self.attn, self.attn_post_norm = (
            norm(),
            SelfAttention(cfg, layer, rngs=rngs),
            norm(),
        )
        wide = 2 if cfg.double_wide and cfg.reads_from(layer) != layer else 1
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.mlp = MLP(cfg.dim, wide * cfg.mlp_dim, act=gelu_tanh, dtype=cfg.dtype, rngs=rngs)
        moe = cfg.experts is not None
        self.moe = SparseMLP(cfg, rngs=rngs) if moe else None
        self.moe_norm, self.moe_post_norm, self.dense_post_norm = (
            (norm(), norm(), norm()) if moe else (None, None, None)
        )
        self.ple = LayerEmbedding(cfg, rngs=rngs) if cfg.ple_dim else None
        self.scale = nnx.Param(jnp.ones(1, cfg.dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        own: Float[Array, "B T P"] | None,
        positions: Int[Array, "B T"],
        attend: Attend,
        state,
    ):
        y, state = self.attn(self.attn_norm(x), positions, attend, state)
        x = x + self.attn_post_norm(y)
        y = self.mlp(self.mlp_norm(x))
        if self.moe is not None:
            y = self.dense_post_norm(y) + self.moe_post_norm(self.moe(x, self.moe_norm(x)))
        x = x + self.mlp_post_norm(y)
        if self.ple is not None:
            x = self.ple(x, own)
        return x * self.scale[...][None, None], state


class Gemma4(Decoder):
    def __init__(self, cfg: Gemma4Config, *, rngs: nnx.Rngs):
        norm = LateRMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

        def block(layer):
            return Block(cfg, layer, rngs=rngs)

        super().__init__(
            cfg.vocab,
            cfg.dim,
            cfg.layers,
            block,
            norm,
            aux_hidden_state_layers=cfg.aux_hidden_state_layers,
            tied=cfg.tied_embeddings,
            dtype=cfg.dtype,
            rngs=rngs,
            logit_cap=cfg.logit_cap,
        )
        self.ple_dim = cfg.ple_dim
        if cfg.ple_dim:
            self.ple_embed = Embedding(
                cfg.ple_vocab, cfg.layers * cfg.ple_dim, dtype=cfg.dtype, rngs=rngs
            )
            self.ple_in = normal(rngs, (cfg.dim, cfg.layers * cfg.ple_dim), cfg.dtype)
            self.ple_norm = LateRMSNorm(cfg.ple_dim, cfg.norm_eps, dtype=cfg.dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend, state
    ):
        x = self.embed(tokens)
        x = x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)  # rounded to the weights' dtype first
        own = self._own_embeddings(tokens, x) if self.ple_dim else None
        stream = [x]
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if own is None else own[:, :, i], positions, attend, state)
            stream.append(x)
        return TargetOutput(self.norm(x), self.tapped(stream)), state

    def _own_embeddings(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T L P"]:
        """What every layer gets: an embedding of the token, and a projection of the shared one."""

        def split(y):
            return y.reshape(*tokens.shape, -1, self.ple_dim)

        table = split(self.ple_embed(tokens)) * jnp.asarray(self.ple_dim**0.5, x.dtype)
        projected = self.ple_norm(split(x @ self.ple_in[...] * x.shape[-1] ** -0.5))
        return (projected + table) * 2**-0.5


def table(cfg: Gemma4Config) -> ParamTable:
    """Checkpoint name -> (our path, layout): the one list that loading, exporting and completeness checks read."""
    result = param_names.frame(cfg.tied_embeddings)

    def weight(theirs, ours):
        return {f"{theirs}.weight": (f"{ours}.scale", IDENTITY)}  # of a norm

    if cfg.ple_dim:
        result["model.embed_tokens_per_layer.weight"] = ("ple_embed.table", IDENTITY)
        result["model.per_layer_model_projection.weight"] = ("ple_in", TRANSPOSE)
        result |= weight("model.per_layer_projection_norm", "ple_norm")
    for i in range(cfg.layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        own, v = cfg.reads_from(i) == i, not (cfg.is_full(i) and cfg.k_is_v)
        for p in "qo" + "k" * own + "v" * (own and v):
            result |= param_names.linear(
                f"{theirs}.self_attn.{p}_proj", f"{ours}.attn.{p}", bias=cfg.attention_bias
            )
        for p in "q" + "k" * own:
            result |= weight(f"{theirs}.self_attn.{p}_norm", f"{ours}.attn.{p}_norm")
        norms = {
            "input": "attn",
            "post_attention": "attn_post",
            "pre_feedforward": "mlp",
            "post_feedforward": "mlp_post",
        }
        result |= param_names.mlp(theirs, ours, bias=False) | {
            f"{theirs}.layer_scalar": (f"{ours}.scale", IDENTITY)
        }
        for name, mine in norms.items():
            result |= weight(f"{theirs}.{name}_layernorm", f"{ours}.{mine}_norm")
        if cfg.experts is not None:
            for name, mine in {
                "post_feedforward_layernorm_1": "dense_post",
                "post_feedforward_layernorm_2": "moe_post",
                "pre_feedforward_layernorm_2": "moe",
            }.items():
                result |= weight(f"{theirs}.{name}", f"{ours}.{mine}_norm")
            result |= param_names.linear(
                f"{theirs}.router.proj", f"{ours}.moe.router", bias=False
            ) | {
                f"{theirs}.router.scale": (f"{ours}.moe.scale", IDENTITY),
                f"{theirs}.router.per_expert_scale": (f"{ours}.moe.expert_scale", IDENTITY),
                f"{theirs}.experts.gate_up_proj": (
                    f"{ours}.moe.experts.gate_up.kernel",
                    TRANSPOSE_EXPERTS,
                ),
                f"{theirs}.experts.down_proj": (
                    f"{ours}.moe.experts.down.kernel",
                    TRANSPOSE_EXPERTS,
                ),
            }
        if cfg.ple_dim:
            result |= param_names.linear(
                f"{theirs}.per_layer_input_gate", f"{ours}.ple.gate", bias=False
            )
            result |= param_names.linear(
                f"{theirs}.per_layer_projection", f"{ours}.ple.out", bias=False
            )
            result |= weight(f"{theirs}.post_per_layer_input_norm", f"{ours}.ple.norm")
    return result


def unused(cfg: Gemma4Config) -> frozenset[str]:
    """Keys and values that released checkpoints hold of layers which share another's."""
    layers = [i for i in range(cfg.layers) if cfg.reads_from(i) != i]
    return frozenset(
        f"model.layers.{i}.self_attn.{part}.weight"
        for i in layers
        for part in ("k_proj", "v_proj", "k_norm")
    )
