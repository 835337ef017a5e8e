"""A mixture's products for few tokens in Triton: without tensor cores, and without sorting.

As in `gemv_triton`, a program asks for whole rows of a matrix at once. Every pair of a token and a
choice is multiplied by its own programs; an expert that several tokens chose is read for each. Both
products of a layer of Qwen3-Coder's, in us on an H200, beside tiles for the tensor core, which need
a launch for sorting (results/gpu.jsonl, `variants: experts`, 2026-11-26):

    tokens   experts that differ   pair by pair   in tiles
    2        16, 8                 32, 32         61, 50
    4        29, 8                 52, 47         84, 56
    8        50, 8                 91, 81         124, 56

A form that read an expert once, for one token after the other, took 115 and 94 us for eight tokens.
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
def scaled_product(
    x,
    w_ptr,
    scale_ptr,
    bias_ptr,
    e,
    begin,
    real,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Outputs [BN] from `begin` on of an expert's float8 matrix; `real` [BN] are not another's."""
    n = begin + tl.arange(0, BN)
    k = tl.arange(0, BK)
    at = w_ptr + (e * ROWS + n[:, None]) * K + k[None, :]
    w = tl.load(at, mask=real[:, None] & (k[None, :] < K), other=0.0).to(tl.float32)
    if W == "block":
        row = e * ((ROWS + 127) // 128) + begin // 128
        x *= tl.load(scale_ptr + row * ((K + 127) // 128) + k // 128, mask=k < K, other=0.0)
    y = tl.sum(w * x[None, :], 1)
    if W == "row":
        y *= tl.load(scale_ptr + e * ROWS + n, mask=real, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + e * ROWS + n, mask=real, other=0.0).to(tl.float32)
    return y


@triton.jit
def expert_gemv_kernel(
    x_ptr,
    expert_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Program (n, p): outputs n * BN and on of pair p, whose row of x is p // CHOICES.

    A tile of outputs lies within one block of 128. W: "row" or "block". GATED: an expert's matrix
    has 2 * N outputs, and the result is silu(output n) times output N + n.
    """
    ROWS: tl.constexpr = 2 * N if GATED else N  # of an expert's matrix
    pair = tl.program_id(1)
    expert = tl.load(expert_ptr + pair)
    e = tl.minimum(expert, E - 1).to(tl.int64)
    begin = tl.program_id(0) * BN
    n = begin + tl.arange(0, BN)
    real = n < tl.where(expert < E, N, 0)
    k = tl.arange(0, BK)
    source = (pair // CHOICES).to(tl.int64)
    x = tl.load(x_ptr + source * K + k, mask=k < K, other=0.0).to(tl.float32)
    y = scaled_product(x, w_ptr, scale_ptr, bias_ptr, e, begin, real, ROWS, K, W, BIAS, BN, BK)
    if GATED:
        up = scaled_product(
            x, w_ptr, scale_ptr, bias_ptr, e, N + begin, real, ROWS, K, W, BIAS, BN, BK
        )
        y = y / (1.0 + tl.exp(-y)) * up
    tl.store(out_ptr + pair.to(tl.int64) * N + n, y.to(out_ptr.dtype.element_ty), mask=real)


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
    choices: int,
    gated: bool = False,
    start: Launcher = on_gpu,
    **overrides: int,
) -> jax.Array:
    """Every pair's row times its expert's matrix [pairs N], in the order of `topk_ids`.

    Rows of pairs that have no expert are not written.

    Args:
      x: [pairs / choices, K]: row i belongs to pairs choices * i and on.
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
    constants = dict(E=len(w.values), N=N, K=K, CHOICES=choices, BIAS=w.bias is not None)
    constants |= dict(BN=config["bn"], BK=config["bk"], W=w.kind, GATED=gated)
    launch = Launch(
        kernel=expert_gemv_kernel,
        inputs=(
            x,
            topk_ids.reshape(-1).astype(jnp.int32),
            w.values,
            w.scale,
            jnp.zeros(1, jnp.float32) if w.bias is None else w.bias,
        ),
        outputs=(jax.ShapeDtypeStruct((topk_ids.size, N), x.dtype),),
        grid=(triton.cdiv(N, config["bn"]), topk_ids.size),
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
        hidden = run(x, w=up, choices=k, gated=True)
    else:
        hidden = weights.act(run(x, w=up, choices=k))
    out = run(hidden, w=down, choices=1).reshape(n, k, -1)
    return experts.weighted_sum(out, routing_weights * (topk_ids < weights.count))
