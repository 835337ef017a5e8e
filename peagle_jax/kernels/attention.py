"""Attention of a short block of queries over a cache with per-row lengths: the definition of correct."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MASKED = -1e30  # finite: a row that sees nothing must give numbers, not NaN


def reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B G S H"],
    v: Float[Array, "B G S H"],
    positions: Int[Array, "B T"],
    window: int | None,
) -> Float[Array, "B T N H"]:
    """Softmax attention with grouped heads; the query at position p sees slots p-window+1 .. p (0 .. p without window).

    Scores and softmax in float32, as transformers' eager attention does.
    """
    B, T, N, H = q.shape
    G, S = k.shape[1:3]
    R = N // G
    # all queries of a KV head as the rows of one product: no transposed copy of the cache, half the time on CPU (LOG.md)
    q = q.reshape(B, T, G, R, H).transpose(0, 2, 3, 1, 4).reshape(B, G, R * T, H)
    scores = jnp.einsum("BGMH,BGSH->BGMS", q, k, preferred_element_type=jnp.float32).reshape(B, G, R, T, S) * H**-0.5
    slot = jnp.arange(S)[None, None]
    seen = slot <= positions[..., None]
    if window is not None:
        seen &= slot > positions[..., None] - window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1).astype(v.dtype)
    y = jnp.matmul(weights.reshape(B, G, R * T, S), v).reshape(B, G, R, T, H)
    return y.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
