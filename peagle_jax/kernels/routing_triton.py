"""A router in two Triton kernels: the product, in parts, and then softmax and the k largest.

2048 x 128 numbers in bfloat16 are 0.5 MB. One program that multiplied them and then compared all
logits took 11.5 us of an H200 (results/gpu.jsonl), and one that looked for one choice after the
other was no faster. So the product is cut along the contracted axis, a tile of 16 KB a program, and
a second kernel adds the parts and looks for one choice after the other. There one warp has all
logits of a token, and a logit and its expert are one integer, so that a choice is one maximum among
32 threads; comparing every logit with every other took 4.2 us of eight tokens, and XLA's whole
router 11.
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
MAX_OF_A_WARP = 8192  # numbers of a token's parts: twice as many fill its registers, and spill


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
    BC: tl.constexpr,
):
    """Program i takes token i: it adds its parts, and looks for its experts.

    The largest logit is found as the largest integer: the bits of a float32 sort like integers once
    those of negative ones are inverted. Below them stands the expert, from the last to the first,
    so that of equal logits the first is taken.
    """
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
    # NaN, wherever it is, makes all weights NaN, as in a softmax over all logits
    nan = tl.sum(tl.where(logits == logits, 0.0, logits), 0)
    # it needs a place all the same, and -0 the place of 0
    order = tl.where(logits == logits, logits, float("-inf"))
    order = tl.where(order == 0.0, 0.0, order)
    bits = order.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # where no expert is, less than any
    key = tl.where(e < E, (bits.to(tl.int64) << 32) | (BE - 1 - e), -(1 << 62) * 2)
    c = tl.arange(0, BC)
    ids = tl.zeros((BC,), tl.int32)
    chosen = tl.full((BC,), float("-inf"), tl.float32)
    for i in range(CHOICES):
        largest = tl.max(key, 0)
        key = tl.where(key == largest, -(1 << 62) * 2, key)
        ids = tl.where(c == i, (BE - 1 - (largest & (BE - 1))).to(tl.int32), ids)
        upper = (largest >> 32).to(tl.int32)
        logit = (upper ^ ((upper >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        chosen = tl.where(c == i, logit, chosen)
    top = tl.max(chosen, 0)
    weights = tl.exp(chosen - top) + nan
    if NORMALIZED:
        weights /= tl.sum(tl.where(c < CHOICES, weights, 0.0), 0)
    else:
        weights /= tl.sum(tl.exp(order - top), 0)
    at = token * CHOICES + c
    tl.store(weight_ptr + at, weights.to(dtype), mask=c < CHOICES)
    tl.store(id_ptr + at, ids, mask=c < CHOICES)


def route(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    k: int,
    *,
    normalized: bool,
    start: Launcher = on_gpu,
    choice_warps: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `routing.reference`.

    Args:
      start: executes a launch.
      choice_warps: of a program of the second kernel, for measuring; None: as many as its numbers
        need.
    """
    (M, D), E = x.shape, w.shape[1]
    num_parts, block_experts = triton.cdiv(D, INPUTS), max(16, triton.next_power_of_2(E))
    block_parts = triton.next_power_of_2(num_parts)
    if choice_warps is None:
        choice_warps = 1 if block_parts * block_experts <= MAX_OF_A_WARP else 4
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
            BP=block_parts,
            BE=block_experts,
            BC=triton.next_power_of_2(k),
        ),
        warps=choice_warps,
        stages=1,
    )
    weights, ids = start(choice)
    return weights, ids
