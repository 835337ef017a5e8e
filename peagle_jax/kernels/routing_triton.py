"""A router in two Triton kernels: the product, in parts, and then softmax and the k largest.

2048 x 128 numbers in bfloat16 are 0.5 MB. One program that multiplied them and then compared all
logits took 11.5 us of an H200 (results/gpu.jsonl), and one that looked for one choice after the
other was no faster. So the product is cut along the contracted axis, a tile of 16 KB a program, and
a second kernel adds the parts. There every logit is compared with every other at once, and the
number of larger ones is its place.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.launch import Launch, Launcher, on_gpu

ROWS = 16  # tokens that a tensor core takes at once
INPUTS = 64  # of a program of the product


@triton.jit
def product_kernel(
    x_ptr,
    w_ptr,
    part_ptr,
    M: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
):
    """Program (p, i): inputs p * BD and on of tokens i * BM and on, and all experts."""
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    e = tl.arange(0, BE)
    x = tl.load(
        x_ptr + m[:, None] * D + d[None, :], mask=(m[:, None] < M) & (d[None, :] < D), other=0.0
    )
    w = tl.load(
        w_ptr + d[:, None] * E + e[None, :], mask=(d[:, None] < D) & (e[None, :] < E), other=0.0
    )
    part = part_ptr + tl.program_id(0) * M * E + m[:, None] * E + e[None, :]
    tl.store(part, tl.dot(x, w), mask=(m[:, None] < M) & (e[None, :] < E))


@triton.jit
def choice_kernel(
    part_ptr,
    bias_ptr,
    weight_ptr,
    id_ptr,
    M: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BIAS: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
):
    """Program i takes token i: it adds its parts, and finds the places of its experts."""
    token = tl.program_id(0)
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    e = tl.arange(0, BE)
    p = tl.arange(0, BP)
    parts = tl.load(
        part_ptr + p[:, None] * M * E + token * E + e[None, :],
        mask=(p[:, None] < PARTS) & (e[None, :] < E),
        other=0.0,
    )
    logits = tl.sum(parts, 0).to(dtype)
    if BIAS:
        # in float32: Triton's interpreter adds the bits of bfloat16 numbers
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        logits = (logits.to(tl.float32) + bias).to(dtype)
    logits = tl.where(e < E, logits.to(tl.float32), float("-inf"))
    # every expert needs a place of its own: without this NaN would have none
    order = tl.where(logits == logits, logits, float("-inf"))
    # of equal ones the first, as `jax.lax.top_k`
    is_before = tl.where(
        e[None, :] < e[:, None],
        order[None, :] >= order[:, None],
        order[None, :] > order[:, None],
    )
    place = tl.sum(is_before.to(tl.int32), 1)
    is_chosen = place < CHOICES
    # NaN, wherever it is, makes all weights NaN, as in a softmax over all logits
    nan = tl.sum(tl.where(logits == logits, 0.0, logits), 0)
    weights = tl.exp(logits - tl.max(order, 0)) + nan
    if NORMALIZED:
        weights /= tl.sum(tl.where(is_chosen, weights, 0.0), 0)
    else:
        weights /= tl.sum(weights, 0)
    at = token * CHOICES + place
    tl.store(weight_ptr + at, weights.to(dtype), mask=is_chosen)
    tl.store(id_ptr + at, e, mask=is_chosen)


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
    num_parts, block_experts = triton.cdiv(D, INPUTS), max(16, triton.next_power_of_2(E))
    product = Launch(
        kernel=product_kernel,
        inputs=(x, w),
        outputs=(jax.ShapeDtypeStruct((num_parts, M, E), jnp.float32),),
        grid=(num_parts, triton.cdiv(M, ROWS)),
        constants=dict(M=M, D=D, E=E, BM=ROWS, BD=INPUTS, BE=block_experts),
        warps=4,
        stages=1,
    )
    choice = Launch(
        kernel=choice_kernel,
        inputs=(*start(product), jnp.zeros(1, x.dtype) if bias is None else bias),
        outputs=(
            jax.ShapeDtypeStruct((M, k), x.dtype),
            jax.ShapeDtypeStruct((M, k), jnp.int32),
        ),
        grid=(M,),
        constants=dict(
            M=M,
            E=E,
            PARTS=num_parts,
            CHOICES=k,
            NORMALIZED=normalized,
            BIAS=bias is not None,
            BP=triton.next_power_of_2(num_parts),
            BE=block_experts,
        ),
        warps=max(4, block_experts // 16),
        stages=1,
    )
    weights, ids = start(choice)
    return weights, ids
