"""FP8 matrix product (W8A8): weights are e4m3 with scales, activations are quantized on the way.

Weights are [out, in], as checkpoints store them: tensor cores take FP8 operands only with the
contracted axis last. They have one scale per output row, or one per block of 128 x 128 as in
released FP8 checkpoints (DeepSeek, Qwen3 `-FP8`). Activations have one scale per row; where
weights have blocks, one per row and group of 128 inputs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from peagle_jax.kernels.choose import choose
from peagle_jax.kernels.launch import platform

E4M3 = jnp.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST = 1e-30  # rows whose largest value is below this are zeros: a scale must not underflow
BLOCK = 128
# Up to this many rows are multiplied without tensor cores, and quantized inside the product, again
# for every tile of outputs. With four a tensor core is faster, although its rows are quantized by a
# launch of their own (results/gpu_tuning.jsonl); three were not measured.
MAX_GEMV_ROWS = 2
MAX_JOINT_ROWS = 64  # of products that share a launch: one tile of tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Matrix:
    """`values * scale` is the matrix. `scale`: [N], or one a block of 128 x 128."""

    values: Float[Array, "N K"]
    scale: Float[Array, " N"] | Float[Array, "n k"]

    @property
    def blocks(self) -> bool:
        return self.scale.ndim == 2

    def dequantized(self) -> Float[Array, "N K"]:
        """The matrix in float32, exactly as it is stored."""
        scale = self.scale[:, None]
        if self.blocks:
            N, K = self.values.shape
            scale = jnp.repeat(jnp.repeat(self.scale, BLOCK, axis=0)[:N], BLOCK, axis=1)[:, :K]
        return self.values.astype(jnp.float32) * scale


def grid(N: int, K: int) -> tuple[int, int]:
    """How many blocks a matrix has, down and across."""
    return -(-N // BLOCK), -(-K // BLOCK)


def quantize(matrix: Float[Array, "N K"], *, blocks: bool = False) -> Fp8Matrix:
    """The matrix in e4m3; the largest value of each row, or of each block, becomes 448."""
    N, K = matrix.shape
    if not blocks:
        return Fp8Matrix(*scaled(matrix, axis=1))
    n, k = grid(N, K)
    padded = jnp.pad(matrix.astype(jnp.float32), [(0, n * BLOCK - N), (0, k * BLOCK - K)])
    values, scale = scaled(padded.reshape(n, BLOCK, k, BLOCK), axis=(1, 3))
    return Fp8Matrix(values.reshape(n * BLOCK, k * BLOCK)[:N, :K], scale)


def quantize_rows(
    x: Float[Array, "M K"], *, blocks: bool
) -> tuple[Float[Array, "M K"], Float[Array, "M k"]]:
    """Activations in e4m3 and their scales: one a row (k = 1), or one a row and 128 inputs."""
    M, K = x.shape
    k = -(-K // BLOCK) if blocks else 1
    width = BLOCK if blocks else K
    groups = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, k * width - K)]).reshape(M, k, width)
    values, scale = scaled(groups, axis=2)
    if platform() == "gpu":
        # XLA may compute more exactly than it is told. Without the barrier it left the rounding to
        # float8 out where it fused it with a product of one row (results/gpu.jsonl).
        values, scale = jax.lax.optimization_barrier((values, scale))
    return values.reshape(M, k * width)[:, :K], scale


def scaled(x: jax.Array, axis: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """(x / scale in e4m3, scale in float32).

    There is one scale for all that lies along `axis`, so that the largest value becomes 448.
    """
    x = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    # zeros stay zeros, whatever they are divided by
    scale = jnp.where(top > SMALLEST, top / E4M3_MAX, 1)
    # kernels that decode float8 numbers by their bits know no NaN; and on a CPU XLA's maximum over
    # some 4,000 numbers and more leaves NaN out (jax 0.10.2)
    scale = jnp.where(jnp.isnan(x).any(axis=axis, keepdims=True), jnp.nan, scale)
    return (x / scale).astype(E4M3), scale.squeeze(axis)


def reference(
    x: Float[Array, "M K"],
    x_scale: Float[Array, "M k"],
    w: Float[Array, "N K"],
    w_scale: Float[Array, "..."],
    dtype: DTypeLike,
) -> Float[Array, "M N"]:
    """The product by XLA: FP8 operands, float32 sums, scales afterwards.

    For one scale a row XLA calls cuBLASLt's FP8 product (Hopper and later).

    Args:
      x, x_scale: as `quantize_rows` returns them, k = 1 or a scale every 128 inputs.
      w, w_scale: of an `Fp8Matrix`.
      dtype: of the result.
    """
    product = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    N, K = w.shape
    by_row = w_scale.ndim == 1
    if x_scale.shape[1] == 1 and by_row:
        return (product(x, w) * x_scale * w_scale[None]).astype(dtype)
    y = jnp.zeros((x.shape[0], N), jnp.float32)
    for i in range(-(-K // BLOCK)):
        block = slice(i * BLOCK, min(K, (i + 1) * BLOCK))
        scale = w_scale if by_row else jnp.repeat(w_scale[:, i], BLOCK)[:N]
        y += product(x[:, block], w[:, block]) * x_scale[:, i : i + 1] * scale[None]
    return y.astype(dtype)


def triton(
    x: Float[Array, "M K"],
    x_scale: Float[Array, "M k"],
    w: Float[Array, "N K"],
    w_scale: Float[Array, "..."],
    dtype: DTypeLike,
) -> Float[Array, "M N"]:
    """As `reference`, by the Triton kernel for tensor cores."""
    from peagle_jax.kernels import fp8_matmul_triton

    return fp8_matmul_triton.product(x, x_scale, w, w_scale, dtype)


def mosaic(
    x: Float[Array, "M K"],
    x_scale: Float[Array, "M k"],
    w: Float[Array, "N K"],
    w_scale: Float[Array, "..."],
    dtype: DTypeLike,
) -> Float[Array, "M N"]:
    """As `reference`, by the Mosaic GPU kernel: Hopper, one scale a row."""
    from peagle_jax.kernels import fp8_matmul_mosaic

    return fp8_matmul_mosaic.product(x, x_scale, w, w_scale, dtype)


FORMS = {"reference": reference, "triton": triton, "mosaic": mosaic}


def matmul(x: Float[Array, "*rows K"], w: Fp8Matrix, form: str = "auto") -> Float[Array, "*rows N"]:
    """`x @ w.T` with `x` quantized on the way, in the dtype of `x`.

    It is differentiable in `x` as if `x` had not been quantized (straight through). The gradient of
    `w` is zero: FP8 weights are not trained.

    Args:
      form: a name of FORMS, or "auto".

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    rows = x.reshape(-1, x.shape[-1])
    form = choose("fp8_matmul", form, FORMS, unsupported(form, rows, w))
    y = cast(jax.Array, _matmul(rows, w.values, w.scale, form))
    return y.reshape(*x.shape[:-1], -1)


