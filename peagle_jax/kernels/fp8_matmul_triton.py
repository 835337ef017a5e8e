"""The FP8 product in Triton: operands swapped, so that the few tokens stand on the tensor core's short axis.

Bound by reading the weights: M = 8, 4096 x 4096 is 16.8 MB, 3.9 us at the 4.3 TB/s that a copy reaches on an H200. A tensor core
multiplies 64 rows at least; with the weights on that axis tokens are padded to 16, without to 64 and, below that, Triton leaves
the FP8 path (F2FP + HMMA). The contracted axis is split when there are fewer tiles than multiprocessors.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.fp8_matmul import BLOCK, E4M3
from peagle_jax.kernels.launch import Gpu, Launch, Launcher, gpu, on_gpu


@triton.jit
def quantized(x):
    """(e4m3 [M K], scale [M]) of a tile, the largest value of each row becoming 448."""
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
    """One row, as GROUPS groups of WIDTH numbers with a scale each."""
    row = tl.program_id(0).to(tl.int64)
    group, at = tl.arange(0, BG), tl.arange(0, BW)
    k = group[:, None] * WIDTH + at[None, :]
    inside = k < K  # WIDTH is a power of two, or there is one group
    values, scale = quantized(tl.load(x_ptr + row * K + k, mask=inside, other=0.0))
    tl.store(out_ptr + row * K + k, values, mask=inside)
    tl.store(scale_ptr + row * GROUPS + group, scale, mask=group < GROUPS)


@triton.jit
def kernel(
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
    """Tile (n, m) of the part of K that split s covers; GROUPS of 128 in all.

    X, scales of activations: "row", "group", or "raw" where they are not quantised yet. W, of weights: "row", "block".
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    begin = tl.program_id(2) * SPAN
    acc = tl.zeros((BN, BM), tl.float32)
    w_row = w_ptr + n[:, None].to(tl.int64) * K
    x_row = x_ptr + m[:, None].to(tl.int64) * K
    for at in range(begin, begin + SPAN, BK):
        k = at + tl.arange(0, BK)
        w = tl.load(w_row + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
        x = tl.load(x_row + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        if (
            X == "row" and W == "row"
        ):  # Hopper's FP8 sums keep few bits: into float32 after each tile of K
            acc = tl.dot(w, x.T, acc, max_num_imprecise_acc=BK)
        else:  # a sum of its own for each group
            if X == "raw":
                x, x_scale = quantized(x)
            else:
                x_scale = tl.load(
                    x_scale_ptr + m * GROUPS + at // 128, mask=(m < M) & (at < K), other=0.0
                )
            part = tl.dot(w, x.T) * x_scale[None, :]
            if W == "block":
                part *= tl.load(
                    w_scale_ptr + (n // 128) * GROUPS + at // 128,
                    mask=(n < N) & (at < K),
                    other=0.0,
                )[:, None]
            acc += part
    if W == "row":
        acc *= tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[:, None]
    if X == "row":
        acc *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
    out = out_ptr + tl.program_id(2).to(tl.int64) * M * N + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


def quantize_rows(x, *, blocks: bool, start: Launcher = on_gpu) -> tuple[jax.Array, jax.Array]:
    """As `fp8_matmul.quantise_rows`, in one launch instead of three, and `x` is read once."""
    M, K = x.shape
    groups, width = (-(-K // BLOCK), BLOCK) if blocks else (1, K)
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
    return tuple(start(launch))


def tiles(M: int, N: int, K: int, gpu: Gpu) -> dict:
    """Tile sizes, splits and pipeline by arithmetic: weights are read once while M fits a tile, and every multiprocessor has work."""
    bm = min(128, max(16, 1 << (M - 1).bit_length()))
    bn = 128 if bm == 128 else 64
    count = -(-N // bn) * -(-M // bm)
    splits = 1
    while count * splits < 2 * gpu.cores and K // (2 * splits) >= 512:
        splits *= 2
    stages = 4 if bm < 128 else 3 if gpu.shared > 200_000 else 2
    return {
        "bm": bm,
        "bn": bn,
        "bk": BLOCK,
        "splits": splits,
        "warps": 8 if bm == 128 else 4,
        "stages": stages,
    }


def product(x, x_scale, w, w_scale, dtype, start: Launcher = on_gpu, **overrides) -> jax.Array:
    """As `fp8_matmul.reference`; with `x_scale` None, `x` is not quantised yet and gets a scale a row and 128 inputs on the way.

    `overrides` of `tiles` are for measuring.
    """
    (M, K), N = x.shape, w.shape[0]
    how = tiles(M, N, K, gpu()) | overrides
    given = (
        "raw"
        if x_scale is None
        else "row"
        if x_scale.shape[1] == 1 and w_scale.ndim == 1
        else "group"
    )
    splits, bk = how["splits"], how["bk"]
    if bk != BLOCK and (given != "row" or w_scale.ndim == 2):
        raise ValueError(
            f"scales of groups need tiles of {BLOCK} along the contracted axis; got {bk}"
        )
    launch = Launch(
        kernel=kernel,
        inputs=(w, x, w_scale, jnp.zeros(1, jnp.float32) if x_scale is None else x_scale),
        outputs=(jax.ShapeDtypeStruct((splits, M, N), dtype if splits == 1 else jnp.float32),),
        grid=(-(-N // how["bn"]), -(-M // how["bm"]), splits),
        constants=dict(
            M=M,
            N=N,
            K=K,
            SPAN=-(-K // (splits * bk)) * bk,
            GROUPS=-(-K // BLOCK),
            X=given,
            W="row" if w_scale.ndim == 1 else "block",
            BM=how["bm"],
            BN=how["bn"],
            BK=bk,
        ),
        warps=how["warps"],
        stages=how["stages"],
    )
    (parts,) = start(launch)
    return parts[0] if splits == 1 else parts.sum(axis=0).astype(dtype)
