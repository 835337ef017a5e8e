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
    q = q.reshape(B, T, G, N // G, H)
    scores = jnp.einsum("BTGRH,BGSH->BGTRS", q, k, preferred_element_type=jnp.float32) * H**-0.5
    slot = jnp.arange(S)[None, None]
    seen = slot <= positions[..., None]
    if window is not None:
        seen &= slot > positions[..., None] - window
    weights = jax.nn.softmax(jnp.where(seen[:, None, :, None], scores, MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("BGTRS,BGSH->BTGRH", weights, v).reshape(B, T, N, H)
