"""The values that pass between the parts of this package. Read this file first.

Array shapes are jaxtyping annotations. One letter means the same axis everywhere outside of
kernels/, where M, K and N are the sizes of a product [M K] x [K N]:

    B  rows of a batch               T  tokens of a row in this call
    V  target vocabulary             W  draft vocabulary
    D  width of a model, also        E  width of the target, where both occur
       of the head                   A  width of the aux hidden states: number of aux layers * E
    N  query heads                   G  key-value heads
    H  head dimension                S  slots of a KV cache
    K  draft tokens per step         R  K + 1: the last token and its drafts
    L  length of the output buffer   n  positions of a training row, T - 1
    M  training elements of depth    P  training elements in all, B * (n + M)
       1 and more, packed

The terms are explained in docs/glossary.md. P-EAGLE is arXiv:2602.01469.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num
from numpy import ndarray

Params = dict[Any, Any]  # nested dicts of arrays, and nothing else: what jit, optax, Orbax share
Device = Any  # a jax.Device: its class comes without types, and is no annotation for pyright


class InputError(ValueError):
    """A mistake that the user can correct. The command line prints it as one line and exits with 2.

    Args:
      where: the file, key or option that is wrong.
      rule: what it must be.
      got: what it is.
      next_step: what to do now, with the key's name and a value that works.
    """

    MAX_CHARS = 400  # of each part, which may quote a damaged file

    def __init__(self, where: object, rule: object, got: object, next_step: object) -> None:
        self.where, self.rule, self.got, self.next_step = where, rule, got, next_step
        place, rule, got, next_step = map(self._shorten, (where, rule, got, next_step))
        line = f"{place}: {rule}; got {got}; {next_step}"
        super().__init__("".join(c if c.isprintable() else " " for c in line))

    @classmethod
    def _shorten(cls, value: object) -> str:
        try:
            text = str(value)
        except ValueError:  # Python writes whole numbers of up to 4,300 digits
            return f"a {type(value).__name__} that is too long to be written"
        cut = f"{text[: cls.MAX_CHARS - 100]} ... {text[-95:]}"  # a place ends with its line
        return text if len(text) <= cls.MAX_CHARS else cut


class WeightsWarning(UserWarning):
    """The weights can be used but look wrong: NaN or infinity, or another model than theirs."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A Flax NNX module, split once into a static graph and a plain dict of its arrays.

    A jitted function takes `params` as an argument and calls `model.bind(params)` inside. Passing
    the module itself takes 4 to 70 times as long to dispatch (flax 0.12.8, jax 0.10.2).

    Attributes:
      config: `TargetConfig` of a target, `HeadConfig` of a draft head.
      graph: the module without its arrays; hashable, so it can be a static argument.
      params: the module's arrays.
    """

    config: Any
    graph: nnx.GraphDef
    params: Params

    @classmethod
    def from_module(cls, module: nnx.Module, config: Any) -> "Model":
        """Splits `module`, which was made from `config`."""
        graph, state = nnx.split(module)
        return cls(config, graph, nnx.to_pure_dict(state))

    def bind(self, params: Params) -> nnx.Module:
        """The module with `params` as its arrays."""
        return nnx.merge(self.graph, params)


# ---------------------------------------------------------------- KV caches


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Layers of a model whose keys and values have the same shape, and are cached together.

    Attributes:
      layers: which layers of the model, by number.
      kv_heads: G, key-value heads of each layer.
      head_dim: H.
      window: sliding window of these layers in tokens; None for full attention.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None

    def num_slots(self, cache_size: int, block: int | None) -> int:
        """S, slots per row in a cache of `cache_size` positions; `block`: see `KVCache.empty`."""
        if block is None or self.window is None:
            return cache_size
        return min(cache_size, self.window + block)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVGroup:
    """Cached keys and values of the layers of one `CacheShape`.

    There is one array per layer, with heads before slots: on 2 CPU cores a step over 8 layers of
    1,024 slots takes 2.9 ms, and 5.8 ms with one array, of which each layer's part is copied out.

    Attributes:
      k: keys, one array per layer of `layers`; bits of bfloat16 on a CPU (`kernels.cache_write`).
      v: values, likewise.
      layers: the model's numbers of the layers, in the order of `k`.
      ring: in a ring cache position p is in slot p mod S, and overwrites position p - S. Otherwise
        position p is in slot p.
      k_scale: with float8 keys, the number by which each vector is multiplied when it is read; ()
        with wider dtypes.
      v_scale: likewise for values.
    """

    k: tuple[Num[Array, "B G S H"], ...]
    v: tuple[Num[Array, "B G S H"], ...]
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    ring: bool = dataclasses.field(metadata={"static": True})
    k_scale: tuple[Float[Array, "B G S"], ...] = ()
    v_scale: tuple[Float[Array, "B G S"], ...] = ()

    @classmethod
    def empty(
        cls, shape: CacheShape, batch: int, slots: int, dtype: DTypeLike, *, ring: bool
    ) -> "KVGroup":
        """A group of zeros with `slots` slots per row."""
        size = (batch, shape.kv_heads, slots, shape.head_dim)

        def zeros_per_layer(size: tuple[int, ...], dtype: DTypeLike) -> tuple[Array, ...]:
            return tuple(jnp.zeros(size, dtype) for _ in shape.layers)

        k, v = zeros_per_layer(size, dtype), zeros_per_layer(size, dtype)
        if jnp.dtype(dtype).itemsize > 1:
            return cls(k, v, tuple(shape.layers), ring)
        k_scale, v_scale = (zeros_per_layer(size[:-1], jnp.float32) for _ in range(2))
        return cls(k, v, tuple(shape.layers), ring, k_scale, v_scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens that a model has read so far.

    To roll back rejected tokens, shorten `length`: `dataclasses.replace(cache, length=shorter)`.
    Nothing is erased: attention reads no position after the querying token's, and the next write
    overwrites it. Slots begin as zeros; a NaN in a masked slot would reach the output as 0 * NaN.

    Attributes:
      groups: the layers, grouped by shape. Layers that reuse another layer's keys are in none.
      length: how many positions of each row are valid.
    """

    groups: tuple[KVGroup, ...]
    length: Int[Array, " B"]

    @classmethod
    def empty(
        cls,
        shapes: Sequence[CacheShape],
        batch: int,
        cache_size: int,
        dtype: DTypeLike,
        *,
        block: int | None = None,
        slots: int | None = None,
    ) -> "KVCache":
        """An empty cache with room for `cache_size` positions per row.

        Args:
          dtype: of keys and values. A float8 cache has a scale beside every vector.
          block: the largest number of positions written by one call. Layers with a sliding window
            then get a ring cache of window + block slots, if that is fewer than `cache_size`. This
            is enough: when the last position of a block is written, the window of the block's first
            query is still there, and so it is after any part of the block is rolled back. None
            gives every layer `cache_size` slots.
          slots: of layers without a ring, where the cache grows later; None for `cache_size`.
        """

        def empty_group(shape: CacheShape) -> KVGroup:
            most = shape.num_slots(cache_size, block)
            is_ring = most < cache_size
            num_slots = most if is_ring or slots is None else slots
            return KVGroup.empty(shape, batch, num_slots, dtype, ring=is_ring)

        return cls(tuple(map(empty_group, shapes)), jnp.zeros(batch, jnp.int32))

    def find(self, layer: int) -> tuple[int, int]:
        """Index of the group that caches a layer of the model, and the layer's index in that group.

        Raises:
          KeyError: no group caches the layer.
        """
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise KeyError(f"no cache group holds layer {layer}")