def joint_matmul(
    x: Float[Array, "*rows K"], ws: Sequence[Fp8Matrix]
) -> tuple[Float[Array, "*rows N"], ...] | None:
    """`matmul` with each of three matrices in one launch; None where that does not run.

    It is for few rows: with many, launches cost little beside the products.
    """
    rows = x.reshape(-1, x.shape[-1])
    kinds = {w.blocks for w in ws}
    if len(ws) != 3 or len(kinds) != 1 or len(rows) > MAX_JOINT_ROWS:
        return None
    if choose("fp8_matmul", "auto", FORMS) == "reference":
        return None
    ys = _joint(rows, tuple(ws))
    return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)


@jax.custom_vjp
def _joint(x, ws):
    from peagle_jax.kernels import fp8_matmul_triton, gemv_triton

    if len(x) <= MAX_GEMV_ROWS:
        return gemv_triton.product(x, ws, x.dtype)
    values, scale = fp8_matmul_triton.quantize_rows(x, blocks=ws[0].blocks)
    return fp8_matmul_triton.joint_product(values, scale, ws, x.dtype)


def _joint_forward(x, ws):
    return _joint(x, ws), ws


def _joint_backward(ws, grads):
    """As of `matmul`: straight through to the activations, and none for the matrices."""
    dx = [dy.astype(jnp.float32) @ w.dequantized() for w, dy in zip(ws, grads, strict=True)]
    return sum(dx[1:], dx[0]).astype(grads[0].dtype), jax.tree.map(jnp.zeros_like, ws)


_joint.defvjp(_joint_forward, _joint_backward)


def unsupported(form: str, x: Float[Array, "M K"], w: Fp8Matrix) -> str | None:
    """Why a form cannot take these operands; None when it can."""
    if form != "mosaic":
        return None
    from peagle_jax.kernels import fp8_matmul_mosaic

    N, K = w.values.shape
    return fp8_matmul_mosaic.unsupported(len(x), N, K, not w.blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _matmul(x, values, scale, form):
    if form == "triton" and len(x) <= MAX_GEMV_ROWS:
        from peagle_jax.kernels import gemv_triton

        return gemv_triton.product(x, [Fp8Matrix(values, scale)], x.dtype)[0]
    return FORMS[form](*_quantize(x, scale.ndim == 2, form), values, scale, x.dtype)


def _quantize(x, blocks: bool, form: str):
    if form != "triton":
        return quantize_rows(x, blocks=blocks)
    from peagle_jax.kernels import fp8_matmul_triton

    return fp8_matmul_triton.quantize_rows(x, blocks=blocks)


def _forward(x, values, scale, form):
    return _matmul(x, values, scale, form), (values, scale)


def _backward(form, residuals, dy):
    values, scale = residuals
    dx = (dy.astype(jnp.float32) @ Fp8Matrix(values, scale).dequantized()).astype(dy.dtype)
    return dx, jnp.zeros_like(values), jnp.zeros_like(scale)


_matmul.defvjp(_forward, _backward)
