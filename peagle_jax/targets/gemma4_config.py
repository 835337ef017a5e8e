"""Configuration of Gemma 4's text model, and how it is read from a config.json.

Gemma 4 has two kinds of layers with shapes of their own, "sliding_attention" and "full_attention",
and three options that only some checkpoints use: experts beside the MLP (26B-A4B), per-layer
embeddings, and layers that share keys and values (both E2B and E4B). Defaults follow transformers'
configuration_gemma4.py (5.23).
"""

import dataclasses
import json
from collections.abc import Mapping

from jax.typing import DTypeLike

from peagle_jax.layers import Rope
from peagle_jax.targets import config
from peagle_jax.types import CacheShape, InputError
from peagle_jax.weights import Fields

FAMILIES = "docs/targets.md lists the families"
# of a config without rope_parameters, as configuration_gemma4.py has them (transformers 5.24)
ROPE_PARAMETERS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(config.TargetConfig):
    """Shape of one Gemma 4 checkpoint.

    `kv_heads`, `head_dim` and `rope` are those of the layers with sliding attention.

    Attributes:
      full_kv_heads: key-value heads of the layers with full attention.
      full_head_dim: width of their heads.
      full_rope: their rotary position embedding.
      attention_k_eq_v: in those layers, values are the keys before their norm and rotation.
      num_kv_shared_layers: so many of the last layers have no keys and values of their own. Each
        reads those of the last layer before them of its own kind; see `kv_source_layer`.
      use_double_wide_mlp: the MLPs of those layers are 2 * mlp_dim wide.
      logit_cap: logits are squeezed into -cap .. cap by tanh; None: they are not.
      experts: number of experts beside the MLP of every layer; None: there are none.
      experts_per_token: how many of them each token goes to; None without experts.
      expert_dim: width of one expert's MLP; None without experts.
      ple_dim: width of the per-layer embeddings (PLE). A second embedding table gives each token a
        vector of this width for every layer, and each layer mixes its vector into the residual
        stream. 0: there are none.
      ple_vocab: tokens in that second table; at least `vocab`.
    """

    full_kv_heads: int
    full_head_dim: int
    full_rope: Rope
    attention_k_eq_v: bool
    num_kv_shared_layers: int
    use_double_wide_mlp: bool
    logit_cap: float | None
    experts: int | None
    experts_per_token: int | None
    expert_dim: int | None
    ple_dim: int
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
        """Reads the config.json of the text model, or of the multimodal model around it.

        See TargetConfig.from_hf.
        """
        outer = Fields(hf, where, "a Gemma 4 config")
        f = outer
        if hf.get("text_config") is not None:
            f = Fields(outer.child("text_config").raw, where, "text_config")
        _refuse_what_is_not_computed(f)
        layers = config.read_num_layers(f)
        heads, kv_heads = config.read_heads(f)
        layer_types = _read_layer_types(f, layers)
        num_kv_shared_layers = _read_num_kv_shared_layers(f, layer_types)
        attention_k_eq_v = f.get_bool("attention_k_eq_v", False)
        full_head_dim, full_kv_heads = _read_full_layers(f, layer_types, attention_k_eq_v, kv_heads)
        config.check_kv_heads(f, heads, full_kv_heads, "num_global_key_value_heads")
        head_dim = f.get_int("head_dim")
        has_experts = f.get_bool("enable_moe_block", False)
        has_moe_width = f.raw.get("moe_intermediate_size") is not None
        expert_width = "moe_intermediate_size" if has_moe_width else "expert_intermediate_size"
        ple_dim, ple_vocab = _read_per_layer_embeddings(f)
        # the multimodal model's own keys come before the text model's
        tied_embeddings = outer.get_bool(
            "tie_word_embeddings", f.get_bool("tie_word_embeddings", True)
        )
        return cls(
            vocab=f.get_int("vocab_size"),
            layers=layers,
            dim=f.get_int("hidden_size"),
            mlp_dim=f.get_int("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=_read_rope(f, "sliding_attention", head_dim),
            norm_eps=f.get_float("rms_norm_eps"),
            attention_bias=f.get_bool("attention_bias", False),
            tied_embeddings=tied_embeddings,
            windows=config.windows_of_layers(layer_types, f.get_int("sliding_window")),
            context=f.get_int("max_position_embeddings"),
            aux_hidden_state_layers=config.read_aux_layers(f, aux_hidden_state_layers, layers),
            dtype=dtype,
            stop_ids=config.read_stop_ids(hf, where) or config.read_stop_ids(f.raw, where),
            source=json.dumps(dict(hf)),
            full_kv_heads=full_kv_heads,
            full_head_dim=full_head_dim,
            full_rope=_read_rope(f, "full_attention", full_head_dim),
            attention_k_eq_v=attention_k_eq_v,
            num_kv_shared_layers=num_kv_shared_layers,
            use_double_wide_mlp=f.get_bool("use_double_wide_mlp", False),
            logit_cap=f.get_float("final_logit_softcapping", None),
            experts=f.get_int("num_experts") if has_experts else None,
            experts_per_token=f.get_int("top_k_experts") if has_experts else None,
            expert_dim=f.get_int(expert_width) if has_experts else None,
            ple_dim=ple_dim,
            ple_vocab=ple_vocab,
        )

    def kv_heads_of(self, layer: int) -> int:
        """Key-value heads of a layer."""
        return self.full_kv_heads if self.is_full(layer) else self.kv_heads

    def is_full(self, layer: int) -> bool:
        """Whether a layer has full attention."""
        return self.windows[layer] is None

    def kv_source_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads.

        It is the layer itself, or for the last `num_kv_shared_layers` layers the last of its kind
        before them.
        """
        unshared = self.layers - self.num_kv_shared_layers
        if layer < unshared:
            return layer
        return max(i for i in range(unshared) if self.is_full(i) == self.is_full(layer))

    def cache_shapes(self) -> tuple[CacheShape, ...]:
        """One group of sliding layers and one of full layers; without those that share."""
        unshared = range(self.layers - self.num_kv_shared_layers)
        sliding = tuple(i for i in unshared if not self.is_full(i))
        full = tuple(i for i in unshared if self.is_full(i))
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
        next_step = f"choose a checkpoint with attn_logit_softcapping: null; {FAMILIES}"
        raise InputError(f.where, rule, f.raw["attn_logit_softcapping"], next_step)
    if f.raw.get("use_bidirectional_attention") == "all":
        rule = "use_bidirectional_attention must be null or vision: text is decoded causally"
        next_step = f"choose a checkpoint with use_bidirectional_attention: null; {FAMILIES}"
        raise InputError(f.where, rule, "all", next_step)


def _read_layer_types(f: Fields, layers: int) -> tuple[str, ...]:
    """By default every sixth layer has full attention; the last one always has."""
    default = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    layer_types = config.read_layer_types(f, layers, default)
    return (*layer_types[:-1], "full_attention")


def _read_num_kv_shared_layers(f: Fields, layer_types: tuple[str, ...]) -> int:
    """`num_kv_shared_layers`, checked: every shared layer has a layer to read from."""
    count = f.get_int("num_kv_shared_layers", 0, least=0)
    unshared_types = layer_types[: len(layer_types) - count]
    if count and set(unshared_types) != set(layer_types):
        rule = (
            "the layers before the num_kv_shared_layers last ones must hold one of every kind "
            "that these are of"
        )
        next_step = "set num_kv_shared_layers to a smaller number, for example 0"
        raise InputError(f.where, rule, count, next_step)
    return count


def _read_full_layers(
    f: Fields, layer_types: tuple[str, ...], attention_k_eq_v: bool, kv_heads: int
) -> tuple[int, int]:
    """(head width, key-value heads) of the layers with full attention.

    Checkpoints on the hub name them once. transformers 5.2x writes them for each layer, in
    `per_layer_config`.

    Args:
      kv_heads: of the sliding layers; full layers have as many unless `attention_k_eq_v`.
    """
    if f.raw.get("per_layer_config") is None:
        if not attention_k_eq_v:
            return f.get_int("global_head_dim"), kv_heads
        return f.get_int("global_head_dim"), f.get_int("num_global_key_value_heads", kv_heads)
    by_layer = f.child("per_layer_config")
    full_layers = [str(i) for i, kind in enumerate(layer_types) if kind == "full_attention"]
    if problem := _problem_of_layers(by_layer, full_layers):
        rule = (
            "per_layer_config must give every full_attention layer the same head_dim and "
            "num_key_value_heads, and no other layer any"
        )
        next_step = f"download config.json again: {problem}"
        raise InputError(f.where, rule, json.dumps(by_layer.raw), next_step)
    one = by_layer.child(full_layers[0])
    full_head_dim = one.get_int("head_dim", f.get_int("head_dim"))
    return full_head_dim, one.get_int("num_key_value_heads", kv_heads)


def _problem_of_layers(by_layer: Fields, full_layers: list[str]) -> str | None:
    """What is wrong with `per_layer_config`, in words; None if nothing is."""
    if others := sorted(by_layer.raw.keys() - set(full_layers)):
        return f"{others[0]} is no layer with full attention"
    first = by_layer.child(full_layers[0]).raw
    if unknown := sorted(first.keys() - {"head_dim", "num_key_value_heads"}):
        return f"layer {full_layers[0]} has the key {unknown[0]}"
    for layer in full_layers:
        values = by_layer.child(layer).raw
        for key in sorted(first.keys() | values.keys()):
            if first.get(key) != values.get(key):
                one, other = (json.dumps(raw.get(key))[:40] for raw in (first, values))
                return f"layer {full_layers[0]} has {key} {one}, layer {layer} has {other}"
    return None


def _read_rope(f: Fields, layer_type: str, head_dim: int) -> Rope:
    """The rotary embedding of one kind of layers; `rope_parameters` has one for each kind."""
    if f.raw.get("rope_parameters") is None:
        parameters = ROPE_PARAMETERS[layer_type]
    else:
        parameters = f.child("rope_parameters").child(layer_type).raw
    context = f.get_int("max_position_embeddings", None)
    of_type = {"rope_parameters": dict(parameters), "max_position_embeddings": context}
    return Rope.from_hf(of_type, head_dim, f"{f.where}: {layer_type}", default_theta=None)


def _read_per_layer_embeddings(f: Fields) -> tuple[int, int]:
    """(width, vocabulary) of the per-layer embeddings; width 0 where there are none."""
    vocab = f.get_int("vocab_size")
    ple_dim = f.get_int("hidden_size_per_layer_input", 0, least=0)
    ple_vocab = f.get_int("vocab_size_per_layer_input", vocab)
    if ple_dim and ple_vocab < vocab:
        rule = f"vocab_size_per_layer_input must be at least vocab_size, {vocab}"
        next_step = f"set vocab_size_per_layer_input to {vocab}"
        raise InputError(f.where, rule, ple_vocab, next_step)
    return ple_dim, ple_vocab
