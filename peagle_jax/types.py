"""The values that flow between floors, and the axis letters used everywhere.

B batch      T tokens in this call   S cache slots      L layers      V vocabulary
D model dim  A tapped layers * D     N query heads      G kv heads    H head dim
K speculation depth: tokens drafted per step (arXiv:2602.01469)
M packed multi-token (depth >= 1) training elements   W draft vocabulary
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from numpy import ndarray

Params = dict[
    Any, Any
]  # a pure nested dict of arrays: what jit, optax, orbax and the converters share


class InputError(ValueError):
    """A mistake a user can make and mend. The command line prints it as one line and exits with 2."""

    def __init__(self, where, rule: str, got, next_step: str):
        # names and values may come from a damaged file: one printable line, of a length that can be read
        rule, got = (
            text if len(text) <= 400 else text[:400] + " ..." for text in (str(rule), str(got))
        )
        line = f"{where}: {rule}; got {got}; {next_step}"
        super().__init__("".join(c if c.isprintable() else " " for c in line))


class WeightsWarning(UserWarning):
    """Weights that can be used but look wrong: NaN, infinity."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A Flax NNX module split once: a static graph, and its arrays as a pure dict.

    `jax.jit` functions take `params` as an argument and call `model.bind(params)` inside: passing the module
    itself costs 4 to 70 times the dispatch time (flax 0.12.8, jax 0.10.2).
    """

    config: Any
    graph: nnx.GraphDef
    params: Params

    @classmethod
    def of(cls, module: nnx.Module, config) -> "Model":
        graph, state = nnx.split(module)
        return cls(config, graph, nnx.to_pure_dict(state))

    def bind(self, params: Params) -> nnx.Module:
        return nnx.merge(self.graph, params)


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Model layers whose keys and values have one shape; what a cache of them is made from."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None  # of all of them, in tokens; None: they see everything

    def held(self, cache_size: int, block: int | None) -> int:
        """Slots a row that a cache of `slots` positions needs: fewer in a ring. `block`: see KVCache.empty."""
        return (
            cache_size
            if block is None or self.window is None
            else min(cache_size, self.window + block)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVGroup:
    """Keys and values of the layers that share one shape.

    One array a layer, heads before slots: on 2 CPU cores a step of 8 layers, 1,024 slots took 2.9 ms so, against
    5.8 ms with one [L B S G H] array, whose layers are copied out before each attention.
    """

    k: tuple[Float[Array, "B G S H"], ...]
    v: tuple[Float[Array, "B G S H"], ...]
    layers: tuple[int, ...] = dataclasses.field(
        metadata={"static": True}
    )  # model layers held, in order
    ring: bool = dataclasses.field(
        metadata={"static": True}
    )  # position p lies in slot p mod S; otherwise in slot p
    k_scale: tuple[
        Float[Array, "B G S"], ...
    ] = ()  # of keys and values in float8, one number a slot and head; () where they are not
    v_scale: tuple[Float[Array, "B G S"], ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """What the model has read: `length[b]` positions of row b are real.

    Rolling back rejected tokens is `dataclasses.replace(cache, length=shorter)`: attention never looks past the
    querying token's own position, and the next write overwrites what lies there. Zero-filled, because a NaN in a masked
    slot would still leak through 0 * NaN.
    """

    groups: tuple[KVGroup, ...]
    length: Int[Array, " B"]

    @classmethod
    def empty(
        cls,
        shapes: Sequence[CacheShape],
        batch: int,
        cache_size: int,
        dtype,
        *,
        block: int | None = None,
    ) -> "KVCache":
        """Room for `slots` positions.

        Args:
          dtype: float8 keeps a scale beside every key and value.
          block: positions written at once, at most. Sliding layers then get a ring of window + block slots, if that is
            fewer: when the last of a block is written, everything its first query sees is still there, and so is
            everything that a query sees after any part of the block was rolled back. None: no rings.
        """

        def group(shape: CacheShape) -> KVGroup:
            held = shape.held(cache_size, block)
            size = (batch, shape.kv_heads, held, shape.head_dim)

            def zeros(size, dtype):
                return tuple(jnp.zeros(size, dtype) for _ in shape.layers)

            scale = (
                (lambda: zeros(size[:-1], jnp.float32)) if jnp.dtype(dtype).itemsize == 1 else tuple
            )
            k, v = zeros(size, dtype), zeros(size, dtype)
            return KVGroup(
                k, v, tuple(shape.layers), ring=held < cache_size, k_scale=scale(), v_scale=scale()
            )

        return cls(tuple(group(shape) for shape in shapes), jnp.zeros(batch, jnp.int32))

    def find(self, layer: int) -> tuple[int, int]:
        """The group that holds a model layer, and the layer's place in it."""
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise KeyError(f"no cache group holds layer {layer}")


