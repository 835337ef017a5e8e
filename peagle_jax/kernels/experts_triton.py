"""A mixture's products in Triton: one launch for the matrices of all experts of a layer.

It is bound by reading the chosen experts. A token of Qwen3-Coder-30B-A3B takes 8 experts of 4.7M
numbers a layer: 38 MB in FP8, 8.8 us at the 4.3 TB/s that a copy reaches on an H200. A token of
GPT-OSS-20B takes 4 of 24.9M: 53 MB in MXFP4, 12.3 us. So rows are sorted by expert, every chosen
expert is read once a tile of rows, and no other. Weights stay in memory as they are stored and are
decoded on the way, which plain XLA cannot do (docs/sizes.md).
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels import experts, experts_gemv_triton
from peagle_jax.kernels.decode_triton import (
    MXFP4_TIMES,
    as_multiplied,
    mxfp4,
    mxfp4_as_multiplied,
)
from peagle_jax.kernels.experts import ExpertWeights, StoredMatrices, Tiles
from peagle_jax.kernels.launch import Gpu, Launch, Launcher, gpu, on_gpu

# Up to so many pairs of so many experts a kernel sorts: its work grows with their product, while
# XLA's launches stay the same.
MAX_SORTED_PAIRS, MAX_SORTED_EXPERTS = 1024, 256
# Up to so many tokens tensor cores are slower (`experts_gemv_triton`), where experts are float8. It
# was measured with scales of blocks. Where six or eight tokens all choose alike tiles are faster:
# of eight with fewer than some 26 different experts.
MAX_GEMV_TOKENS = 8
MIN_SPLIT = 512  # inputs of a part
MAX_GATED_ROWS = 32  # of a tile, up to which SiLU is done within the product


@triton.jit
def exponents(scale_ptr, e, n, at, end, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """uint8 [BN BK/32]: those of inputs from `at` to `end`, of which 32 share one."""
    g = at // 32 + tl.arange(0, BK // 32)
    inside = (n[:, None] < N) & (g[None, :] < end // 32)
    return tl.load(scale_ptr + (e * N + n[:, None]) * (K // 32) + g[None, :], mask=inside, other=0)


@triton.jit
def weights(w_ptr, e, n, k, inside, ROWS: tl.constexpr, K: tl.constexpr, W: tl.constexpr):
    """A tile [BN BK] of an expert's matrix, as it is stored."""
    if W == "plain":
        at = (e * K + k[None, :]) * ROWS + n[:, None]
    else:
        at = (e * ROWS + n[:, None]) * K + k[None, :]
    return tl.load(w_ptr + at, mask=inside, other=0.0)


