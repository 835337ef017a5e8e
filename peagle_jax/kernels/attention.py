"""Attention of a short block of queries over a cache with per-row lengths."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels.choose import choose, non_16bit_reason

MASKED = -1e30  # finite: a row that sees nothing must give numbers, not NaN


def reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B G S H"],
    v: Float[Array, "B G S H"],
    positions: Int[Array, "B T"],
    held: Int[Array, "B S"] | None,
    *,
    window: int | None,
    scale: float,
    sinks: Float[Array, " N"] | None,
    k_scale: Float[Array, "B G S"] | None = None,
    v_scale: Float[Array, "B G S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention with grouped heads; the query at position p sees positions p-window+1 .. p (0 .. p without window).

    Scores and softmax in float32, as transformers' eager attention does. The definition of correct.

    Args:
      k, v: in the dtype of `q`, or float8 with scales.
      held: the position whose key and value lie in each slot, below 0 for a slot that holds none; None: slot s holds position s.
      sinks: a logit a head that takes part in the softmax and has no value.
      k_scale, v_scale: what a slot's key and value are multiplied with.
    """
    if k_scale is not None:
        k, v = (
            (x.astype(jnp.float32) * s[..., None]).astype(q.dtype)
            for x, s in ((k, k_scale), (v, v_scale))
        )
    if held is None:
        held = jnp.arange(k.shape[2])[None]
    B, T, N, H = q.shape
    G, S = k.shape[1:3]
    R = N // G
    # all queries of a KV head as the rows of one product: no transposed copy of the cache, half the time on CPU (LOG.md)
    q = q.reshape(B, T, G, R, H).transpose(0, 2, 3, 1, 4).reshape(B, G, R * T, H)
    scores = (
        jnp.einsum("BGMH,BGSH->BGMS", q, k, preferred_element_type=jnp.float32).reshape(
            B, G, R, T, S
        )
        * scale
    )
    held = held[:, None]
    seen = (held >= 0) & (held <= positions[..., None])
    if window is not None:
        seen &= held > positions[..., None] - window
    scores = jnp.where(seen[:, None, None], scores, MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(1, G, R, 1, 1)
        top = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
        weights = jnp.exp(scores - top)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))
    y = jnp.matmul(weights.astype(v.dtype).reshape(B, G, R * T, S), v).reshape(B, G, R, T, H)
    return y.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def triton(q, k, v, positions, held, **rule):
    from peagle_jax.kernels import attention_triton

    return attention_triton.attend(q, k, v, positions, held, **rule)


FORMS = {"reference": reference, "triton": triton}


def attend(q, k, v, positions, held, *, form: str, **rule) -> Float[Array, "B T N H"]:
    """As `reference`, by a form of FORMS or "auto"."""
    held_wide = non_16bit_reason(q) if "k_scale" in rule else non_16bit_reason(q, k, v)
    return FORMS[choose("attention", form, FORMS, held_wide)](q, k, v, positions, held, **rule)