@dataclasses.dataclass(frozen=True)
class AttentionRule:
    """What a layer's attention is, beside queries, keys and values."""

    window: int | None  # the query at position p sees p-window+1 .. p; None: 0 .. p
    scale: float  # of the scores
    sinks: Float[Array, " N"] | None = (
        None  # one more logit a head, whose share of the softmax goes nowhere (GPT-OSS)
    )


@runtime_checkable
class Attend(Protocol):
    """Attention as an argument: decoding passes a cached one, training prefix + chain, tests a plain mask.

    `state` is whatever that attention threads through the layers (a KVCache, or None at first). `k` and `v` are None
    for a layer that reads those of an earlier one (Gemma 4): `layer` is then the earlier layer.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T G H"] | None,
        v: Float[Array, "B T G H"] | None,
        state: Any,
        rule: AttentionRule,
    ) -> tuple[Float[Array, "B T N H"], Any]: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
    hidden: Float[Array, "B T D"]  # after the final norm: what `unembed` reads
    aux_hidden_states: Float[
        Array, "B T A"
    ]  # tapped residual-stream states, concatenated in tap order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed training rows. `document` is -1 on padding; `supervised` marks the tokens that a loss may read."""

    tokens: Int[Array | ndarray, "B T"]
    segment_ids: Int[Array | ndarray, "B T"]
    loss_mask: Bool[Array | ndarray, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodSample:
    """The depth >= 1 elements that COD sampling kept, ordered by (anchor, depth) so that chains are contiguous.

    Element m stands at shifted position anchor + depth. Padding has `real` False, anchor 0 and depth 0.
    """

    anchor: Int[Array | ndarray, "B M"]
    depth: Int[Array | ndarray, "B M"]
    real: Bool[Array | ndarray, "B M"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How each row samples. `temperature` 0 means greedy; `top_k` 0 and `top_p` 1 mean no filter."""

    key: Array  # [B] typed PRNG keys, one a request: a row's text does not depend on its neighbours
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    filtered: bool = dataclasses.field(
        metadata={"static": True}
    )  # False skips the sort that the filters need


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftState:
    """What a drafter carries between steps: its own cache, and how its rows sample (None: argmax)."""

    cache: KVCache | None
    sampling: SamplingParams | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything one decoding step needs and returns. E is the length of the output buffer."""

    cache: KVCache  # of the target; the newest committed token is not in it yet
    draft: DraftState
    tokens: Int[Array, "B R"]  # tokens committed by the last step, `count` of R = K+1 real
    aux_hidden_states: Float[
        Array, "B R A"
    ]  # the tap of the token BEFORE each of them (peagle.md, section 3)
    count: Int[Array, " B"]
    output: Int[Array, "B E"]
    is_draft: Bool[Array, "B E"]  # whether an output token was a draft that was accepted
    emitted: Int[Array, " B"]  # tokens written to `output`, also those past the limit
    length: Int[
        Array, " B"
    ]  # tokens of the answer: up to the limit, or through the first stop token
    done: Bool[Array, " B"]
    num_drafts: Int[Array, " B"]  # speculative steps taken
    num_accepted_per_pos: Int[Array, "B K"]  # how often the draft at each position was accepted
