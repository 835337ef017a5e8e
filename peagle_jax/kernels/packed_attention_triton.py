"""COD training attention in Triton: forward and backward kernels as one differentiable function."""

import functools
from typing import cast

import jax
import jax.numpy as jnp

from peagle_jax.kernels.launch import Launcher, on_gpu
from peagle_jax.kernels.packed_attention import AttentionIntervals
from peagle_jax.kernels.packed_attention_backward_triton import backward
from peagle_jax.kernels.packed_attention_forward_triton import forward


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    intervals: AttentionIntervals,
    scale: float,
    start: Launcher = on_gpu,
    **overrides: int,
) -> tuple[jax.Array, jax.Array]:
    """As `packed_attention.reference`, but rows that see nothing give zeros.

    Args:
      start: executes a launch.
      overrides: of `tile_config`, for measuring.
    """
    arrays = (x.astype(jnp.int32) for x in (intervals.first, intervals.last, intervals.chain_len))
    static = intervals.depth0, intervals.max_chain_len
    options = static, float(scale), start, tuple(overrides.items())
    return cast(tuple[jax.Array, jax.Array], _attend(q, k, v, *arrays, *options))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _attend(q, k, v, first, last, chain_len, static, scale, start, overrides):
    intervals = AttentionIntervals(first, last, chain_len, *static)
    return forward(q, k, v, intervals, scale, start, **dict(overrides))


def _forward(*args):
    y, lse = cast(tuple[jax.Array, jax.Array], _attend(*args))
    return (y, lse), (*args[:6], y, lse)


def _backward(static, scale, start, overrides, residuals, cotangents):
    q, k, v, first, last, chain_len, y, lse = residuals
    dy, dlse = cotangents
    intervals = AttentionIntervals(first, last, chain_len, *static)
    grads = backward(q, k, v, intervals, scale, y, lse, dy, dlse, start, **dict(overrides))
    return *grads, None, None, None


_attend.defvjp(_forward, _backward)
