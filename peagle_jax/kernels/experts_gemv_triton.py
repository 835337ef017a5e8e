"""A mixture's products for few tokens in Triton: without tensor cores, and without sorting.

As in `gemv_triton`, a program asks for whole rows of a matrix at once and keeps them in registers.
It finds the tokens that chose its expert by itself, and multiplies them one after the other, so
that every chosen expert is read once. Sorting (token, expert) pairs into tiles for the tensor core
takes a launch of its own, and decoding float8 numbers for it more time than reading them: on an
H200 an earlier form of this kernel, which read an expert for every pair, took 91 us for eight
tokens of Qwen3-Coder's that share few experts, and tiles 124 (results/gpu.jsonl, 2026-11-26).
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels import experts
from peagle_jax.kernels.experts import ExpertWeights, StoredMatrices
from peagle_jax.kernels.fp8_matmul import BLOCK
from peagle_jax.kernels.gemv_triton import MAX_TILE, WEIGHTS
from peagle_jax.kernels.launch import Launch, Launcher, on_gpu

# of `StoredMatrices`: an expert's outputs are rows in memory; MXFP4 was slower so (LOG.md)
KINDS = ("row", "block")


@triton.jit
def matrix_rows(w_ptr, e, n, real, ROWS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Rows n of an expert's matrix [BN BK] as they are stored; zeros where they are not `real`."""
    k = tl.arange(0, BK)
    at = w_ptr + (e * ROWS + n[:, None]) * K + k[None, :]
    return tl.load(at, mask=real[:, None] & (k[None, :] < K), other=0.0)