# ---------------------------------------------------------------- attention


@dataclasses.dataclass(frozen=True)
class AttentionRule:
    """What distinguishes one layer's attention from another's, apart from q, k and v.

    Attributes:
      window: the query at position p attends to p - window + 1 .. p; None for 0 .. p.
      scale: factor of the scores q k.
      sinks: one more logit per head, which only takes a share of the softmax (GPT-OSS); or None.
      operands: dtype in which a cache's keys and values are multiplied; None for their own.
      rows: the tokens that the queries are of; None for all. Only `CachedAttention` reads it.
    """

    window: int | None
    scale: float
    sinks: Float[Array, " N"] | None = None
    operands: DTypeLike | None = None
    rows: Int[Array, "B Q"] | None = None


@runtime_checkable
class Attend(Protocol):
    """Attention as an argument of a model's layers, so that models know nothing of caches or masks.

    Decoding passes `layers.CachedAttention`, training attention over packed rows and chains.

    Args:
      layer: the layer whose keys and values are meant.
      q: queries.
      k: this layer's keys; None where those of the earlier layer `layer` are reused (Gemma 4).
      v: values, or None likewise.
      state: whatever the implementation passes from layer to layer, such as a `KVCache`.
      rule: window, scale and sinks of this layer.

    Returns:
      The attention output, and the state for the next layer.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B Q N H"],
        k: Float[Array, "B T G H"] | None,
        v: Float[Array, "B T G H"] | None,
        state: Any,
        rule: AttentionRule,
    ) -> tuple[Float[Array, "B Q N H"], Any]: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """What a forward of the target returns beside its attention state.

    Attributes:
      hidden: after the final norm; `compute_logits` and `argmax_logits` read it.
      aux_hidden_states: inputs of the layers `aux_hidden_state_layers`, concatenated in that order.
    """

    hidden: Float[Array, "B T D"]
    aux_hidden_states: Float[Array, "B T A"]


# ---------------------------------------------------------------- training


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed training rows.

    Attributes:
      tokens: token ids.
      segment_ids: which document of its row each token belongs to; -1 is padding.
      loss_mask: whether a loss may read the token as a label.
    """

    tokens: Int[Array | ndarray, "B T"]
    segment_ids: Int[Array | ndarray, "B T"]
    loss_mask: Bool[Array | ndarray, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodSample:
    """The training elements of depth 1 and more that COD sampling selected.

    They are sorted by anchor, then depth, so that each chain is contiguous. Element m is at
    position anchor + depth of the row whose tokens are shifted by one. Unused places of the M have
    `real` False, anchor 0 and depth 0; with partitions they lie at the end of each.
    """

    anchor: Int[Array | ndarray, "B M"]
    depth: Int[Array | ndarray, "B M"]
    real: Bool[Array | ndarray, "B M"]


# ---------------------------------------------------------------- decoding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How each row of a batch samples. Greedy decoding has None in the place of this.

    Attributes:
      key: typed PRNG keys, one per row: a row's text does not depend on the rest of its batch.
      temperature: 0 makes a row greedy.
      top_k: 0 for no such filter.
      top_p: 1 for no such filter.
      min_p: 0 for no such filter.
      filtered: whether any row uses `top_k` or `top_p`, which need a sort of the vocabulary.
    """

    key: Array
    temperature: Float[Array | ndarray, " B"]
    top_k: Int[Array | ndarray, " B"]
    top_p: Float[Array | ndarray, " B"]
    min_p: Float[Array | ndarray, " B"]
    filtered: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Penalties:
    """What each row of a batch adds to the target's logits; see `decode.penalties.penalize`.

    Attributes:
      repetition: 1 for no such penalty.
      presence, frequency: 0 for no such penalties.
      bias: added to the logit of every token.
      in_prompt: which tokens the prompt has.
      min_tokens: tokens that the answer has before a stop token; 0 for no such limit.
    """

    repetition: Float[Array | ndarray, " B"]
    presence: Float[Array | ndarray, " B"]
    frequency: Float[Array | ndarray, " B"]
    bias: Float[Array | ndarray, "B V"]
    in_prompt: Bool[Array | ndarray, "B V"]
    min_tokens: Int[Array | ndarray, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowOptions:
    """What the request in each row of a batch asked for.

    Attributes:
      max_new_tokens: limit of the answer; 0 for a row that holds no request.
      stop_ids: an answer ends with the first of these; -1 stands for none.
      sampling: None where all rows decode greedily.
      penalties: None where no row has any.
      logprobs: whether a row wants the log-probabilities of its tokens.
    """

    max_new_tokens: Int[Array | ndarray, " B"]
    stop_ids: Int[Array | ndarray, "B stops"]
    sampling: SamplingParams | None
    penalties: Penalties | None = None
    logprobs: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftState:
    """What a drafter carries from step to step.

    Attributes:
      cache: the draft head's own KV cache; None for a drafter without one.
      sampling: how drafts are sampled in this step; None drafts argmaxes.
    """

    cache: KVCache | None
    sampling: SamplingParams | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state of a batch between two decoding steps. The first axis of every array is the row.

    A step commits 1 to K + 1 tokens per row: the accepted drafts and one token of the target's own.
    The last committed token is in no cache yet. The next step's verification reads it first.

    Attributes:
      cache: the target's KV cache, without the last committed token.
      draft: the drafter's state.
      tokens: those that the last step committed, in the first `count` of R places; after plain
        steps that alternate with others the newest R, in a ring (`DecodeSpec.lookback`).
      aux_hidden_states: for each of `tokens` the target's aux hidden states at the position BEFORE
        it, which predict it; the draft head reads a token together with these.
      count: how many of `tokens` are real, 1 to R; in the ring, how many were written to it.
      output: the answers; a row's buffer is as long as the cache, and grows with it.
      is_draft: which tokens of `output` are accepted drafts.
      logprobs: of the tokens of `output` by the target alone; zeros where nobody wants them.
      emitted: tokens written to `output`. A step may write beyond the limit.
      length: tokens of the answer so far: `emitted`, cut at the limit and after a stop token.
      done: rows whose answer is complete. Steps leave them as they are.
      failed: rows that are done because the target computed NaN or infinity for them. Their
        `length` leaves out what the last step wrote.
      num_steps: steps taken. Sampling draws its keys by this number.
      num_drafts: steps of these that drafted.
      num_draft_tokens: drafts that were verified.
      num_accepted_per_pos: in how many steps the draft at each of the K positions was accepted.
      num_expected_per_pos: by a calibrated confidence head; None without, or where K never changes.
    """

    cache: KVCache
    draft: DraftState
    tokens: Int[Array, "B R"]
    aux_hidden_states: Float[Array, "B R A"]
    count: Int[Array, " B"]
    output: Int[Array, "B L"]
    is_draft: Bool[Array, "B L"]
    logprobs: Float[Array, "B L"]
    emitted: Int[Array, " B"]
    length: Int[Array, " B"]
    done: Bool[Array, " B"]
    failed: Bool[Array, " B"]
    num_steps: Int[Array, " B"]
    num_drafts: Int[Array, " B"]
    num_draft_tokens: Int[Array, " B"]
    num_accepted_per_pos: Int[Array, "B K"]
    num_expected_per_pos: Float[Array, "B K"] | None = None
