"""Cached attention in Triton, split along the cache and merged by log-sum-exp (flash decoding).

It is bound by reading the cache once: 8 rows x 4,096 slots x 4 heads x 128 numbers in bfloat16 are
67 MB, 15.6 us at the 4.3 TB/s that a copy reaches on an H200. Three decisions follow.

- All queries of a KV head, (K + 1) tokens times the query heads of its group, share one pass over
  its keys.
- A row reads the slots that its own length and window make visible, and no others.
- What a row reads is cut into splits, so that every multiprocessor has about one. Lengths are known
  on the GPU alone: the grid has as many programs as any length needs, and each finds its share.

A split's length is a power of two, and begins at a multiple of it. So a row's sums are grouped
alike in plain decoding and in verification, unless the block crosses a length from which on splits
are twice as long. A prompt has enough queries to fill the GPU, and its cache is cut less, or not
at all.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.decode_triton import as_multiplied
from peagle_jax.kernels.launch import Gpu, Launch, Launcher, gpu, on_gpu

MAX_BLOCK = 64  # tokens that decoding may verify at once; more are a prompt's
# Slots of a split. Fewer are one trip to memory as well, and would bring more parts to merge. More,
# and in a batch a row that is longer than the others would keep few multiprocessors busy.
MIN_SPAN, MAX_SPAN = 64, 1024
# Slots of up to 128 numbers that one program reads in less time than merging would take.
MAX_UNSPLIT = 256
LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2_E), and exp2 is one instruction
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    kv_position_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    B: tl.constexpr,
    T: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    MOST_SEEN: tl.constexpr,
    SHARES: tl.constexpr,
    MIN_SPAN: tl.constexpr,
    MAX_SPAN: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    SPLITS: tl.constexpr,
    BQ: tl.constexpr,
    BS: tl.constexpr,
    BH: tl.constexpr,
):
    """Attention of one tile of queries over one split of what they see.

    Program (i, b * G + g, s) takes queries i * BQ and on of row b and KV head g, over the s-th
    split, BS slots at a time. A query of a KV head is a pair of token and query head: T * R of
    them, token by token. The tile index is the fastest axis of the grid: tiles that read the same
    keys are launched side by side, and all but the first find them in the L2 cache.

    WINDOW is 0 where there is none. RING: `kv_position_ptr` says which position a slot holds.
    With SPLITS 1 the result is final; otherwise it is a normalized part with its log-sum-exp.

    A split has MIN_SPAN slots, or twice as many until SHARES of them hold what the tile sees, or
    until MAX_SPAN. SPLITS are enough for any length (`max_splits`). MOST_SEEN is less than S where
    a window lets a tile of consecutive tokens see no more; tokens far apart see more, and then
    splits are longer.
    """
    R: tl.constexpr = N // G
    b = tl.program_id(1) // G
    g = tl.program_id(1) % G
    split = tl.program_id(2)
    row = tl.program_id(0) * BQ + tl.arange(0, BQ)  # token * R + head of the group
    h = tl.arange(0, BH)
    real = row < T * R
    head = g * R + row % R
    at = (b * T + row // R) * N + head
    position = tl.load(position_ptr + b * T + row // R, mask=real, other=-1)
    # slots [low, high) are all that any query of this tile can see
    if RING:
        low = 0
        high = S
    else:
        high = tl.minimum(tl.max(position, 0) + 1, S)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(tl.min(tl.where(real, position, S), 0) - WINDOW + 1, 0) // BS * BS
    if SPLITS == 1:
        begin, end = low, high
    else:
        seen = tl.minimum(high, MOST_SEEN)
        span = MIN_SPAN
        for _ in tl.static_range(DOUBLINGS):
            longer = (span * SHARES < seen) & (span < MAX_SPAN)
            if MOST_SEEN < S:
                longer |= span * (SPLITS - 1) < high - low
            span = tl.where(longer, 2 * span, span)
        first = (low // span + split) * span
        begin = tl.maximum(low, first)
        end = tl.minimum(high, first + span)
    top = tl.full((BQ,), -1e30, tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BH), tl.float32)
    # queries are not even read where this split has no visible slot
    needed = row < tl.where(begin < end, T * R, 0)
    q = tl.load(
        q_ptr + at[:, None].to(tl.int64) * H + h[None, :],
        mask=needed[:, None] & (h[None, :] < H),
        other=0.0,
    )
    base = (b * G + g).to(tl.int64) * S
    for start in range(begin, end, BS):
        s = start + tl.arange(0, BS)
        in_split = s < end
        inside = in_split[:, None] & (h[None, :] < H)
        k = tl.load(k_ptr + (base + s)[:, None] * H + h[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + (base + s)[:, None] * H + h[None, :], mask=inside, other=0.0)
        x = tl.dot(q, as_multiplied(k, q.dtype, 4).T) * (SCALE * LOG2_E)
        if SCALED:
            x *= tl.load(k_scale_ptr + base + s, mask=in_split, other=0.0)[None, :]
        if RING:
            kv_position = tl.load(kv_position_ptr + b * S + s, mask=in_split, other=-1)
        else:
            kv_position = tl.where(in_split, s, -1)
        visible = (kv_position[None, :] >= 0) & (kv_position[None, :] <= position[:, None])
        if WINDOW > 0:
            visible &= kv_position[None, :] > position[:, None] - WINDOW
        x = tl.where(visible, x, float("-inf"))
        # the running maximum begins at -1e30 and stays finite: no NaN where a row sees nothing
        new_top = tl.maximum(top, tl.max(x, 1))
        p = tl.exp2(x - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        if SCALED:
            p *= tl.load(v_scale_ptr + base + s, mask=in_split, other=0.0)[None, :]
        acc = tl.dot(p.to(q.dtype), as_multiplied(v, q.dtype, 4), acc * shrink[:, None])
        top = new_top
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            acc *= shrink[:, None]
            total = total * shrink + tl.exp2(sink - new_top)
        y = acc / tl.maximum(total, 1e-30)[:, None]
        tl.store(
            out_ptr + at[:, None].to(tl.int64) * H + h[None, :],
            y.to(out_ptr.dtype.element_ty),
            mask=real[:, None] & (h[None, :] < H),
        )
    else:
        positive_total = tl.maximum(total, 1e-30)
        out = (split * B * T * N + at).to(tl.int64)
        tl.store(
            lse_ptr + out,
            tl.where(total != 0, (top + tl.log2(positive_total)) * LN_2, -1e30),
            mask=real,
        )
        has_part = real & (total != 0)  # or NaN; `merge_kernel` reads no other parts
        tl.store(
            out_ptr + out[:, None] * H + h[None, :],
            acc / positive_total[:, None],
            mask=has_part[:, None] & (h[None, :] < H),
        )


@triton.jit
def merge_kernel(
    part_ptr,
    lse_ptr,
    sink_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    BH: tl.constexpr,
):
    """Merges parts of M softmaxes, M = tokens * heads: [SPLITS M H] with log-sum-exps [SPLITS M].

    Program i takes rows i * BR and on, BP parts at a time: all reads of a tile are on their way
    together, where one part after the other would wait for memory once a part. The rows of a
    program are neighbors in memory.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    h = tl.arange(0, BH)
    real = row < M
    if SINKS:
        top = tl.load(sink_ptr + row % N, mask=real, other=0.0).to(tl.float32)
        total = tl.full((BR,), 1.0, tl.float32)
    else:
        top = tl.full((BR,), -1e30, tl.float32)
        total = tl.zeros((BR,), tl.float32)
    acc = tl.zeros((BR, BH), tl.float32)
    for start in range(0, SPLITS, BP):
        split = start + tl.arange(0, BP)
        at = split[:, None].to(tl.int64) * M + row[None, :]
        inside = (split[:, None] < SPLITS) & real[None, :]
        lse = tl.load(lse_ptr + at, mask=inside, other=-1e30)
        has_part = lse > -1e29
        part = tl.load(
            part_ptr + at[:, :, None] * H + h[None, None, :],
            mask=has_part[:, :, None] & (h[None, None, :] < H),
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        shrink = tl.exp(top - new_top)
        share = tl.where(has_part, tl.exp(lse - new_top[None, :]), 0.0)
        acc = acc * shrink[:, None] + tl.sum(part * share[:, :, None], 0)
        total = total * shrink + tl.sum(share, 0)
        top = new_top
    y = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(
        out_ptr + row[:, None].to(tl.int64) * H + h[None, :],
        y.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (h[None, :] < H),
    )


def tile_config(
    tokens: int,
    queries: int,
    kv_heads: int,
    slots: int,
    head_dim: int,
    gpu: Gpu,
    float8: bool = False,
) -> dict[str, int]:
    """Tile sizes, the pipeline, and splits: `shares` and limits of their lengths.

    Tiles of slots are small for wide heads, to fit into shared memory.

    For compute capability 12 a tile of 128 queries is compiled so that each of eight warps decodes
    all float8 keys and values, and it spills; of a tile of 64 each warp decodes an eighth.

    `shares` are the splits that a row is to have: of a block of decoding they follow from the batch
    alone. As spans are powers of two, a row has more than half as many. With three shares for two
    multiprocessors each of them has between three quarters of a program and one and a half, however
    many slots the cache has. The `max_span` of a prompt is no limit: its parts then take a few
    megabytes, where spans of 1,024 would take gigabytes.

    Args:
      tokens: of a row.
      queries: of a KV head, tokens times the query heads of its group.
      kv_heads: of all rows together.
      slots: of the cache.
      float8: whether keys and values are.
    """
    max_bq = 128
    if head_dim > 256:
        max_bq = 32  # 64 queries of 512 numbers spill
    elif head_dim > 128 and gpu.shared_memory < 200_000:
        max_bq = 64
    bq = min(max_bq, max(16, triton.next_power_of_2(queries)))
    if head_dim <= 128:
        bs = 64
    else:
        bs = 32 if head_dim <= 256 else 16
    is_prompt = tokens > MAX_BLOCK
    query_tiles = triton.cdiv(queries, bq) if is_prompt else 1
    shares = max(1, 3 * gpu.num_sms // (2 * kv_heads * query_tiles))
    max_span = MAX_SPAN
    if is_prompt:
        max_span = max(MIN_SPAN, triton.next_power_of_2(slots))
    # for compute capability 12 four warps of a tile of 64 queries of 128 numbers spill
    most = 8192 if gpu.shared_memory >= 200_000 else 4096
    small = bq <= 64 and head_dim <= 256 and bq * head_dim <= most
    two_stages = head_dim > 256 or bq == max_bq == 64
    if float8 and bq == 128 and gpu.shared_memory < 200_000:
        bq = 64
    return {
        "bq": bq,
        "bs": bs,
        "shares": shares,
        "min_span": MIN_SPAN,
        "max_span": max_span,
        "max_unsplit": MAX_UNSPLIT if head_dim <= 128 else MIN_SPAN,
        "warps": 4 if small else 8,
        "stages": 2 if two_stages else 3,
    }


def max_splits(most_seen: int, tiles: dict[str, int], windowed: bool) -> int:
    """The splits that a row of any length has at most.

    Either `shares` spans hold what is seen, or spans have their greatest length. What begins within
    a span, because of a window, ends in one more.

    Args:
      most_seen: slots that a tile of queries sees at most.
    """
    if most_seen <= tiles["max_unsplit"]:
        return 1
    few = min(tiles["shares"], triton.cdiv(most_seen, tiles["min_span"]))
    splits = max(few, triton.cdiv(most_seen, tiles["max_span"]))
    return splits + (windowed and splits > 1)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    kv_positions: jax.Array | None,
    *,
    window: int | None,
    scale: float,
    sinks: jax.Array | None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    start: Launcher = on_gpu,
    **overrides: Any,
) -> jax.Array:
    """As `attention.reference`, but a query that sees nothing gives zeros.

    Args:
      start: executes a launch.
      overrides: of `tile_config`, for measuring.
    """
    B, T, N, H = q.shape
    G, S = k.shape[1:3]
    queries = T * (N // G)
    tiles = tile_config(T, queries, B * G, S, H, gpu(), float8=k_scale is not None)
    tiles |= overrides
    block_h = max(16, triton.next_power_of_2(H))
    ring = kv_positions is not None
    most_seen = S
    if window and not ring:
        # the tokens of a tile, or of any block of decoding; and a tile of slots begins early
        tokens = max(MAX_BLOCK, triton.cdiv(tiles["bq"], N // G) + 1)
        most_seen = min(S, window + tokens + tiles["bs"])
    splits = max_splits(most_seen, tiles, windowed=most_seen < S)
    longest = S if most_seen < S else tiles["max_span"]
    doublings = triton.cdiv(longest, tiles["min_span"]).bit_length()
    absent = jnp.zeros(1, jnp.float32)  # in the place of arrays that the kernel will not read
    if kv_positions is None:
        kv_positions = jnp.zeros(1, jnp.int32)
    else:
        kv_positions = jnp.broadcast_to(kv_positions, (B, S)).astype(jnp.int32)
    sink = absent if sinks is None else sinks
    result = jax.ShapeDtypeStruct((B, T, N, H), q.dtype)
    if splits == 1:
        outputs = (result, jax.ShapeDtypeStruct((1,), jnp.float32))
    else:
        outputs = (
            jax.ShapeDtypeStruct((splits, B, T, N, H), jnp.float32),
            jax.ShapeDtypeStruct((splits, B, T, N), jnp.float32),
        )
    out, lse = start(
        Launch(
            kernel=attention_kernel,
            inputs=(
                q,
                k,
                v,
                positions.astype(jnp.int32),
                kv_positions,
                absent if k_scale is None else k_scale,
                absent if v_scale is None else v_scale,
                sink,
            ),
            outputs=outputs,
            grid=(triton.cdiv(queries, tiles["bq"]), B * G, splits),
            constants=dict(
                B=B,
                T=T,
                N=N,
                G=G,
                S=S,
                H=H,
                SCALE=float(scale),
                WINDOW=window or 0,
                RING=ring,
                SCALED=k_scale is not None,
                SINKS=sinks is not None,
                MOST_SEEN=most_seen,
                SHARES=tiles["shares"],
                MIN_SPAN=tiles["min_span"],
                MAX_SPAN=tiles["max_span"],
                DOUBLINGS=doublings,
                SPLITS=splits,
                BQ=tiles["bq"],
                BS=tiles["bs"],
                BH=block_h,
            ),
            warps=tiles["warps"],
            stages=tiles["stages"],
        )
    )
    if splits == 1:
        return out
    rows = B * T * N
    block_parts = min(triton.next_power_of_2(splits), max(1, 8192 // block_h))
    block_rows = max(1, 2048 // (block_parts * block_h))
    merge = Launch(
        kernel=merge_kernel,
        inputs=(out, lse, sink),
        outputs=(result,),
        grid=(triton.cdiv(rows, block_rows),),
        constants=dict(
            M=rows,
            N=N,
            H=H,
            SPLITS=splits,
            SINKS=sinks is not None,
            BR=block_rows,
            BP=block_parts,
            BH=block_h,
        ),
        warps=4,
        stages=1,
    )
    return start(merge)[0]
