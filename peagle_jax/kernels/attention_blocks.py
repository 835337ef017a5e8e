"""Attention of a chunk of a prompt over a KV cache in blocks of keys, with a running softmax.

FlashAttention's algorithm (arXiv:2205.14135) as loops of XLA's, for processors. All scores of 512
queries and 16,384 slots are 200 MB a layer, which a processor's caches do not hold; those of a
block are a few. Blocks that no query sees are not visited, so that a chunk costs what was written
and not what the cache can hold.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from peagle_jax.kernels.attention import MASKED, narrowed, round_to
from peagle_jax.kernels.cache_write import numbers

# Keys of a block: as many as make so many scores, at least and at most these (LOG.md, 2026-11-27).
BLOCK_SCORES, LEAST_KEYS, MOST_KEYS = 2**21, 128, 512


def block_keys(num_queries: int) -> int:
    """Keys of a block, a power of two, for so many queries of all sequences and heads."""
    keys = 1 << (BLOCK_SCORES // num_queries).bit_length() >> 1
    return min(max(keys, LEAST_KEYS), MOST_KEYS)


def attend_in_blocks(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B G S H"],
    v: Num[Array, "B G S H"],
    positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"] | None,
    *,
    window: int | None,
    scale: float,
    sinks: Float[Array, " N"] | None,
    k_scale: Float[Array, "B G S"] | None = None,
    v_scale: Float[Array, "B G S"] | None = None,
    operands: DTypeLike | None = None,
) -> Float[Array, "B T N H"]:
    """As `kernels.attention.attend`, up to the order of sums.

    With 16-bit operands weights are rounded before they are divided by their sum, and not after.
    """
    (B, T, N, H), (_, G, S, _) = q.shape, k.shape
    size, dtype = min(block_keys(B * T * N), S), q.dtype
    read_dtype = k.dtype if operands is None else jnp.dtype(operands)
    if operands is None and (k_scale is not None or k.dtype == jnp.uint16):
        read_dtype = dtype
    q = q.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, H)
    q = round_to(read_dtype, q).astype(read_dtype)

    def read(x: Array, x_scale: Array | None, start: Array) -> Array:
        x = numbers(jax.lax.dynamic_slice_in_dim(x, start, size, axis=2))
        if x_scale is not None:
            part = jax.lax.dynamic_slice_in_dim(x_scale, start, size, axis=2)
            x = x.astype(jnp.float32) * part[..., None]
        return x.astype(read_dtype)

    def visit(block: Array, carry: tuple[Array, Array, Array], *, masked: bool):
        total, norm, top = carry
        # the last block may reach back into the one before it
        start = jnp.minimum(block * size, S - size)
        keys, values = read(k, k_scale, start), read(v, v_scale, start)
        scores = scale * jnp.einsum("BGMH,BGSH->BGMS", q, keys, preferred_element_type=jnp.float32)
        if masked:
            mask = jnp.where(visible(start, block * size), 0, MASKED)[:, None, None]
            mask = jnp.broadcast_to(mask, (B, 1, N // G, T, size)).reshape(B, 1, -1, size)
            scores += mask
        new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        weights, kept = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        weighed = narrowed(weights, read_dtype)
        added = jnp.matmul(weighed, values, preferred_element_type=jnp.float32)
        norm = norm * kept + weights.sum(axis=-1, keepdims=True)
        return total * kept + added, norm, new_top

    def visible(start: Array, first: Array) -> Array:
        slots = start + jnp.arange(size)[None]
        at = slots
        if kv_positions is not None:
            at = jax.lax.dynamic_slice_in_dim(kv_positions, start, size, axis=1)
        at, to = jnp.where(slots >= first, at, -1)[:, None], positions[..., None]
        seen = (at >= 0) & (at <= to)
        return seen if window is None else seen & (at > to - window)

    num_blocks = -(-S // size)
    begin, whole, end = 0, 0, num_blocks
    if kv_positions is None:
        end = jnp.minimum(positions.max() // size + 1, num_blocks)
        if window is None:
            # blocks that every query sees
            whole = jnp.minimum((positions.min() + 1) // size, S // size)
        else:
            first = jnp.maximum(positions.min() - window + 1, 0) // size
            begin = whole = jnp.minimum(first, num_blocks - 1)
        end = jnp.maximum(end, begin + 1)  # of queries that see nothing, too, there are numbers
    shape = (*q.shape[:3], 1)
    top, norm = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sinks is not None:
        top = jnp.repeat(sinks.astype(jnp.float32).reshape(G, -1), T, axis=1)[None, ..., None]
        top, norm = jnp.broadcast_to(top, shape), jnp.ones(shape, jnp.float32)
    carry = jnp.zeros(q.shape, jnp.float32), norm, top
    carry = jax.lax.fori_loop(begin, whole, lambda i, x: visit(i, x, masked=False), carry)
    total, norm, _ = jax.lax.fori_loop(whole, end, lambda i, x: visit(i, x, masked=True), carry)
    y = (total / norm).astype(dtype)
    return y.reshape(B, G, N // G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
