"""COD training attention in Triton, forward: the kernel, its tiles, and what the backward shares.

It is bound by arithmetic: a row of 20,000 packed elements over 8,192 keys has 4 * 8192/2 * 128
operations a head. What is skipped costs nothing: other documents, the future, and what lies past a
window.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.launch import Launch, Launcher, gpu
from peagle_jax.kernels.packed_attention import AttentionIntervals

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2_E), and exp2 is one instruction
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def scores(
    q, k_ptr, row, exists, visible, h, step: tl.constexpr, H: tl.constexpr, FACTOR: tl.constexpr
):
    """(keys, scaled scores) of one tile of keys, rows `row` of k_ptr that are `step` numbers apart.

    Scores of keys that are not `visible` are -inf.
    """
    k = tl.load(
        k_ptr + row[:, None].to(tl.int64) * step + h[None, :],
        mask=exists[:, None] & (h[None, :] < H),
        other=0.0,
    )
    return k, tl.where(visible, tl.dot(q, k.T) * FACTOR, float("-inf"))


@triton.jit
def add_keys(
    q,
    k_ptr,
    v_ptr,
    row,
    exists,
    visible,
    h,
    top,
    total,
    acc,
    step: tl.constexpr,
    H: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """One more tile of keys in a running softmax."""
    k, x = scores(q, k_ptr, row, exists, visible, h, step, H, FACTOR)
    v = tl.load(
        v_ptr + row[:, None].to(tl.int64) * step + h[None, :],
        mask=exists[:, None] & (h[None, :] < H),
        other=0.0,
    )
    new_top = tl.maximum(top, tl.max(x, 1))
    p = tl.exp2(x - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return new_top, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * shrink[:, None])


@triton.jit
def tile_rows(i, DEPTH0_TILES: tl.constexpr, SIZE: tl.constexpr, N0: tl.constexpr, P: tl.constexpr):
    """(rows of tile i, whether they exist, the first of them).

    Tiles of depth-0 rows come first, DEPTH0_TILES of them, then tiles of packed rows: no tile has
    rows of both kinds, so that what a tile sees is found by arithmetic.
    """
    packed = i >= DEPTH0_TILES
    begin = tl.where(packed, N0 + (i - DEPTH0_TILES) * SIZE, i * SIZE)
    row = begin + tl.arange(0, SIZE)
    return row, row < tl.where(packed, P, N0), begin


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    last_ptr,
    chain_len_ptr,
    y_ptr,
    lse_ptr,
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
    """Attention of one tile of rows, with the log-sum-exp of their scores.

    Program (i, b * N + head) takes the BQ rows of tile i, and walks over the keys that any of them
    sees, BK at a time: depth-0 keys from the smallest `first` to the largest `last`; then, for a
    tile of packed rows, the packed keys from CHAIN - 1 before the tile to its end. Neighboring
    packed rows have neighboring anchors, so this walk is little longer than what each row sees.
    Tiles are the fastest axis of the grid: programs side by side read one head's keys and values,
    which the L2 cache then holds.
    """
    b = tl.program_id(1) // N
    head = tl.program_id(1) % N
    row, real, begin = tile_rows(tl.program_id(0), DEPTH0_TILES, BQ, N0, P)
    h = tl.arange(0, BH)
    at = (b * P + row).to(tl.int64) * N + head
    q = tl.load(
        q_ptr + at[:, None] * H + h[None, :], mask=real[:, None] & (h[None, :] < H), other=0.0
    )
    first = tl.load(first_ptr + b * P + row, mask=real, other=P)
    last = tl.load(last_ptr + b * P + row, mask=real, other=-1)
    chain_len = tl.load(chain_len_ptr + b * P + row, mask=real, other=0)
    k_head = k_ptr + (b * P * G + head // (N // G)).to(tl.int64) * H
    v_head = v_ptr + (b * P * G + head // (N // G)).to(tl.int64) * H
    FACTOR: tl.constexpr = SCALE * LOG2_E
    top = tl.full((BQ,), -1e30, tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BH), tl.float32)
    sees_depth0 = first <= last
    low = tl.min(tl.where(sees_depth0, first, P), 0) // BK * BK
    high = tl.max(tl.where(sees_depth0, last, -1), 0) + 1
    for start in range(low, high, BK):
        s = start + tl.arange(0, BK)
        visible = (s[None, :] >= first[:, None]) & (s[None, :] <= last[:, None])
        top, total, acc = add_keys(
            q, k_head, v_head, s, s < N0, visible, h, top, total, acc, G * H, H, FACTOR
        )
    if CHAIN > 0:
        if begin >= N0:
            for start in range(tl.maximum(begin - CHAIN + 1, N0), tl.minimum(begin + BQ, P), BK):
                s = start + tl.arange(0, BK)
                visible = (s[None, :] <= row[:, None]) & (s[None, :] > (row - chain_len)[:, None])
                top, total, acc = add_keys(
                    q, k_head, v_head, s, s < P, visible, h, top, total, acc, G * H, H, FACTOR
                )
    positive_total = tl.maximum(total, 1e-30)
    y = acc / positive_total[:, None]
    tl.store(
        y_ptr + at[:, None] * H + h[None, :],
        y.to(y_ptr.dtype.element_ty),
        mask=real[:, None] & (h[None, :] < H),
    )
    tl.store(
        lse_ptr + at,
        tl.where(total > 0, (top + tl.log2(positive_total)) * LN_2, -1e30),
        mask=real,
    )


def tile_config(head_dim: int) -> dict[str, int]:
    """Tile sizes and pipeline.

    `bq` and `bk` are queries and keys of a tile; `kq` is the queries of a tile in the gradient of
    keys, where two sums in registers leave less room.
    """
    if gpu().shared_memory < 200_000:
        return {"bq": 64, "kq": 32, "bk": 64 if head_dim <= 64 else 32, "warps": 8, "stages": 2}
    if head_dim > 128:
        return {"bq": 64, "kq": 32, "bk": 32, "warps": 8, "stages": 2}
    return {"bq": 128, "kq": 64 if head_dim <= 64 else 32, "bk": 64, "warps": 8, "stages": 3}


def count_tiles(intervals: AttentionIntervals, rows: int, size: int) -> tuple[int, int]:
    """(tiles of depth-0 rows, all tiles) of `size` rows each, where there are `rows` rows."""
    depth0_tiles = triton.cdiv(intervals.depth0, size)
    return depth0_tiles, depth0_tiles + triton.cdiv(rows - intervals.depth0, size)


def constants(
    q: jax.Array,
    k: jax.Array,
    intervals: AttentionIntervals,
    scale: float,
    tiles: dict[str, int],
    size: int,
) -> dict:
    """Constants of a kernel whose programs take tiles of `size` rows."""
    _, P, N, H = q.shape
    return dict(
        P=P,
        N0=intervals.depth0,
        N=N,
        G=k.shape[2],
        H=H,
        SCALE=float(scale),
        CHAIN=intervals.max_chain_len,
        DEPTH0_TILES=count_tiles(intervals, P, size)[0],
        BQ=tiles["bq"],
        BK=tiles["bk"],
        BH=max(16, triton.next_power_of_2(H)),
    )


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    intervals: AttentionIntervals,
    scale: float,
    start: Launcher,
    **overrides: int,
) -> tuple[jax.Array, jax.Array]:
    """(y [B P N H], log-sum-exp [B P N]); `overrides` are of `tile_config`."""
    B, P, N, H = q.shape
    tiles = tile_config(H) | overrides
    launch = Launch(
        kernel=forward_kernel,
        inputs=(q, k, v, intervals.first, intervals.last, intervals.chain_len),
        outputs=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, P, N), jnp.float32),
        ),
        grid=(count_tiles(intervals, P, tiles["bq"])[1], B * N),
        constants=constants(q, k, intervals, scale, tiles, tiles["bq"]),
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    y, lse = start(launch)
    return y, lse
