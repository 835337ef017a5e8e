"""Attention of COD training on a CPU, in C++ (native/packed_attention.h).

XLA multiplies every query of a block with every key, of which half are not seen, keeps scores where
they are few, and calls its library for each product, sum and transpose. Here blocks of queries
visit the keys that they see, and a gradient computes scores again.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import native_code

# first, last, chain_len and, where rows see keys behind them, chain_ahead; [B P]
Rows = tuple[Int[Array, "..."], ...]


def can_attend(
    q: Float[Array, "B Q N H"], k: Float[Array, "B P G H"], v: Float[Array, "B P G H"]
) -> bool:
    """Whether the kernels can do it: on one CPU, in float32, with heads of whole vectors."""
    if not q.dtype == k.dtype == v.dtype == jnp.float32 or not q.size or not k.size:
        return False
    return native_code.is_callable_here() and native_code.fills_vectors(q.shape[3])


def attend(
    q: Float[Array, "B Q N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    first: Int[Array, "B P"],
    last: Int[Array, "B P"],
    chain_len: Int[Array, "B P"],
    chain_ahead: Int[Array, "B P"] | None,
    depth0: int,
    scale: float,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B Q N"]]:
    """Softmax attention of the last Q of P rows, and the log-sum-exp of its scores.

    Args:
      first, last, chain_len, chain_ahead: what rows see, as `packed_attention.AttentionIntervals`
        says it.
      depth0: how many of the P rows are of depth 0.
    """
    ahead = jnp.zeros(0, jnp.int32) if chain_ahead is None else chain_ahead
    rows = tuple(x.astype(jnp.int32) for x in (first, last, chain_len, ahead))
    return _attend(depth0, scale, q, k, v, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(depth0: int, scale: float, q, k, v, rows: Rows) -> tuple[Array, Array]:
    results = [jax.ShapeDtypeStruct(shape, q.dtype) for shape in (q.shape, q.shape[:3])]
    call = native_code.function("peagle_packed_attention", results)
    y, lse = call(q, k, v, *rows, scale=np.float32(scale), depth0=np.int64(depth0))
    return y, lse


def _attend_forward(depth0, scale, q, k, v, rows):
    y, lse = cast(Any, _attend)(depth0, scale, q, k, v, rows)
    return (y, lse), (q, k, v, rows, y, lse)


def _attend_backward(depth0, scale, saved, cotangents):
    q, k, v, rows, y, lse = saved
    dy, dlse = cotangents
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    call = native_code.function("peagle_packed_attention_gradient", results)
    options = {"scale": np.float32(scale), "depth0": np.int64(depth0)}
    dq, dk, dv = call(q, k, v, *rows, y, lse, dy, dlse, **options)
    return dq, dk, dv, None


_attend.defvjp(_attend_forward, _attend_backward)
