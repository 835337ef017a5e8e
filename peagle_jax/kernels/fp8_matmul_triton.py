"""The FP8 product in Triton, operands swapped: the few tokens are the tensor core's short axis.

It is bound by reading the weights: M = 8, 4096 x 4096 is 16.8 MB, 3.9 us at the 4.3 TB/s that a
copy reaches on an H200. A tensor core multiplies at least 64 rows. With the weights on that axis
tokens are padded to 16; otherwise they would be padded to 64, and for fewer Triton leaves the FP8
path (F2FP + HMMA).
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from peagle_jax.kernels.fp8_matmul import BLOCK, E4M3, Fp8Matrix
from peagle_jax.kernels.launch import Gpu, Launch, Launcher, gpu, on_gpu

BYTES_ON_THE_WAY = 3_400_000  # of weights, over all programs
MAX_STAGES = 12
MIN_SPLIT = 512  # inputs of a part


@triton.jit
def quantized(x):
    """(e4m3 [M K], scale [M]) of a tile; the largest value of each row becomes 448."""
    x = x.to(tl.float32)
    top = tl.max(tl.abs(x), 1)
    scale = tl.where(top > 1e-30, top / 448.0, 1.0)
    return (x / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BG: tl.constexpr,
    BW: tl.constexpr,
):
    """Program m quantizes row m, as GROUPS groups of WIDTH numbers with a scale each.

    A row is one tile [BG BW], so that it is read once and its scales need no second launch.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BG)
    at = tl.arange(0, BW)
    k = group[:, None] * WIDTH + at[None, :]
    inside = k < K  # enough, because WIDTH is a power of two, or there is one group
    values, scale = quantized(tl.load(x_ptr + row * K + k, mask=inside, other=0.0))
    tl.store(out_ptr + row * K + k, values, mask=inside)
    tl.store(scale_ptr + row * GROUPS + group, scale, mask=group < GROUPS)