@triton.jit
def multiplied(
    acc,
    w,
    x,
    scale_ptr,
    e,
    n,
    at,
    real,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
):
    """`acc` and the product of a tile of weights with one of rows."""
    if W == "block":
        across: tl.constexpr = (K + 127) // 128
        down: tl.constexpr = (ROWS + 127) // 128
        block = (e * down + n // 128) * across + at // 128
        scale = tl.load(scale_ptr + block, mask=real, other=0.0)
        return acc + tl.dot(as_multiplied(w, x.dtype, 2), x.T) * scale[:, None]
    return tl.dot(as_multiplied(w, x.dtype, 2), x.T, acc)


@triton.jit
def expert_kernel(
    x_ptr,
    row_ptr,
    expert_ptr,
    first_ptr,
    size_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATHER: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile [BN BM]: BN outputs of one expert for up to BM of its rows, over a part of K.

    Program (n, t, s) takes outputs n * BN and on of tile t, whose `size` rows stand from `first` on
    in the result, and part s of SPLITS along K. Each part has a result of ALL_ROWS rows; the first
    has the biases. Weights are the tensor core's long axis, as in `fp8_matmul_triton`. Outputs are
    the fastest axis of the grid: the programs that read one expert run side by side, and share its
    tile of rows in the L2 cache. There are as many tiles as there can be; those without rows end at
    once.

    GATHER: row i of the result comes from row `row_ptr[i]` of x; otherwise from row i. W: the kind
    of `StoredMatrices`. For "mxfp4" x holds numbers 0, 4, 8, ... of each row before 1, 5, 9, ...:
    two bytes hold four neighbors, and these go into four products without any interleaving.

    ONE_TOKEN: each tile is a choice of the only token, and its row is that of the tile: the other
    arrays of tiles are not read, so that nobody has to make them.

    GATED: an expert's matrix has 2 * N outputs, and the result is silu(output n) times output
    N + n. Both are computed here, with two tiles of weights. Not for "mxfp4".
    """
    ROWS: tl.constexpr = 2 * N if GATED else N  # of an expert's matrix
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    tile = tl.program_id(1)
    expert = tl.load(expert_ptr + tile)
    e = tl.minimum(expert, E - 1).to(tl.int64)
    m = tl.arange(0, BM)
    if ONE_TOKEN:
        size = tl.where(expert < E, 1, 0)
        row = tile + m
    else:
        size = tl.load(size_ptr + tile)
        row = tl.load(first_ptr + tile) + m
    source = row
    if GATHER and ONE_TOKEN:
        source = m * 0
    elif GATHER:
        source = tl.load(row_ptr + row, mask=m < size, other=0)
    x_row = x_ptr + source[:, None].to(tl.int64) * K
    real = (m < size)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    SPAN: tl.constexpr = (K + SPLITS * BK - 1) // (SPLITS * BK) * BK
    part = tl.program_id(2)
    end = tl.where(size > 0, tl.minimum(part * SPAN + SPAN, K), 0)
    if W == "mxfp4":
        # a step ahead: rows of 90 bytes are not aligned for asynchronous copies
        exponent = exponents(scale_ptr, e, n, part * SPAN, end, N, K, BK)
    for at in range(part * SPAN, end, BK):
        if W == "mxfp4":
            k = at // 4 + tl.arange(0, BK // 4)  # words of four
            inside = (n[:, None] < N) & (k[None, :] < K // 4)
            words = w_ptr.to(tl.pointer_type(tl.uint16)) + (e * N + n[:, None]) * (K // 4)
            word = tl.load(words + k[None, :], mask=inside, other=0)
            w0, w1, w2, w3 = mxfp4(word, exponent, BN, BK)
            exponent = exponents(scale_ptr, e, n, at + BK, end, N, K, BK)
            x = x_row + k[None, :]
            inside = real & (k[None, :] < K // 4)
            x0 = tl.load(x, mask=inside, other=0.0)
            acc = tl.dot(mxfp4_as_multiplied(w0, x0.dtype), x0.T, acc)
            x1 = tl.load(x + K // 4, mask=inside, other=0.0)
            acc = tl.dot(mxfp4_as_multiplied(w1, x1.dtype), x1.T, acc)
            x2 = tl.load(x + K // 4 * 2, mask=inside, other=0.0)
            acc = tl.dot(mxfp4_as_multiplied(w2, x2.dtype), x2.T, acc)
            x3 = tl.load(x + K // 4 * 3, mask=inside, other=0.0)
            acc = tl.dot(mxfp4_as_multiplied(w3, x3.dtype), x3.T, acc)
        else:
            k = at + tl.arange(0, BK)
            x = tl.load(x_row + k[None, :], mask=real & (k[None, :] < K), other=0.0)
            inside = (n[:, None] < N) & (k[None, :] < K)
            w = weights(w_ptr, e, n, k, inside, ROWS, K, W)
            acc = multiplied(acc, w, x, scale_ptr, e, n, at, n < N, ROWS, K, W)
            if GATED:
                w = weights(w_ptr, e, N + n, k, inside, ROWS, K, W)
                up = multiplied(up, w, x, scale_ptr, e, N + n, at, n < N, ROWS, K, W)
    if W == "mxfp4" and x_ptr.dtype.element_ty == tl.bfloat16:
        acc *= MXFP4_TIMES
    if W == "row":
        acc *= tl.load(scale_ptr + e * ROWS + n, mask=n < N, other=0.0)[:, None]
        if GATED:
            up *= tl.load(scale_ptr + e * ROWS + N + n, mask=n < N, other=0.0)[:, None]
    if BIAS:
        bias = bias_ptr + e * ROWS + n
        has_bias = n < tl.where(part == 0, N, 0)
        acc += tl.load(bias, mask=has_bias, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + N, mask=has_bias, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    out = out_ptr + (part * ALL_ROWS + row[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < size))


@triton.jit
def sort_kernel(
    topk_ids_ptr,
    place_ptr,
    token_ptr,
    expert_ptr,
    first_ptr,
    size_ptr,
    PAIRS: tl.constexpr,
    CHOICES: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
):
    """`experts.make_tiles` in one launch, where a sort and its counts are seven.

    Program i places pairs i * BP and on, and describes tiles i * BP and on. It compares its pairs
    with all pairs, BP at a time: a pair's place is the number of pairs that sort before it. Every
    program counts the rows of all experts [BE] for itself, so that none waits for another.
    """
    i = tl.program_id(0) * BP + tl.arange(0, BP)
    ids = tl.load(topk_ids_ptr + i, mask=i < PAIRS, other=E)
    e = tl.arange(0, BE)
    place = tl.zeros((BP,), tl.int32)
    count = tl.zeros((BE,), tl.int32)
    for at in range(0, PAIRS, BP):
        j = at + tl.arange(0, BP)
        other = tl.load(topk_ids_ptr + j, mask=j < PAIRS, other=E + 1)
        before = (other[None, :] < ids[:, None]) | (
            (other[None, :] == ids[:, None]) & (j[None, :] < i[:, None])
        )
        place += tl.sum(before.to(tl.int32), 1)
        count += tl.sum((other[None, :] == e[:, None]).to(tl.int32), 1)
    tl.store(place_ptr + i, place, mask=i < PAIRS)
    tl.store(token_ptr + place, i // CHOICES, mask=i < PAIRS)
    count = tl.where(e < E, count, 0)
    tiles = (count + ROWS - 1) // ROWS
    until = tl.cumsum(tiles, 0)
    start = tl.cumsum(count, 0) - count
    expert = tl.sum((i[:, None] >= until[None, :]).to(tl.int32), 1)  # of tile i
    is_expert = expert[:, None] == e[None, :]
    done = (i - tl.sum(tl.where(is_expert, (until - tiles)[None, :], 0), 1)) * ROWS
    size = tl.minimum(tl.sum(tl.where(is_expert, count[None, :], 0), 1) - done, ROWS)
    tl.store(expert_ptr + i, tl.minimum(expert, E), mask=i < TILES)
    first = tl.sum(tl.where(is_expert, start[None, :], 0), 1) + done
    tl.store(first_ptr + i, first, mask=i < TILES)
    tl.store(size_ptr + i, tl.where(expert < E, size, 0), mask=i < TILES)


def make_tiles(topk_ids: jax.Array, count: int, rows: int, start: Launcher = on_gpu) -> Tiles:
    """As `experts.make_tiles`, with work that grows with the square of the pairs.

    Args:
      count: of experts.
      rows: of a tile, at most.
    """
    pairs, block_pairs = topk_ids.size, 64
    n, k = topk_ids.shape
    num_tiles = experts.max_tiles(n, k, count, rows)
    block_experts = triton.next_power_of_2(count)

    def integers(length):
        return jax.ShapeDtypeStruct((length,), jnp.int32)

    launch = Launch(
        kernel=sort_kernel,
        inputs=(topk_ids.reshape(-1).astype(jnp.int32),),
        outputs=(
            integers(pairs),
            integers(pairs),
            integers(num_tiles),
            integers(num_tiles),
            integers(num_tiles),
        ),
        grid=(triton.cdiv(max(pairs, num_tiles), block_pairs),),
        constants=dict(
            PAIRS=pairs,
            CHOICES=k,
            E=count,
            ROWS=rows,
            TILES=num_tiles,
            BP=block_pairs,
            BE=block_experts,
        ),
        # with 4 warps 128 experts take 254 registers a thread, and 256 experts spill
        warps=min(16, max(4, block_experts // 16)),
    )
    return Tiles(rows, *start(launch))


def tile_config(rows: int, kind: str, tiles: int, N: int, K: int, gpu: Gpu) -> dict[str, int]:
    """Tile sizes, parts along K, and pipeline.

    One step along K, then 128 MXFP4 inputs of 64 outputs, took a program 1.6 to 1.9 us, most of it
    waiting (GPT-OSS's experts of one token on an H200, results/gpu.jsonl). So K is split where
    programs are few, up to six a multiprocessor. XLA adds the parts in what comes after them.

    Args:
      rows: of an expert in one tile, at most.
      kind: of `StoredMatrices`.
      tiles: at most.
    """
    bm = max(16, triton.next_power_of_2(rows))
    # decoding a tile of 128 x 128 numbers spills on sm_120
    bn = 128 if bm == 128 and kind != "mxfp4" else 64
    bk = 64 if kind == "plain" else 128
    if kind == "mxfp4" and bm <= 32:
        bk = 256
    splits, programs = 1, tiles * triton.cdiv(N, bn)
    if kind == "mxfp4":
        while 2 * splits * programs <= 6 * gpu.num_sms and K // (2 * splits) >= MIN_SPLIT:
            splits *= 2
    return {
        "splits": splits,
        "bm": bm,
        "bn": bn,
        "bk": bk,
        "warps": 8 if bm == 128 else 4,
        "stages": 3 if bm == 128 or bk == 256 else 4,
    }


def can_gate(kind: str, rows: int) -> bool:
    """Whether `product` can be `gated` for a kind of `StoredMatrices` and tiles of `rows` rows.

    Two sums of 128 x 128 numbers spill; and for many rows a launch costs little.
    """
    return kind != "mxfp4" and rows <= MAX_GATED_ROWS


def product(
    x: jax.Array,
    tiles: Tiles,
    w: StoredMatrices,
    *,
    gather: bool,
    gated: bool = False,
    one_token: bool = False,
    start: Launcher = on_gpu,
    **overrides: int,
) -> jax.Array:
    """Every pair's row times its expert's matrix [pairs N], sorted by expert.

    Rows of pairs that have no expert are not written.

    Args:
      x: [tokens K] where `gather`, otherwise [pairs K], sorted.
      gated: the first half of an expert's outputs goes through SiLU and multiplies the second
        half: [pairs N/2]. Not for MXFP4.
      one_token: tiles are those of `experts.tiles_of_one_token`.
      start: executes a launch.
      overrides: of `tile_config`, for measuring.

    Raises:
      ValueError: a product with SiLU is to be split.
    """
    K, N = x.shape[1], w.outputs // 2 if gated else w.outputs
    num_tiles, num_rows = len(tiles.expert), len(tiles.token)
    config = tile_config(tiles.rows, w.kind, num_tiles, N, K, gpu()) | overrides
    splits = config["splits"]
    if gated and splits > 1:
        raise ValueError(f"SiLU needs whole sums, and K is in {splits} parts")
    absent = jnp.zeros(1, jnp.float32)  # in the place of arrays that the kernel will not read
    if w.kind == "mxfp4":
        x = x.reshape(-1, K // 4, 4).swapaxes(1, 2).reshape(-1, K)
    of_tiles = (tiles.token, tiles.expert, tiles.first, tiles.size)
    if one_token:
        of_tiles = (tiles.expert,) * 4
    launch = Launch(
        kernel=expert_kernel,
        inputs=(
            x,
            *of_tiles,
            w.values,
            absent if w.scale is None else w.scale,
            absent if w.bias is None else w.bias,
        ),
        outputs=(
            jax.ShapeDtypeStruct((splits, num_rows, N), x.dtype if splits == 1 else jnp.float32),
        ),
        grid=(triton.cdiv(N, config["bn"]), num_tiles, splits),
        constants=dict(
            E=len(w.values),
            N=N,
            K=K,
            GATHER=gather,
            W=w.kind,
            BIAS=w.bias is not None,
            GATED=gated,
            ONE_TOKEN=one_token,
            SPLITS=splits,
            ALL_ROWS=num_rows,
            BM=config["bm"],
            BN=config["bn"],
            BK=config["bk"],
        ),
        warps=config["warps"],
        stages=config["stages"],
    )
    (parts,) = start(launch)
    return parts[0] if splits == 1 else parts.sum(axis=0).astype(x.dtype)


def mixture(
    x: jax.Array,
    topk_ids: jax.Array,
    routing_weights: jax.Array,
    weights: ExpertWeights,
    start: Launcher = on_gpu,
) -> jax.Array:
    """As `experts.reference`; activations are multiplied as they are, whatever the weights are."""
    kinds = {matrix.kind for matrix in weights.matrices()}
    if len(x) <= MAX_GEMV_TOKENS and kinds <= set(experts_gemv_triton.KINDS):
        return experts_gemv_triton.mixture(x, topk_ids, routing_weights, weights, start)
    return mixture_in_tiles(x, topk_ids, routing_weights, weights, start)


def mixture_in_tiles(
    x: jax.Array,
    topk_ids: jax.Array,
    routing_weights: jax.Array,
    weights: ExpertWeights,
    start: Launcher = on_gpu,
) -> jax.Array:
    """As `mixture`, with the rows of an expert side by side in tiles for tensor cores."""
    n, k = topk_ids.shape
    count = weights.count
    up, down = weights.matrices()
    if n == 1:
        tiles = experts.tiles_of_one_token(topk_ids, count)
    else:
        rows = experts.tile_rows(
            n, k, count, num_shards=weights.num_shards, least=experts.MIN_GPU_TILE, most=128
        )
        if n * k <= MAX_SORTED_PAIRS and count <= MAX_SORTED_EXPERTS:
            tiles = make_tiles(topk_ids, count, rows, start)
        else:
            tiles = experts.make_tiles(topk_ids, count, rows)
    run = functools.partial(product, tiles=tiles, one_token=n == 1, start=start)
    is_swiglu = getattr(weights.act, "is_halved_swiglu", False)
    if is_swiglu and can_gate(up.kind, tiles.rows):
        hidden = run(x, w=up, gather=True, gated=True)
    else:
        hidden = weights.act(run(x, w=up, gather=True))
    out = run(hidden, w=down, gather=False)
    return experts.combine(out, tiles, routing_weights * (topk_ids < count))