@triton.jit
def scaled_product(
    x,
    w,
    scale_ptr,
    bias_ptr,
    e,
    n,
    begin,
    real,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    BK: tl.constexpr,
):
    """Outputs n [BN] of an expert's float8 matrix, whose rows `w` are; `begin` is the first."""
    if W == "block":
        k = tl.arange(0, BK)
        row = e * ((ROWS + 127) // 128) + begin // 128
        x *= tl.load(scale_ptr + row * ((K + 127) // 128) + k // 128, mask=k < K, other=0.0)
    y = tl.sum(w.to(tl.float32) * x[None, :], 1)
    if W == "row":
        y *= tl.load(scale_ptr + e * ROWS + n, mask=real, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + e * ROWS + n, mask=real, other=0.0).to(tl.float32)
    return y


@triton.jit
def kernel(
    x_ptr,
    expert_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    A_ROW_EACH: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BP: tl.constexpr,
    BITS: tl.constexpr,
):
    """Program (n, p): outputs n * BN and on of all pairs that have the expert of pair p.

    Only the first of such pairs does anything. Pairs CHOICES * t and on are those of token t. A
    pair's row of x is its own (A_ROW_EACH), or that of its token. A tile of outputs lies within
    one block of 128. W: "row" or "block". GATED: an expert's matrix has 2 * N outputs, and the
    result is silu(output n) times output N + n.
    """
    ROWS: tl.constexpr = 2 * N if GATED else N  # of an expert's matrix
    pair = tl.program_id(1)
    expert = tl.load(expert_ptr + pair)
    # Which tokens chose the expert, and by which of their choices: in two numbers, because a
    # question for every token would be a reduction for every token.
    q = tl.arange(0, BP)
    experts = tl.load(expert_ptr + q, mask=q < TOKENS * CHOICES, other=E)
    token, one = q // CHOICES, tl.full((BP,), 1, tl.int64)
    is_chosen = experts == expert
    tokens = tl.sum(tl.where(is_chosen, one << token, 0), 0)
    choices = tl.sum(tl.where(is_chosen, (one * (q % CHOICES)) << (token * BITS), 0), 0)
    first = pair // CHOICES
    is_first = (tokens & ((tl.full((), 1, tl.int64) << first) - 1)) == 0
    end = tl.where((expert < E) & is_first, TOKENS, 0)
    e = tl.minimum(expert, E - 1).to(tl.int64)
    begin = tl.program_id(0) * BN
    n = begin + tl.arange(0, BN)
    real = n < tl.where(end > 0, N, 0)
    w = matrix_rows(w_ptr, e, n, real, ROWS, K, BK)
    if GATED:
        w_up = matrix_rows(w_ptr, e, N + n, real, ROWS, K, BK)
    k = tl.arange(0, BK)
    for t in range(first, end):
        if ((tokens >> t) & 1) > 0:
            at = t * CHOICES + ((choices >> (t * BITS)) & ((1 << BITS) - 1))
            source = at if A_ROW_EACH else at // CHOICES
            x = tl.load(x_ptr + source * K + k, mask=k < K, other=0.0).to(tl.float32)
            y = scaled_product(x, w, scale_ptr, bias_ptr, e, n, begin, real, ROWS, K, W, BIAS, BK)
            if GATED:
                up = scaled_product(
                    x,
                    w_up,
                    scale_ptr,
                    bias_ptr,
                    e,
                    N + n,
                    N + begin,
                    real,
                    ROWS,
                    K,
                    W,
                    BIAS,
                    BK,
                )
                y = y / (1.0 + tl.exp(-y)) * up
            tl.store(out_ptr + at * N + n, y.to(out_ptr.dtype.element_ty), mask=real)


def bits_of_a_choice(tokens: int) -> int:
    """Of the 64 bits in which a program keeps a choice of every token."""
    return 63 // tokens


def can_multiply(tokens: int, choices: int, kinds: set[str]) -> bool:
    """Whether the kernel takes so many tokens and choices of each, and matrices of these kinds."""
    return tokens <= 63 and choices <= 2 ** bits_of_a_choice(tokens) and kinds <= set(KINDS)


def tile_config(N: int, K: int, *, gated: bool) -> dict[str, int]:
    """Rows of a matrix that one program takes, and the inputs that a row is padded to.

    Where N other rows begin behind the N that are gated, neither tile crosses a block's border.
    """
    bk = triton.next_power_of_2(K)
    bn = min(MAX_TILE, max(1, WEIGHTS // (bk * (1 + gated))))
    while gated and N % bn:
        bn //= 2
    return {"bn": bn, "bk": bk, "warps": 4}


def product(
    x: jax.Array,
    topk_ids: jax.Array,
    w: StoredMatrices,
    *,
    gated: bool = False,
    start: Launcher = on_gpu,
    **overrides: int,
) -> jax.Array:
    """Every pair's row times its expert's matrix [pairs N], in the order of `topk_ids`.

    Rows of pairs that have no expert are not written. A token's experts differ from each other.
    Which pairs there may be says `can_multiply`.

    Args:
      x: [tokens K], or [pairs K] in the order of `topk_ids` [tokens choices].
      gated: the first half of an expert's outputs goes through SiLU and multiplies the second
        half: [pairs N/2].
      start: executes a launch.
      overrides: of `tile_config`, for measuring.

    Raises:
      ValueError: `overrides` has a `bn` whose tiles cross the border of a block.
    """
    K, N = x.shape[1], w.outputs // 2 if gated else w.outputs
    config = tile_config(N, K, gated=gated) | overrides
    if BLOCK % config["bn"] or gated and N % config["bn"]:
        raise ValueError(f"a tile must lie within a block of {BLOCK} outputs; got {config['bn']}")
    (tokens, choices), pairs = topk_ids.shape, topk_ids.size
    constants = dict(E=len(w.values), N=N, K=K, TOKENS=tokens, CHOICES=choices)
    constants |= dict(A_ROW_EACH=len(x) == pairs, BIAS=w.bias is not None, W=w.kind, GATED=gated)
    constants |= dict(BN=config["bn"], BK=config["bk"], BP=triton.next_power_of_2(pairs))
    constants |= dict(BITS=bits_of_a_choice(tokens))
    launch = Launch(
        kernel=kernel,
        inputs=(
            x,
            topk_ids.reshape(-1).astype(jnp.int32),
            w.values,
            w.scale,
            jnp.zeros(1, jnp.float32) if w.bias is None else w.bias,
        ),
        outputs=(jax.ShapeDtypeStruct((pairs, N), x.dtype),),
        grid=(triton.cdiv(N, config["bn"]), pairs),
        constants=constants,
        warps=config["warps"],
        stages=1,
    )
    return start(launch)[0]


def mixture(
    x: jax.Array,
    topk_ids: jax.Array,
    routing_weights: jax.Array,
    weights: ExpertWeights,
    start: Launcher = on_gpu,
) -> jax.Array:
    """As `experts.reference`, of matrices of the KINDS."""
    (n, k), (up, down) = topk_ids.shape, weights.matrices()
    run = functools.partial(product, topk_ids=topk_ids, start=start)
    if getattr(weights.act, "is_halved_swiglu", False):
        hidden = run(x, w=up, gated=True)
    else:
        hidden = weights.act(run(x, w=up))
    out = run(hidden, w=down).reshape(n, k, -1)
    return experts.weighted_sum(out, routing_weights * (topk_ids < weights.count))
