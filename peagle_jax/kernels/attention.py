"""Attention of a short block of queries over a KV cache whose rows have different lengths."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.kernels.choose import choose, non_16bit_reason

MASKED = -1e30  # a finite score: a row that sees nothing must give numbers, not NaN


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
    """
    if k_scale is not None and v_scale is not None:
        k = (k.astype(jnp.float32) * k_scale[..., None]).astype(q.dtype)
        v = (v.astype(jnp.float32) * v_scale[..., None]).astype(q.dtype)
    if kv_positions is None:
        kv_positions = jnp.arange(k.shape[2])[None]
    B, T, N, H = q.shape
    G, S = k.shape[1:3]
    R = N // G
    # The queries of a KV head are the rows of one product. Without this the cache is copied and
    # transposed, and a CPU takes twice the time (LOG.md).
    dtype = q.dtype
    q = q.astype(k.dtype).reshape(B, T, G, R, H).transpose(0, 2, 3, 1, 4).reshape(B, G, R * T, H)
    scores = jnp.einsum("BGMH,BGSH->BGMS", q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, G, R, T, S) * scale
    if visible is None:
        slot_position, query_position = kv_positions[:, None], positions[..., None]
        visible = (slot_position >= 0) & (slot_position <= query_position)
        if window is not None:
            visible &= slot_position > query_position - window
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(1, G, R, 1, 1)
        top = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
        weights = jnp.exp(scores - top)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))
    weights = weights.astype(v.dtype).reshape(B, G, R * T, S)
    y = jnp.matmul(weights, v, preferred_element_type=dtype).reshape(B, G, R, T, H)
    return y.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


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
    k: Float[Array, "B G S H"],
    v: Float[Array, "B G S H"],
    positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"] | None,
    *,
    form: str,
    visible: Bool[Array, "B T S"] | None = None,
    **rule: Any,
) -> Float[Array, "B T N H"]:
    """As `reference`, which has the keywords of `rule`, too.

    Args:
      visible: as of `reference`, which alone can take it.
      form: a name of FORMS, or "auto".

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    # with scales, keys and values are float8 and are multiplied in the dtype of the queries
    operands = (q,) if "k_scale" in rule else (q, k, v)
    reason = non_16bit_reason(*operands) if visible is None else "it verifies a tree"
    form = choose("attention", form, FORMS, reason)
    if visible is not None:
        rule["visible"] = visible
    return FORMS[form](q, k, v, positions, kv_positions, **rule)
