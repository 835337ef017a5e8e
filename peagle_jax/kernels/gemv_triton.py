"""FP8 products of one or two rows in Triton, without tensor cores: one trip to memory.

Such a product is bound by reading the weights, and on an H200 by waiting for them. The kernel for
tensor cores walks along the contracted axis in steps of 128: for 1 x 2048 x 4096 it takes 17 us
with its launch for quantizing, where the bytes take 2. Here a program asks for whole rows of the
matrix at once and keeps them in registers, and rows of activations are quantized and multiplied one
after the other: 11 us, in both cases with some 4 us of launching (results/gpu_tuning.jsonl). A
thread multiplies 128 numbers a row, so that from four rows on the tensor core is faster.

A row's sums are grouped alike whether another row stands beside it or not.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from collections.abc import Sequence

import jax
import triton
import triton.language as tl
from jax.typing import DTypeLike

from peagle_jax.kernels.fp8_matmul import BLOCK, Fp8Matrix
from peagle_jax.kernels.launch import Launch, Launcher, on_gpu

WEIGHTS = 16_384  # numbers that a program of four warps keeps in registers: 128 a thread
MAX_TILE = 16  # rows of a matrix that one program takes


@triton.jit
def activations(x_ptr, m, scale_ptr, K: tl.constexpr, W: tl.constexpr, BG: tl.constexpr):
    """Row m of the activations, quantized and scaled again [BG * 128], in float32.

    "row": there is one scale for the row. "block": one for each 128 numbers, and those of the
    matrix, which stand at `scale_ptr`, are in the result as well.
    """
    g = tl.arange(0, BG)
    k = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(x), 1)
    if W == "row":
        top = top * 0.0 + tl.max(top, 0)
    scale = tl.where(top > 1e-30, top / 448.0, 1.0)
    x = (x / scale[:, None]).to(tl.float8e4nv).to(tl.float32)
    if W == "block":
        scale *= tl.load(scale_ptr + g, mask=g * 128 < K, other=0.0)
    return tl.reshape(x * scale[:, None], (BG * 128,))


@triton.jit
def rows_of_one(
    tile,
    w_ptr,
    x_ptr,
    scale_ptr,
    out_ptr,
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
):
    """Outputs tile * BN and on of all M rows. A tile lies within one block of 128 outputs."""
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BG * 128)
    at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(at, mask=(n[:, None] < N) & (k[None, :] < K), other=0.0).to(tl.float32)
    scale_row = scale_ptr + (tile * BN // 128) * ((K + 127) // 128)
    for m in range(M):
        x = activations(x_ptr, m, scale_row, K, W, BG)
        y = tl.sum(w * x[None, :], 1)
        if W == "row":
            y *= tl.load(scale_ptr + n, mask=n < N, other=0.0)
        tl.store(out_ptr + m * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def gemv_kernel(
    w_ptr,
    x_ptr,
    scale_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
):
    """One matrix; W says what its scales are: "row" or "block"."""
    rows_of_one(tl.program_id(0), w_ptr, x_ptr, scale_ptr, out_ptr, N, M, K, W, BN, BG)


@triton.jit
def joint_gemv_kernel(
    w0_ptr,
    w1_ptr,
    w2_ptr,
    x_ptr,
    scale0_ptr,
    scale1_ptr,
    scale2_ptr,
    out0_ptr,
    out1_ptr,
    out2_ptr,
    M: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
):
    """Three matrices of the same activations, whose tiles follow each other."""
    T0: tl.constexpr = (N0 + BN - 1) // BN
    T1: tl.constexpr = (N1 + BN - 1) // BN
    tile = tl.program_id(0)
    w_ptr, scale_ptr, out_ptr, N = w0_ptr, scale0_ptr, out0_ptr, tile * 0 + N0
    if tile >= T0 + T1:
        w_ptr, scale_ptr, out_ptr, N = w2_ptr, scale2_ptr, out2_ptr, tile * 0 + N2
        tile -= T0 + T1
    elif tile >= T0:
        w_ptr, scale_ptr, out_ptr, N = w1_ptr, scale1_ptr, out1_ptr, tile * 0 + N1
        tile -= T0
    rows_of_one(tile, w_ptr, x_ptr, scale_ptr, out_ptr, N, M, K, W, BN, BG)


def tile_config(K: int) -> dict[str, int]:
    """Rows of a matrix that one program takes, groups of 128 inputs that a row is padded to.

    A row of more than 8,192 numbers spills with four warps: with 21,504 as in Gemma 4's.
    """
    groups = triton.next_power_of_2(triton.cdiv(K, BLOCK))
    bn = min(MAX_TILE, max(1, WEIGHTS // (groups * BLOCK)))
    return {"bn": bn, "bg": groups, "warps": 8 if groups > 64 else 4}


def product(
    x: jax.Array,
    ws: Sequence[Fp8Matrix],
    dtype: DTypeLike,
    start: Launcher = on_gpu,
    **overrides: int,
) -> tuple[jax.Array, ...]:
    """`fp8_matmul.matmul` of few rows with one matrix, or with three of one kind, in one launch.

    Args:
      x: [M K], not quantized.
      start: executes a launch.
      overrides: of `tile_config`, for measuring.

    Raises:
      ValueError: `overrides` has a `bn` that does not divide a block.
    """
    (M, K), Ns = x.shape, [len(w.values) for w in ws]
    tiles = tile_config(K) | overrides
    bn = tiles["bn"]
    if BLOCK % bn:
        raise ValueError(f"a tile must lie within a block of {BLOCK} outputs; got {bn}")
    sizes = {"N": Ns[0]} if len(ws) == 1 else {f"N{i}": N for i, N in enumerate(Ns)}
    launch = Launch(
        kernel=gemv_kernel if len(ws) == 1 else joint_gemv_kernel,
        inputs=(*(w.values for w in ws), x, *(w.scale for w in ws)),
        outputs=tuple(jax.ShapeDtypeStruct((M, N), dtype) for N in Ns),
        grid=(sum(triton.cdiv(N, bn) for N in Ns),),
        constants=dict(
            M=M, K=K, W="block" if ws[0].blocks else "row", BN=bn, BG=tiles["bg"], **sizes
        ),
        warps=tiles["warps"],
        stages=1,
    )
    return start(launch)