@triton.jit
def product_tile(
    tile,
    w_ptr,
    x_ptr,
    w_scale_ptr,
    x_scale_ptr,
    out_ptr,
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    X: tl.constexpr,
    W: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Tile `tile` along the outputs; otherwise as `fp8_kernel`, whose program ids it reads."""
    n = tile * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    begin = tl.program_id(2) * SPAN
    acc = tl.zeros((BN, BM), tl.float32)
    w_row = w_ptr + n[:, None].to(tl.int64) * K
    x_row = x_ptr + m[:, None].to(tl.int64) * K
    for at in range(begin, begin + SPAN, BK):
        k = at + tl.arange(0, BK)
        w = tl.load(w_row + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
        x = tl.load(x_row + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        if X == "row" and W == "row":
            # Hopper's FP8 sums keep few bits: they go to float32 after each tile of K
            acc = tl.dot(w, x.T, acc, max_num_imprecise_acc=BK)
        else:
            # a tile of K is one group of 128, and has a sum of its own, which is scaled
            x_scale = tl.load(
                x_scale_ptr + m * GROUPS + at // 128, mask=(m < M) & (at < K), other=0.0
            )
            part = tl.dot(w, x.T) * x_scale[None, :]
            if W == "block":
                w_scale = tl.load(
                    w_scale_ptr + (n // 128) * GROUPS + at // 128,
                    mask=(n < N) & (at < K),
                    other=0.0,
                )
                part *= w_scale[:, None]
            acc += part
    if W == "row":
        acc *= tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[:, None]
    if X == "row":
        acc *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
    out = out_ptr + tl.program_id(2).to(tl.int64) * M * N + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


@triton.jit
def fp8_kernel(
    w_ptr,
    x_ptr,
    w_scale_ptr,
    x_scale_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    X: tl.constexpr,
    W: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile [BN BM] of w @ x.T, over one split of the contracted axis.

    Program (n, m, s) takes outputs n * BN and on, tokens m * BM and on, and inputs s * SPAN and on,
    BK at a time. Outputs are the fastest axis of the grid. While M fits one tile, as in decoding,
    every weight is read by one program only; with more tokens, programs side by side share the
    tile of tokens.

    X, the scales of activations: one a "row", or one a row and "group" of 128 inputs. W, those of
    weights: "row" or "block". GROUPS: how many 128s K has.
    """
    product_tile(
        tl.program_id(0),
        w_ptr,
        x_ptr,
        w_scale_ptr,
        x_scale_ptr,
        out_ptr,
        N,
        M,
        K,
        SPAN,
        GROUPS,
        X,
        W,
        BM,
        BN,
        BK,
    )


@triton.jit
def joint_kernel(
    w0_ptr,
    w1_ptr,
    w2_ptr,
    x_ptr,
    w0_scale_ptr,
    w1_scale_ptr,
    w2_scale_ptr,
    x_scale_ptr,
    out0_ptr,
    out1_ptr,
    out2_ptr,
    M: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    X: tl.constexpr,
    W: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """As `fp8_kernel`, of one block of tokens and three matrices, whose outputs follow each other.

    Which matrix a program has is chosen before the loop, which is compiled once.
    """
    T0: tl.constexpr = (N0 + BN - 1) // BN
    T1: tl.constexpr = (N1 + BN - 1) // BN
    tile = tl.program_id(0)
    w_ptr, w_scale_ptr, out_ptr, N = w0_ptr, w0_scale_ptr, out0_ptr, tile * 0 + N0
    if tile >= T0 + T1:
        w_ptr, w_scale_ptr, out_ptr, N = w2_ptr, w2_scale_ptr, out2_ptr, tile * 0 + N2
        tile -= T0 + T1
    elif tile >= T0:
        w_ptr, w_scale_ptr, out_ptr, N = w1_ptr, w1_scale_ptr, out1_ptr, tile * 0 + N1
        tile -= T0
    product_tile(
        tile,
        w_ptr,
        x_ptr,
        w_scale_ptr,
        x_scale_ptr,
        out_ptr,
        N,
        M,
        K,
        SPAN,
        GROUPS,
        X,
        W,
        BM,
        BN,
        BK,
    )


def quantize_rows(
    x: jax.Array, *, blocks: bool, start: Launcher = on_gpu
) -> tuple[jax.Array, jax.Array]:
    """As `fp8_matmul.quantize_rows`, in one launch instead of three; `x` is read once."""
    M, K = x.shape
    groups, width = (triton.cdiv(K, BLOCK), BLOCK) if blocks else (1, K)
    size = triton.next_power_of_2(groups) * triton.next_power_of_2(width)
    launch = Launch(
        kernel=quantize_kernel,
        inputs=(x,),
        outputs=(
            jax.ShapeDtypeStruct((M, K), E4M3),
            jax.ShapeDtypeStruct((M, groups), jnp.float32),
        ),
        grid=(M,),
        constants=dict(
            K=K,
            WIDTH=width,
            GROUPS=groups,
            BG=triton.next_power_of_2(groups),
            BW=triton.next_power_of_2(width),
        ),
        warps=min(16, max(4, size // 1024)),
    )
    values, scale = start(launch)
    return values, scale


def tile_config(M: int, N: int, K: int, gpu: Gpu, *, can_split: bool = True) -> dict[str, int]:
    """Tile sizes, splits and pipeline by arithmetic.

    Weights are read once while M fits one tile. Then each tile keeps the more on the way the fewer
    there are: memory of 4.3 TB/s that answers after 0.8 us wants 3.4 MB on the way. A tile takes
    some 0.25 us for each 128 inputs all the same, and where there are at most a quarter as many
    tiles as multiprocessors, the contracted axis is split. In a model XLA adds the parts in the sum
    with the residual, without a launch more; alone they would cost one, as much as reading 6 MB.

    Args:
      can_split: whether the caller adds parts.
    """
    bm = min(128, max(16, triton.next_power_of_2(M)))
    bn = 128 if bm == 128 else 64
    num_tiles = triton.cdiv(N, bn) * triton.cdiv(M, bm)
    splits = 1
    if bm < 128:
        if can_split and 4 * num_tiles <= gpu.num_sms:
            while 2 * num_tiles * splits <= gpu.num_sms and K // (2 * splits) >= MIN_SPLIT:
                splits *= 2
        room = (gpu.shared_memory - 8192) // (BLOCK * (bn + bm))
        wanted = triton.cdiv(BYTES_ON_THE_WAY, num_tiles * splits * bn * BLOCK)
        stages = max(1, min(max(4, wanted), room, MAX_STAGES))
    else:
        while num_tiles * splits < 2 * gpu.num_sms and K // (2 * splits) >= MIN_SPLIT:
            splits *= 2
        stages = 3 if gpu.shared_memory > 200_000 else 2
    return {
        "bm": bm,
        "bn": bn,
        "bk": BLOCK,
        "splits": splits,
        "warps": 8 if bm == 128 else 4,
        "stages": stages,
    }


def product(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    dtype: DTypeLike,
    start: Launcher = on_gpu,
    **overrides: int,
) -> jax.Array:
    """As `fp8_matmul.reference`.

    Args:
      start: executes a launch.
      overrides: of `tile_config`, for measuring.

    Raises:
      ValueError: `overrides` has a `bk` other than 128 where scales are of groups of 128.
    """
    M, K = x.shape
    N = w.shape[0]
    activations = "row" if x_scale.shape[1] == 1 and w_scale.ndim == 1 else "group"
    tiles = tile_config(M, N, K, gpu()) | overrides
    splits, bk = tiles["splits"], tiles["bk"]
    if bk != BLOCK and (activations != "row" or w_scale.ndim == 2):
        raise ValueError(
            f"scales of groups need tiles of {BLOCK} along the contracted axis; got {bk}"
        )
    launch = Launch(
        kernel=fp8_kernel,
        inputs=(w, x, w_scale, x_scale),
        outputs=(jax.ShapeDtypeStruct((splits, M, N), dtype if splits == 1 else jnp.float32),),
        grid=(triton.cdiv(N, tiles["bn"]), triton.cdiv(M, tiles["bm"]), splits),
        constants=dict(
            M=M,
            N=N,
            K=K,
            SPAN=triton.cdiv(K, splits * bk) * bk,
            GROUPS=triton.cdiv(K, BLOCK),
            X=activations,
            W="row" if w_scale.ndim == 1 else "block",
            BM=tiles["bm"],
            BN=tiles["bn"],
            BK=bk,
        ),
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    (parts,) = start(launch)
    return parts[0] if splits == 1 else parts.sum(axis=0).astype(dtype)


def joint_product(
    x: jax.Array,
    x_scale: jax.Array,
    ws: Sequence[Fp8Matrix],
    dtype: DTypeLike,
    start: Launcher = on_gpu,
) -> tuple[jax.Array, ...]:
    """`product` with each of three matrices of one kind, in one launch.

    Args:
      start: executes a launch.
    """
    (M, K), Ns = x.shape, [len(w.values) for w in ws]
    activations = "row" if x_scale.shape[1] == 1 and not ws[0].blocks else "group"
    tiles = tile_config(M, sum(Ns), K, gpu(), can_split=False)
    bn, bk = tiles["bn"], tiles["bk"]
    launch = Launch(
        kernel=joint_kernel,
        inputs=(*(w.values for w in ws), x, *(w.scale for w in ws), x_scale),
        outputs=tuple(jax.ShapeDtypeStruct((M, N), dtype) for N in Ns),
        grid=(sum(triton.cdiv(N, bn) for N in Ns), triton.cdiv(M, tiles["bm"])),
        constants=dict(
            M=M,
            N0=Ns[0],
            N1=Ns[1],
            N2=Ns[2],
            K=K,
            SPAN=triton.cdiv(K, bk) * bk,
            GROUPS=triton.cdiv(K, BLOCK),
            X=activations,
            W="block" if ws[0].blocks else "row",
            BM=tiles["bm"],
            BN=bn,
            BK=bk,
        ),
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    return start(launch)
