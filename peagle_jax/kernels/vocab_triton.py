"""Output matrices in Triton: tiles of logits stay in registers, XLA merges what they leave.

A few numbers a row and tile go to memory. Decoding is bound by reading the matrix (4096 x 152,000:
290 us in bfloat16, half in FP8, on an H200).
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.decode_triton import as_multiplied
from peagle_jax.kernels.launch import Launch, Launcher, on_gpu
from peagle_jax.kernels.vocab import TopK


@triton.jit
def logits(
    x_ptr,
    w_ptr,
    m,
    v,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WK: tl.constexpr,
    WV: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """Tile [BV BM] of w.T @ x.T in float32; WK and WV are the matrix's strides along K and V."""
    acc = tl.zeros((BV, BM), tl.float32)
    x_row = x_ptr + m[:, None].to(tl.int64) * K
    w_row = w_ptr + v[:, None].to(tl.int64) * WV
    for at in range(0, K, BK):
        k = at + tl.arange(0, BK)
        x = tl.load(x_row + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(
            w_row + k[None, :].to(tl.int64) * WK,
            mask=(v[:, None] < V) & (k[None, :] < K),
            other=0.0,
        )
        acc = tl.dot(as_multiplied(w, x.dtype, 2), x.T, acc)
    return acc


@triton.jit
def argmax(x, best, BV: tl.constexpr):
    """The first row of each column that holds `best`, the column's largest number.

    `tl.argmax`, which carries indices along, spills on sm_100.
    """
    return tl.min(tl.where(x == best[None, :], tl.arange(0, BV)[:, None], BV), 0)


@triton.jit
def topk_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    value_ptr,
    id_ptr,
    lse_ptr,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WK: tl.constexpr,
    WV: tl.constexpr,
    SCALED: tl.constexpr,
    TOP: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """The TOP largest logits and the log-sum-exp of each row, within one tile of the vocabulary.

    Program (t, m) takes tokens t * BV and on of the vocabulary, and rows m * BM and on. The
    vocabulary is the fastest axis: in decoding all rows fit one tile, and each part of the matrix
    is read by one program only.
    """
    tile = tl.program_id(0)
    v = tile * BV + tl.arange(0, BV)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    x = logits(x_ptr, w_ptr, m, v, M, K, V, WK, WV, BM, BV, BK)
    if SCALED:
        x *= tl.load(scale_ptr + v, mask=v < V, other=0.0)[:, None]
    x = tl.where(v[:, None] < V, x, float("-inf"))
    top = tl.max(x, 0)
    at = m * TILES + tile
    tl.store(lse_ptr + at, top + tl.log(tl.sum(tl.exp(x - top[None, :]), 0)), mask=m < M)
    for i in tl.static_range(TOP):
        best = tl.max(x, 0)
        index = argmax(x, best, BV)
        tl.store(value_ptr + at * TOP + i, best, mask=m < M)
        tl.store(id_ptr + at * TOP + i, tile * BV + index, mask=m < M)
        x = tl.where(tl.arange(0, BV)[:, None] == index[None, :], float("-inf"), x)


def tile_config(rows: int) -> dict[str, int]:
    """Tile sizes and pipeline of `topk`."""
    bm = min(128, max(16, triton.next_power_of_2(rows)))
    return {"bm": bm, "bv": 128, "bk": 64, "warps": 8 if bm == 128 else 4, "stages": 3}


def topk(
    x: jax.Array,
    w: jax.Array,
    k: int,
    scale: jax.Array | None = None,
    *,
    vocab_first: bool = False,
    start: Launcher = on_gpu,
    **overrides: int,
) -> TopK:
    """As `vocab.reference`.

    Args:
      start: executes a launch.
      overrides: of `tile_config`, for measuring.
    """
    M, K = x.shape
    if vocab_first:
        V, stride_k, stride_v = w.shape[0], 1, K
    else:
        V, stride_k, stride_v = w.shape[1], w.shape[1], 1
    tiles = tile_config(M) | overrides
    vocab_tiles = triton.cdiv(V, tiles["bv"])
    shape = (M, vocab_tiles, k)
    launch = Launch(
        kernel=topk_kernel,
        inputs=(x, w, jnp.zeros(1, jnp.float32) if scale is None else scale),
        outputs=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape[:2], jnp.float32),
        ),
        grid=(vocab_tiles, triton.cdiv(M, tiles["bm"])),
        constants=dict(
            M=M,
            K=K,
            V=V,
            WK=stride_k,
            WV=stride_v,
            SCALED=scale is not None,
            TOP=k,
            TILES=vocab_tiles,
            BM=tiles["bm"],
            BV=tiles["bv"],
            BK=tiles["bk"],
        ),
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    values, ids, lse = start(launch)
    # top_k is stable: of equal logits the earlier tile comes first, and so the lower id
    best, where = jax.lax.top_k(values.reshape(M, -1), k)
    best_ids = jnp.take_along_axis(ids.reshape(M, -1), where, axis=1)
    return TopK(best, best_ids, jax.nn.logsumexp(lse, axis=1))
