"""Attention of a block of queries over a KV cache whose rows have different lengths."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from peagle_jax.kernels import cache_write, step_attention
from peagle_jax.kernels.choose import choose, multi_device_reason, non_16bit_reason
from peagle_jax.kernels.launch import platform
from peagle_jax.kernels.processor import has_bfloat16_matrix_units

MASKED = -1e30  # a finite score: a row that sees nothing must give numbers, not NaN
# On a CPU, more scores than these are computed in blocks of keys (LOG.md, 2026-11-27).
MAX_SCORES = 2**21
# Those of fewer queries are not: a verification then rounds its weights as plain decoding does.
LEAST_QUERIES = 64
# Prompts with more slots are not for the C++ kernel where XLA multiplies bfloat16, which is faster
# then (LOG.md, 2026-11-30); nor are those whose masks have more numbers.
MAX_NATIVE_SLOTS = 1024
MAX_MASK = 2**23


def reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B G S H"],
    v: Float[Array, "B G S H"],
    positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"] | None,
    *,
    window: int | None,
    scale: float,
    sinks: Float[Array, " N"] | None,
    k_scale: Float[Array, "B G S"] | None = None,
    v_scale: Float[Array, "B G S"] | None = None,
    visible: Bool[Array, "B T S"] | None = None,
    operands: DTypeLike | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention with grouped heads: the definition of correct.

    The query at position p sees positions p - window + 1 .. p, or 0 .. p without a window. Scores
    and softmax are float32, as in transformers' eager attention.

    Args:
      k, v: in 16 or 32 bits, which is the precision of the products' operands; or float8 with
        scales, which are multiplied in the dtype of `q`.
      positions: of the queries.
      kv_positions: the position whose key and value lie in each slot, below 0 for an empty slot.
        None: slot s holds position s.
      sinks: one more logit a head, which takes part in the softmax and has no value.
      k_scale, v_scale: what a slot's key and value are multiplied with.
      visible: which slots each query sees, in the place of positions and window; None: as they say.
      operands: the dtype to which queries, keys, values and weights are rounded before they are
        multiplied; None: that of `k` and `v`. What is float32 in a cache must have been rounded
        when it was written.
    """
    if k_scale is not None and v_scale is not None:
        read_dtype = q.dtype if operands is None else operands
        k = (k.astype(jnp.float32) * k_scale[..., None]).astype(read_dtype)
        v = (v.astype(jnp.float32) * v_scale[..., None]).astype(read_dtype)
    if kv_positions is None:
        kv_positions = jnp.arange(k.shape[2])[None]
    B, T, N, H = q.shape
    G, S = k.shape[1:3]
    R = N // G
    dtype = q.dtype
    operands = k.dtype if operands is None else operands
    if converts_cache(k.dtype, operands, T):
        k, v = k.astype(operands), v.astype(operands)
    # The queries of a KV head are the rows of one product. Without this the cache is copied and
    # transposed, and a CPU takes twice the time (LOG.md).
    q = q.reshape(B, T, G, R, H).transpose(0, 2, 3, 1, 4).reshape(B, G, R * T, H)
    scores = _scores(round_to(operands, q).astype(k.dtype), k, num_tokens=T)
    # The mask is added, and has the axes of the scores: XLA then computes it once for all layers.
    # By `where` on scores with an axis for R, attention takes up to twice the time on a CPU.
    mask = _mask(positions, kv_positions, window, visible)
    mask = jnp.broadcast_to(mask[:, None, None], (B, 1, R, T, S))
    scores = scores * scale + mask.reshape(B, 1, R * T, S)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = jnp.repeat(sinks.astype(jnp.float32).reshape(G, R), T, axis=1)[None, ..., None]
        top = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
        weights = jnp.exp(scores - top)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))
    weights = round_to(operands, weights).astype(v.dtype)
    y = jnp.matmul(weights, v, preferred_element_type=dtype)
    return y.reshape(B, G, R, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _mask(
    positions: Int[Array, "#B T"],
    kv_positions: Int[Array, "#B S"],
    window: int | None,
    visible: Bool[Array, "#B T S"] | None,
) -> Float[Array, "#B T S"]:
    """What is added to the scores: 0 where a query sees a slot, by the rule of `reference`."""
    if visible is None:
        slot_position, query_position = kv_positions[:, None], positions[..., None]
        visible = (slot_position >= 0) & (slot_position <= query_position)
        if window is not None:
            visible &= slot_position > query_position - window
    return jnp.where(visible, jnp.float32(0), jnp.float32(MASKED))


def native(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B G S H"],
    v: Num[Array, "B G S H"],
    positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"] | None,
    *,
    window: int | None,
    scale: float,
    sinks: Float[Array, " N"] | None,
    visible: Bool[Array, "B T S"] | None = None,
) -> Float[Array, "B T N H"]:
    """As `reference`, in float32 on a CPU, by a C++ kernel. It has no gradient."""
    mask = _whole_mask(q, k, positions, kv_positions, window, visible)
    return step_attention.attend(q, k, v, mask, scale, sinks)


def native_write(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B G S H"],
    v: Num[Array, "B G S H"],
    positions: Int[Array, "B T"],
    new_k: Float[Array, "B I G H"],
    new_v: Float[Array, "B I G H"],
    first: Int[Array, " B"],
    *,
    window: int | None,
    scale: float,
    sinks: Float[Array, " N"] | None,
    visible: Bool[Array, "B T S"] | None = None,
) -> tuple[Float[Array, "B T N H"], Num[Array, "B G S H"], Num[Array, "B G S H"]]:
    """As `native`, after new keys and values were written to the slots from `first` on.

    Returns:
      What `native` returns, and both caches, which are written in place.
    """
    mask = _whole_mask(q, k, positions, None, window, visible)
    new = new_k, new_v, first
    return step_attention.write_and_attend(q, k, v, mask, scale, sinks, *new)


def is_native(
    q: Float[Array, "B T N H"], k: Num[Array, "B G S H"], operands: DTypeLike | None
) -> bool:
    """Whether `attend` chooses `native` for a cache that is not float8."""
    if step_operands(operands) is not None or not step_attention.can_attend(q, k):
        return False
    (B, T), S = q.shape[:2], k.shape[2]
    if T < LEAST_QUERIES:
        return True
    if operands is not None and jnp.dtype(operands) != jnp.float32:
        # XLA rounds to `operands`, and what it does that to must not depend on the rows beside it
        return T * S <= MAX_MASK and S <= MAX_NATIVE_SLOTS
    return B * T * S <= MAX_MASK


def _whole_mask(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B G S H"],
    positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"] | None,
    window: int | None,
    visible: Bool[Array, "B T S"] | None,
) -> Float[Array, "B T S"]:
    """`_mask` with a row for each query."""
    if kv_positions is None:
        kv_positions = jnp.arange(k.shape[2])[None]
    mask = _mask(positions, kv_positions, window, visible)
    return jnp.broadcast_to(mask, (*q.shape[:2], k.shape[2]))


def _scores(
    q: Float[Array, "B G M H"], k: Float[Array, "B G S H"], *, num_tokens: int
) -> Float[Array, "B G M S"]:
    """The products of M queries, those of so many tokens, with all keys.

    For one token and two to four heads a CPU multiplies the keys with the queries, and turns the
    small result: 8 rows of 512 slots take 0.94 ms in the place of 2.1 ms. XLA would make both
    orders one, hence the barrier. With more queries the turning costs more than it saves (LOG.md).
    """
    is_turned = num_tokens == 1 and 1 < q.shape[2] <= 4 and platform() == "cpu"
    if not is_turned:
        return jnp.einsum("BGMH,BGSH->BGMS", q, k, preferred_element_type=jnp.float32)
    scores = jnp.einsum("BGSH,BGMH->BGSM", k, q, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(scores).swapaxes(2, 3)


def step_operands(operands: DTypeLike | None) -> DTypeLike | None:
    """The dtype in which few queries are multiplied with a cache: `operands` on matrix units.

    Elsewhere rounding and converting cost a step what they save, but not a prompt: on an AMD EPYC
    four prompts of 3,900 tokens take 3.7 s in the place of 4.6 (LOG.md, 2026-11-27).
    """
    return operands if has_bfloat16_matrix_units() else None


def read_operands(operands: DTypeLike | None, num_queries: int) -> DTypeLike | None:
    """The dtype in which `attend` multiplies so many queries of a sequence with a cache."""
    return operands if num_queries >= LEAST_QUERIES else step_operands(operands)


def converts_cache(dtype: DTypeLike, operands: DTypeLike | None, num_tokens: int) -> bool:
    """Whether `attend` converts a cache of `dtype` to `operands`, or makes numbers of its bits.

    For one token that costs more than it saves. Its products read the cache as it is, and differ
    only in the order of sums, because all operands have been rounded.
    """
    is_other = operands is not None and jnp.dtype(operands) != dtype
    return (is_other or jnp.dtype(dtype) == jnp.uint16) and num_tokens > 1


def round_to(dtype: DTypeLike, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` in its own dtype, rounded to what `dtype` can hold.

    Not by two conversions: XLA may leave out both.
    """
    info = jnp.finfo(dtype)
    if info.nmant >= jnp.finfo(x.dtype).nmant:
        return x
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def narrowed(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """`x` in `dtype`, rounded to the nearest, and where two are as near, to the even one.

    XLA's own conversion to bfloat16 takes a CPU 0.5 ms for 1.5 million numbers, and this 0.2
    (LOG.md, 2026-11-27), because it minds no NaN: one whose bits are all ones becomes 0.
    """
    if x.dtype != jnp.float32 or jnp.dtype(dtype) != jnp.bfloat16:
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def triton(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B G S H"],
    v: Float[Array, "B G S H"],
    positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"] | None,
    **rule: Any,
) -> Float[Array, "B T N H"]:
    """As `reference`, by the Triton kernel."""
    from peagle_jax.kernels import attention_triton

    return attention_triton.attend(q, k, v, positions, kv_positions, **rule)


FORMS = {"reference": reference, "triton": triton}


def attend(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B G S H"],
    v: Num[Array, "B G S H"],
    positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"] | None,
    *,
    form: str,
    visible: Bool[Array, "B T S"] | None = None,
    operands: DTypeLike | None = None,
    **rule: Any,
) -> Float[Array, "B T N H"]:
    """As `reference`, which has the keywords of `rule`, too; on a CPU by a C++ kernel where one can
    do it (`native`), and elsewhere in blocks where scores are many (`attention_blocks`).

    Args:
      k, v: as of `reference`, or a cache's arrays (`cache_write.array_dtype`).
      visible: as of `reference`, which alone can take it beside `native`.
      operands: as of `reference`, for prompts; of steps see `step_operands`. Triton multiplies keys
        and values as they are.
      form: a name of FORMS, or "auto".

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    if form == "auto" and "k_scale" not in rule and is_native(q, k, operands):
        return native(q, k, v, positions, kv_positions, visible=visible, **rule)
    (B, T, N, _), S = q.shape, k.shape[2]
    is_long = T >= LEAST_QUERIES and B * T * N * S > MAX_SCORES
    is_here = platform() == "cpu" and multi_device_reason() is None
    if form == "auto" and visible is None and is_long and is_here:
        from peagle_jax.kernels.attention_blocks import attend_in_blocks

        return attend_in_blocks(q, k, v, positions, kv_positions, operands=operands, **rule)
    if k.dtype == jnp.uint16 and read_operands(operands, T) is None:
        # in the dtype of the queries, as elsewhere: what is rounded must not depend on the form
        k, v = (cache_write.numbers(x).astype(q.dtype) for x in (k, v))
    k, v = cache_write.numbers(k), cache_write.numbers(v)
    # with scales, keys and values are float8 and are multiplied in the dtype of the queries
    arrays = (q,) if "k_scale" in rule else (q, k, v)
    reason = non_16bit_reason(*arrays)
    if visible is not None:
        reason = "a mask says which keys are seen (a tree, or other attention of placeholders)"
    form = choose("attention", form, FORMS, reason)
    if form == "reference":
        # by the tokens alone, and not by the rows beside them
        rule |= {"visible": visible, "operands": read_operands(operands, T)}
    return FORMS[form](q, k, v, positions, kv_positions, **rule)
