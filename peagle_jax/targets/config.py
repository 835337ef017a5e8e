"""The configuration that every target family has, and how it is read from a config.json.

The functions `read_..` take the same keys in every family; a family's own keys are read in its own
file.
"""

import abc
import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from jax.typing import DTypeLike

from peagle_jax.kernels.cache_write import array_dtype
from peagle_jax.layers import FINAL_HIDDEN_STATE, Rope, default_cache_dtype
from peagle_jax.types import CacheShape, InputError, KVCache
from peagle_jax.weights import Fields

MAX_LAYERS = 10_000
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(abc.ABC):
    """What decoding, training and draft heads read of a target.

    Each family has a subclass with what its own model reads besides.

    Attributes:
      vocab: tokens in the vocabulary.
      layers: number of layers.
      dim: width of the residual stream.
      mlp_dim: width of a layer's MLP.
      heads: query heads.
      kv_heads: key-value heads, which divide the query heads.
      head_dim: width of a head.
      rope: rotary position embedding.
      norm_eps: added to the mean square in every norm.
      attention_bias: whether the projections of attention have biases.
      tied_embeddings: the output matrix is the embedding's transpose.
      windows: sliding window of each layer in tokens; None: full attention.
      context: longest sequence that the checkpoint was made for, in tokens.
      aux_hidden_state_layers: which hidden states the model returns for a draft head. Id i is the
        residual stream BEFORE layer i, in vLLM's numbering; 0 is the embedding, and
        `layers.FINAL_HIDDEN_STATE` the hidden state after the final norm.
      dtype: of weights; and of activations, see `layers.activation_dtype`.
      stop_ids: tokens that end a text.
      source: the config.json that this was read from, for exports; None for a model made here.
      cache_dtype: of keys and values in the cache; None: `default_cache_dtype`. It is a choice of
        who runs the model, and not the checkpoint's.
    """

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
    windows: tuple[int | None, ...]
    context: int
    aux_hidden_state_layers: tuple[int, ...]
    dtype: DTypeLike
    stop_ids: tuple[int, ...]
    source: str | None
    cache_dtype: DTypeLike | None = None

    @classmethod
    @abc.abstractmethod
    def from_hf(
        cls,
        hf: Mapping,
        *,
        aux_hidden_state_layers: tuple[int, ...] | None,
        dtype: DTypeLike,
        where: str,
    ) -> "TargetConfig":
        """Reads a checkpoint's config.json.

        Args:
          hf: the content of config.json.
          aux_hidden_state_layers: None means vLLM's choice; see `default_aux_layers`.
          dtype: of weights; and of activations, see `layers.activation_dtype`.
          where: the file, for errors.

        Raises:
          InputError: a key is missing, contradicts another one, or asks for what the model does not
            compute.
        """

    def kv_heads_of(self, layer: int) -> int:
        """Key-value heads of a layer."""
        return self.kv_heads

    def cache_shapes(self) -> tuple[CacheShape, ...]:
        """The layers of the cache, in groups that have one shape and one window."""
        layers_by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            layers_by_window.setdefault(window, []).append(layer)
        return tuple(
            CacheShape(tuple(layers), self.kv_heads, self.head_dim, window)
            for window, layers in layers_by_window.items()
        )

    @property
    def kv_cache_dtype(self) -> DTypeLike:
        """The dtype of keys and values in the cache: `cache_dtype`, or what suits the weights."""
        if self.cache_dtype is not None:
            return self.cache_dtype
        return default_cache_dtype(self.dtype, [shape.head_dim for shape in self.cache_shapes()])

    def empty_cache(
        self, batch: int, cache_size: int, *, block: int | None = None, slots: int | None = None
    ) -> KVCache:
        """A cache for `cache_size` positions of each of `batch` rows.

        Args:
          block: the most positions that are written at once, which makes rings of sliding layers;
            see KVCache.empty. None: no rings.
          slots: with which layers without a ring begin; None for `cache_size`.
        """
        shapes, dtype = self.cache_shapes(), array_dtype(self.kv_cache_dtype)
        return KVCache.empty(shapes, batch, cache_size, dtype, block=block, slots=slots)


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as vLLM and speculators choose them: (2, L//2, L-3).

    With fewer than 7 layers those coincide or change order, and vLLM collects each hidden state
    once and in layer order. Three ascending layers are spread out there instead.
    """
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    return tuple(sorted({min(1, layers // 3), layers // 2, layers - 1}))


def read_num_layers(f: Fields) -> int:
    """`num_hidden_layers`, which is bounded before lists of so many layers are made."""
    layers = f.get_int("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise InputError(
            f.where,
            rule=f"num_hidden_layers must be at most {MAX_LAYERS:,}",
            got=layers,
            next_step="set num_hidden_layers to the number of layers in the weights, for example "
            "36",
        )
    return layers


def read_heads(f: Fields) -> tuple[int, int]:
    """(query heads, key-value heads)"""
    heads, kv_heads = f.get_int("num_attention_heads"), f.get_int("num_key_value_heads")
    check_kv_heads(f, heads, kv_heads, "num_key_value_heads")
    return heads, kv_heads


def check_kv_heads(f: Fields, heads: int, kv_heads: int, key: str) -> None:
    """Raises an InputError unless query heads are a multiple of key-value heads.

    Args:
      key: the key that the key-value heads were read from.
    """
    if heads % kv_heads:
        raise InputError(
            f.where,
            rule=f"num_attention_heads must be a multiple of {key}",
            got=f"{heads} and {kv_heads}",
            next_step=f"set {key} to a divisor of {heads}, as the checkpoint's own config has it",
        )


def check_experts_per_token(f: Fields, experts_per_token: int, experts: int, key: str) -> None:
    """Raises an InputError if a token would go to more experts than there are.

    Args:
      key: the key that the number of experts was read from.
    """
    if experts_per_token > experts:
        raise InputError(
            f.where,
            rule=f"num_experts_per_tok must be at most {key}",
            got=f"{experts_per_token} of {experts}",
            next_step=f"set num_experts_per_tok to {experts} or less",
        )


def read_aux_layers(
    f: Fields, aux_hidden_state_layers: Sequence[int] | None, layers: int
) -> tuple[int, ...]:
    """The ids of the aux hidden states, checked against the number of layers.

    Args:
      aux_hidden_state_layers: None means `default_aux_layers`.
    """
    if aux_hidden_state_layers is None:
        return default_aux_layers(layers)
    ids = [i for i in aux_hidden_state_layers if i != FINAL_HIDDEN_STATE]
    outside = [i for i in ids if not 0 <= i <= layers]
    if outside:
        raise InputError(
            f.where,
            rule=f"aux_hidden_state_layers must lie in 0..{layers} (0 is the embedding)",
            got=outside,
            next_step=f"choose other layers, for example {list(default_aux_layers(layers))}",
        )
    return tuple(aux_hidden_state_layers)


def read_stop_ids(raw: Mapping, where: str | Path) -> tuple[int, ...]:
    """`eos_token_id`, which may be one id, a list of ids, or absent.

    Args:
      raw: the content of config.json, or of generation_config.json.
      where: the file, for the error.

    Raises:
      InputError: it is anything else.
    """
    eos = raw.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in ids):
        rule, next_step = "eos_token_id must be a token id or a list of them", "write it as [1, 2]"
        raise InputError(where, rule, reprlib.repr(eos), next_step)
    return tuple(ids)


def read_window(f: Fields) -> int | None:
    """Qwen3's `sliding_window`; 4,096 where it is absent, as in transformers, and None for null."""
    return f.get_int("sliding_window", None) if "sliding_window" in f.raw else 4096


def read_layer_types(f: Fields, layers: int, default: Sequence[str]) -> tuple[str, ...]:
    """`layer_types`: "full_attention" or "sliding_attention" for each layer.

    Args:
      layers: the number of layers.
      default: where the config has no `layer_types`.
    """
    layer_types = tuple(f.get_strs("layer_types", None) or default)
    if len(layer_types) != layers:
        raise InputError(
            f.where,
            rule=f"layer_types must name all {layers} layers",
            got=len(layer_types),
            next_step="make num_hidden_layers and the length of layer_types the same number",
        )
    if unknown := [i for i, kind in enumerate(layer_types) if kind not in LAYER_TYPES]:
        either = " or ".join(LAYER_TYPES)
        got = ", ".join(sorted(set(layer_types) - set(LAYER_TYPES)))
        layer = f"layer {unknown[0]}" + (" and others" if len(unknown) > 1 else "")
        next_step = f"write {either} for {layer}, as the weights were trained"
        raise InputError(f.where, f"layer_types must be {either}", got, next_step)
    return layer_types


def windows_of_layers(
    layer_types: Sequence[str], sliding_window: int | None
) -> tuple[int | None, ...]:
    """The window of each layer; None for those with full attention."""
    return tuple(sliding_window if t == "sliding_attention" else None for t in layer_types)
