"""What the config of every target family has, and how their config.json files say it."""

import dataclasses
from collections.abc import Mapping, Sequence

from jax.typing import DTypeLike

from peagle_jax.layers import Rope
from peagle_jax.types import CacheShape, InputError, KVCache
from peagle_jax.weights import Fields

MOST_LAYERS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What decoding, training and draft heads read of a target. Families add what their own model reads."""

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
    aux_hidden_state_layers: tuple[
        int, ...
    ]  # id i is the residual stream BEFORE layer i (vLLM's numbering); 0 is the embedding
    dtype: DTypeLike
    stop_ids: tuple[int, ...]
    source: (
        str | None
    )  # config.json that this was read from, for exports; None for a model made here
    cache_dtype: DTypeLike | None = (
        None  # of keys and values; None: as `dtype`. A choice of who runs it, not the checkpoint's
    )

    def kv_heads_of(self, layer: int) -> int:
        return self.kv_heads

    def cache_shapes(self) -> tuple[CacheShape, ...]:
        kinds = {
            window: [i for i, w in enumerate(self.windows) if w == window]
            for window in dict.fromkeys(self.windows)
        }
        return tuple(
            CacheShape(tuple(layers), self.kv_heads, self.head_dim, window)
            for window, layers in kinds.items()
        )

    @property
    def kept_dtype(self) -> DTypeLike:
        """Of the cache."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    def empty_cache(self, batch: int, slots: int, *, block: int | None = None) -> KVCache:
        """`block`: see KVCache.empty."""
        return KVCache.empty(self.cache_shapes(), batch, slots, self.kept_dtype, block=block)


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as vLLM and speculators choose them: (2, L//2, L-3).

    Below 7 layers those coincide or change order, and vLLM collects taps once each and in layer order; so there three
    ascending layers are spread out instead.
    """
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    return tuple(sorted({min(1, layers // 3), layers // 2, layers - 1}))


def read_layers(f: Fields) -> int:
    layers = f.get_int("num_hidden_layers")
    if layers > MOST_LAYERS:  # before as many are listed
        raise InputError(
            f.where, f"num_hidden_layers must be at most {MOST_LAYERS:,}", layers, "mend the config"
        )
    return layers


def read_heads(f: Fields) -> tuple[int, int]:
    """Query heads and key-value heads."""
    heads, kv_heads = f.get_int("num_attention_heads"), f.get_int("num_key_value_heads")
    check_groups(f, heads, kv_heads, "num_key_value_heads")
    return heads, kv_heads


def check_groups(f: Fields, heads: int, kv_heads: int, key: str) -> None:
    if heads % kv_heads:
        raise InputError(
            f.where,
            f"num_attention_heads must be a multiple of {key}",
            f"{heads} and {kv_heads}",
            "mend it",
        )


def read_aux_layers(
    f: Fields, aux_hidden_state_layers: Sequence[int] | None, layers: int
) -> tuple[int, ...]:
    """`taps` None means vLLM's choice."""
    aux_hidden_state_layers = (
        default_aux_layers(layers)
        if aux_hidden_state_layers is None
        else tuple(aux_hidden_state_layers)
    )
    if bad := [t for t in aux_hidden_state_layers if not 0 <= t <= layers]:
        raise InputError(
            f.where,
            f"tap ids must lie in 0..{layers} (0 is the embedding)",
            bad,
            "choose other taps",
        )
    return aux_hidden_state_layers


def read_stops(raw: Mapping) -> tuple[int, ...]:
    eos = raw.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


KINDS = ("full_attention", "sliding_attention")


def read_kinds(f: Fields, layers: int, default: Sequence[str]) -> tuple[str, ...]:
    """`layer_types`: for every layer, whether it slides."""
    kinds = tuple(f.get_strs("layer_types", None) or default)
    if len(kinds) != layers:
        raise InputError(
            f.where, f"layer_types must name all {layers} layers", len(kinds), "mend the config"
        )
    if other := sorted(set(kinds) - set(KINDS)):
        raise InputError(
            f.where,
            f"layer_types must be {' or '.join(KINDS)}",
            ", ".join(other),
            "use another checkpoint",
        )
    return kinds


def windows_of(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
