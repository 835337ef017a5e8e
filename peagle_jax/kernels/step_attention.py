"""Attention over a KV cache on a CPU, in C++ (native/step_attention.h).

XLA calls its library four times a layer, for the scores, the softmax and the values, and each call
has to be handed to threads: some 100 us a layer for one text of 200 tokens, of which arithmetic
takes 10 (LOG.md, 2026-11-29, late).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from peagle_jax.kernels import native_code


def can_attend(q: Float[Array, "B T N H"], k: Num[Array, "B G S H"]) -> bool:
    """Whether the kernel can do it: on one CPU, in float32, with heads of whole vectors.

    Caches may be bfloat16 (`cache_write.array_dtype`).
    """
    if q.dtype != jnp.float32 or k.dtype not in (jnp.float32, jnp.uint16):
        return False
    return native_code.is_callable_here() and native_code.fills_vectors(q.shape[3])


def attend(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B G S H"],
    v: Num[Array, "B G S H"],
    mask: Float[Array, "B T S"],
    scale: float,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B T N H"]:
    """Softmax attention with grouped heads, in float32.

    A query's result depends on the slots that it sees, and on no other query; but for NaN in a
    slot that another query of its sequence sees.

    Args:
      mask: what is added to scores: 0 where a query sees a slot, and -1e30 elsewhere. A query that
        sees none gets zeros.
      sinks: one more logit a head, which takes part in the softmax and has no value.
    """
    call = native_code.function("peagle_step_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(q, k, v, mask, _or_empty(sinks), scale=np.float32(scale))


def write_and_attend(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B G S H"],
    v: Num[Array, "B G S H"],
    mask: Float[Array, "B T S"],
    scale: float,
    sinks: Float[Array, " N"] | None,
    new_k: Float[Array, "B I G H"],
    new_v: Float[Array, "B I G H"],
    first: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Num[Array, "B G S H"], Num[Array, "B G S H"]]:
    """As `attend`, after new keys and values were written to the caches, in place.

    Args:
      first: the slot of a sequence's first new token; the others follow.

    Returns:
      What `attend` returns, and both caches.
    """
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    options = {"input_output_aliases": {1: 1, 2: 2}}
    call = native_code.function("peagle_write_and_attend", results, **options)
    new = new_k.astype(jnp.float32), new_v.astype(jnp.float32), first.astype(jnp.int32)
    return tuple(call(q, k, v, mask, _or_empty(sinks), *new, scale=np.float32(scale)))


def _or_empty(sinks: Float[Array, " N"] | None) -> Float[Array, "..."]:
    return jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
