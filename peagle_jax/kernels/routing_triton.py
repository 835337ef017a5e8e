"""A router in one Triton kernel: product, softmax and the k largest.

A tile of 16 tokens is one program, because the largest of all logits are asked for: 2048 x 128
numbers in bfloat16 are 0.5 MB, which a multiprocessor reads from the L2 cache at perhaps 100 GB/s.
These 5 us take the place of eight launches, one of which converts the matrix to float32.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.launch import Launch, Launcher, on_gpu

ROWS = 16  # that a tensor core takes at once


@triton.jit
def kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    weight_ptr,
    id_ptr,
    M: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BC: tl.constexpr,
):
    """Program i takes tokens i * BM and on, and all experts."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    e = tl.arange(0, BE)
    acc = tl.zeros((BM, BE), tl.float32)
    for at in range(0, D, BD):
        d = at + tl.arange(0, BD)
        x = tl.load(
            x_ptr + m[:, None] * D + d[None, :],
            mask=(m[:, None] < M) & (d[None, :] < D),
            other=0.0,
        )
        w = tl.load(
            w_ptr + d[:, None] * E + e[None, :],
            mask=(d[:, None] < D) & (e[None, :] < E),
            other=0.0,
        )
        acc = tl.dot(x, w, acc)
    logits = acc.to(x_ptr.dtype.element_ty)
    if BIAS:
        # in float32: Triton's interpreter adds the bits of bfloat16 numbers
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        logits = (logits.to(tl.float32) + bias[None, :]).to(x_ptr.dtype.element_ty)
    left = tl.where(e[None, :] < E, logits.to(tl.float32), float("-inf"))
    top = tl.max(left, 1)
    total = tl.sum(tl.exp(left - top[:, None]), 1)
    choice = tl.arange(0, BC)
    chosen = tl.full((BM, BC), float("-inf"), tl.float32)
    ids = tl.zeros((BM, BC), tl.int32)
    for j in tl.static_range(CHOICES):
        largest = tl.max(left, 1)
        # of equal ones the first, as `jax.lax.top_k`
        found = tl.min(tl.where(left == largest[:, None], e[None, :], BE), 1)
        chosen = tl.where(choice[None, :] == j, largest[:, None], chosen)
        ids = tl.where(choice[None, :] == j, found[:, None], ids)
        left = tl.where(e[None, :] == found[:, None], float("-inf"), left)
    weights = tl.exp(chosen - top[:, None])
    if NORMALIZED:
        total = tl.sum(weights, 1)
    weights /= total[:, None]
    inside = (m[:, None] < M) & (choice[None, :] < CHOICES)
    at = m[:, None] * CHOICES + choice[None, :]
    tl.store(weight_ptr + at, weights.to(weight_ptr.dtype.element_ty), mask=inside)
    tl.store(id_ptr + at, ids, mask=inside)


def route(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    k: int,
    *,
    normalized: bool,
    start: Launcher = on_gpu,
) -> tuple[jax.Array, jax.Array]:
    """As `routing.reference`.

    Args:
      start: executes a launch.
    """
    (M, D), E = x.shape, w.shape[1]
    block_experts = max(16, triton.next_power_of_2(E))
    launch = Launch(
        kernel=kernel,
        inputs=(x, w, jnp.zeros(1, x.dtype) if bias is None else bias),
        outputs=(
            jax.ShapeDtypeStruct((M, k), x.dtype),
            jax.ShapeDtypeStruct((M, k), jnp.int32),
        ),
        grid=(triton.cdiv(M, ROWS),),
        constants=dict(
            M=M,
            D=D,
            E=E,
            CHOICES=k,
            NORMALIZED=normalized,
            BIAS=bias is not None,
            BM=ROWS,
            BD=min(128, 8192 // block_experts),
            BE=block_experts,
            BC=triton.next_power_of_2(k),
        ),
        warps=4,
        # 16 KB of the matrix a stage, three of which are on their way
        stages=4,
    )
    weights, ids = start(launch)
    return weights, ids
