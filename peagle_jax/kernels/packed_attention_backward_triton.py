"""COD training attention in Triton, backward: one kernel for queries, one for keys and values.

There are no atomics: every sum has the same order each time. The arithmetic is 2.5 times that of
the forward pass.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.launch import Launch, Launcher
from peagle_jax.kernels.packed_attention import AttentionIntervals
from peagle_jax.kernels.packed_attention_forward_triton import (
    LOG2_E,
    constants,
    count_tiles,
    scores,
    tile_config,
    tile_rows,
)


@triton.jit
def add_query_gradient(
    q,
    dy,
    lse,
    delta,
    k_ptr,
    v_ptr,
    row,
    exists,
    visible,
    h,
    dq,
    step: tl.constexpr,
    H: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Adds what one more tile of keys contributes to the gradient of a tile of queries."""
    k, x = scores(q, k_ptr, row, exists, visible, h, step, H, FACTOR)
    v = tl.load(
        v_ptr + row[:, None].to(tl.int64) * step + h[None, :],
        mask=exists[:, None] & (h[None, :] < H),
        other=0.0,
    )
    d = tl.exp2(x - lse[:, None]) * (tl.dot(dy, v.T) - delta[:, None])
    return tl.dot(d.to(k.dtype), k, dq)


@triton.jit
def query_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    last_ptr,
    chain_len_ptr,
    dy_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    P: tl.constexpr,
    N0: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    CHAIN: tl.constexpr,
    DEPTH0_TILES: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BH: tl.constexpr,
):
    """Gradient of one tile of queries.

    Program (i, b * N + head) takes the BQ rows of tile i and walks over keys as `forward_kernel`
    does. Scores are computed again from the log-sum-exps. `delta_ptr`: what the softmax subtracts
    from the gradient of each row's scores.
    """
    b = tl.program_id(1) // N
    head = tl.program_id(1) % N
    row, real, begin = tile_rows(tl.program_id(0), DEPTH0_TILES, BQ, N0, P)
    h = tl.arange(0, BH)
    at = (b * P + row).to(tl.int64) * N + head
    inside_q = real[:, None] & (h[None, :] < H)
    q = tl.load(q_ptr + at[:, None] * H + h[None, :], mask=inside_q, other=0.0)
    dy = tl.load(dy_ptr + at[:, None] * H + h[None, :], mask=inside_q, other=0.0)
    lse = tl.load(lse_ptr + at, mask=real, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + at, mask=real, other=0.0)
    first = tl.load(first_ptr + b * P + row, mask=real, other=P)
    last = tl.load(last_ptr + b * P + row, mask=real, other=-1)
    chain_len = tl.load(chain_len_ptr + b * P + row, mask=real, other=0)
    k_head = k_ptr + (b * P * G + head // (N // G)).to(tl.int64) * H
    v_head = v_ptr + (b * P * G + head // (N // G)).to(tl.int64) * H
    FACTOR: tl.constexpr = SCALE * LOG2_E
    dq = tl.zeros((BQ, BH), tl.float32)
    sees_depth0 = first <= last
    low = tl.min(tl.where(sees_depth0, first, P), 0) // BK * BK
    high = tl.max(tl.where(sees_depth0, last, -1), 0) + 1
    for start in range(low, high, BK):
        s = start + tl.arange(0, BK)
        visible = (s[None, :] >= first[:, None]) & (s[None, :] <= last[:, None])
        dq = add_query_gradient(
            q, dy, lse, delta, k_head, v_head, s, s < N0, visible, h, dq, G * H, H, FACTOR
        )
    if CHAIN > 0:
        if begin >= N0:
            for start in range(tl.maximum(begin - CHAIN + 1, N0), tl.minimum(begin + BQ, P), BK):
                s = start + tl.arange(0, BK)
                visible = (s[None, :] <= row[:, None]) & (s[None, :] > (row - chain_len)[:, None])
                dq = add_query_gradient(
                    q, dy, lse, delta, k_head, v_head, s, s < P, visible, h, dq, G * H, H, FACTOR
                )
    tl.store(
        dq_ptr + at[:, None] * H + h[None, :],
        (dq * SCALE).to(dq_ptr.dtype.element_ty),
        mask=inside_q,
    )


@triton.jit
def key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    last_ptr,
    chain_len_ptr,
    dy_ptr,
    lse_ptr,
    delta_ptr,
    range_ptr,
    dk_ptr,
    dv_ptr,
    P: tl.constexpr,
    N0: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    CHAIN: tl.constexpr,
    DEPTH0_TILES: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BH: tl.constexpr,
):
    """Gradient of one tile of keys and values, summed over the query heads of its group.

    Program (i, b * G + g) takes the BK keys of tile i and walks over the rows that see any of them,
    BQ at a time and, for each of these, over the R query heads of KV head g. One program sums all
    that a key gets, so nothing is added atomically, and sums have the same order in every run.

    Depth-0 keys are seen by depth-0 rows and by packed rows: `range_ptr` [B DEPTH0_TILES 2 2] holds
    the stretch of rows for both (function `ranges`). Packed keys are seen by the rows of their own
    chain, which follow within CHAIN - 1 rows.
    """
    b = tl.program_id(1) // G
    g = tl.program_id(1) % G
    tile = tl.program_id(0)
    s, exists, begin = tile_rows(tile, DEPTH0_TILES, BK, N0, P)
    h = tl.arange(0, BH)
    at_k = (b * P + s).to(tl.int64) * G + g
    inside_k = exists[:, None] & (h[None, :] < H)
    k = tl.load(k_ptr + at_k[:, None] * H + h[None, :], mask=inside_k, other=0.0)
    v = tl.load(v_ptr + at_k[:, None] * H + h[None, :], mask=inside_k, other=0.0)
    FACTOR: tl.constexpr = SCALE * LOG2_E
    R: tl.constexpr = N // G
    dk = tl.zeros((BK, BH), tl.float32)
    dv = tl.zeros((BK, BH), tl.float32)
    packed = begin >= N0
    # part 0: depth-0 queries; part 1: packed queries, which alone see packed keys
    for part in range(0, 2):
        if packed:
            low = begin
            high = tl.where(part == 1, tl.minimum(begin + BK + CHAIN - 1, P), begin)
        else:
            low = tl.load(range_ptr + ((b * DEPTH0_TILES + tile) * 2 + part) * 2)
            high = tl.load(range_ptr + ((b * DEPTH0_TILES + tile) * 2 + part) * 2 + 1)
        for start in range(low, high, BQ):
            row = start + tl.arange(0, BQ)
            real = row < high
            first = tl.load(first_ptr + b * P + row, mask=real, other=P)
            last = tl.load(last_ptr + b * P + row, mask=real, other=-1)
            chain_len = tl.load(chain_len_ptr + b * P + row, mask=real, other=0)
            if packed:
                visible = (s[:, None] <= row[None, :]) & (s[:, None] > (row - chain_len)[None, :])
            else:
                visible = (s[:, None] >= first[None, :]) & (s[:, None] <= last[None, :])
            visible &= exists[:, None]
            for r in range(0, R):
                at = (b * P + row).to(tl.int64) * N + g * R + r
                inside_q = real[:, None] & (h[None, :] < H)
                q = tl.load(q_ptr + at[:, None] * H + h[None, :], mask=inside_q, other=0.0)
                dy = tl.load(dy_ptr + at[:, None] * H + h[None, :], mask=inside_q, other=0.0)
                lse = tl.load(lse_ptr + at, mask=real, other=0.0) * LOG2_E
                delta = tl.load(delta_ptr + at, mask=real, other=0.0)
                p = tl.where(
                    visible, tl.exp2(tl.minimum(tl.dot(k, q.T) * FACTOR - lse[None, :], 0.0)), 0.0
                )
                dv = tl.dot(p.to(dy.dtype), dy, dv)
                d = p * (tl.dot(v, dy.T) - delta[None, :])
                dk = tl.dot(d.to(q.dtype), q, dk)
    tl.store(
        dk_ptr + at_k[:, None] * H + h[None, :],
        (dk * SCALE).to(dk_ptr.dtype.element_ty),
        mask=inside_k,
    )
    tl.store(dv_ptr + at_k[:, None] * H + h[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside_k)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    intervals: AttentionIntervals,
    scale: float,
    y: jax.Array,
    lse: jax.Array,
    dy: jax.Array,
    dlse: jax.Array,
    start: Launcher,
    **overrides: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v.

    Args:
      y, lse: as `forward` returned them.
      dy, dlse: gradients of these.
      start: executes a launch.
      overrides: of `tile_config`, for measuring.
    """
    B, P, N, H = q.shape
    tiles = tile_config(H) | overrides
    delta = (dy.astype(jnp.float32) * y.astype(jnp.float32)).sum(axis=-1) - dlse
    inputs = (
        q,
        k,
        v,
        intervals.first,
        intervals.last,
        intervals.chain_len,
        dy.astype(q.dtype),
        lse,
        delta,
    )
    of_queries = Launch(
        kernel=query_kernel,
        inputs=inputs,
        outputs=(jax.ShapeDtypeStruct(q.shape, q.dtype),),
        grid=(count_tiles(intervals, P, tiles["bq"])[1], B * N),
        constants=constants(q, k, intervals, scale, tiles, tiles["bq"]),
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    tiles |= {"bq": tiles["kq"]}
    of_keys = Launch(
        kernel=key_kernel,
        inputs=(*inputs, ranges(intervals, tiles["bk"], tiles["bq"])),
        outputs=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        grid=(count_tiles(intervals, P, tiles["bk"])[1], B * k.shape[2]),
        constants=constants(q, k, intervals, scale, tiles, tiles["bk"]),
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    (dq,) = start(of_queries)
    dk, dv = start(of_keys)
    return dq, dk, dv


def ranges(intervals: AttentionIntervals, keys: int, queries: int) -> jax.Array:
    """[B tiles 2 2]: for every tile of depth-0 keys, the rows first .. last + 1 that see any of it.

    There is one stretch of rows among the depth-0 rows, and one among the packed rows. They are
    found tile of queries by tile of keys, and so are up to a tile longer than need be.

    Args:
      keys, queries: of a tile.
    """
    n, P = intervals.depth0, intervals.first.shape[1]
    parts = [_rows_that_see(intervals, keys, queries, *part) for part in ((0, n), (n, P))]
    return jnp.stack(parts, axis=2).astype(jnp.int32)


def _rows_that_see(
    intervals: AttentionIntervals, keys: int, queries: int, low: int, high: int
) -> jax.Array:
    """[B tiles 2]: for every tile of depth-0 keys, the rows of low .. high that see any of it."""
    B, P = intervals.first.shape
    begin = jnp.arange(triton.cdiv(intervals.depth0, keys)) * keys
    count = triton.cdiv(high - low, queries)
    if count == 0:
        return jnp.zeros((B, len(begin), 2), jnp.int32)
    first, last = intervals.first[:, low:high], intervals.last[:, low:high]
    sees_depth0 = first <= last

    def by_tile(x, fill):
        """[B rows] -> [B tiles rows]."""
        padding = [(0, 0), (0, count * queries - x.shape[1])]
        return jnp.pad(x, padding, constant_values=fill).reshape(B, count, queries)

    first = by_tile(jnp.where(sees_depth0, first, P), P).min(axis=2)
    last = by_tile(jnp.where(sees_depth0, last, -1), -1).max(axis=2)
    # [B, tiles of queries, tiles of keys]
    meets = (first[..., None] < begin[None, None] + keys) & (last[..., None] >= begin[None, None])
    any_meets = meets.any(axis=1)
    start = low + jnp.argmax(meets, axis=1) * queries
    end = jnp.minimum(low + (count - jnp.argmax(meets[:, ::-1], axis=1)) * queries, high)
    return jnp.stack([jnp.where(any_meets, start, 0), jnp.where(any_meets, end, 0)], axis=-1)
