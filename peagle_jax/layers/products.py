"""Products of activations and weights, in the form that the processor at hand computes fastest.

On a CPU the activations of a 16-bit model are float32: XLA has no 16-bit arithmetic there besides
products, and converts the operands and the result of every addition, norm and rotation. Products
still read 16-bit weights, with 16-bit operands and float32 sums. A P-EAGLE step of the packaged
bfloat16 models takes 6.5 ms this way, and 11.4 ms with bfloat16 activations (LOG.md, 2026-11-23).
"""

import contextlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from peagle_jax.kernels import native_code
from peagle_jax.kernels.launch import platform
from peagle_jax.kernels.processor import has_bfloat16_matrix_units, has_bfloat16_products
from peagle_jax.kernels.tiled_products import Norm, gated_products, tiled_products
from peagle_jax.layers.matrix_layouts import layout_of_matrix
from peagle_jax.types import Model

# Rows of a product with bfloat16 weights on a CPU. XLA converts the weights of one-row products to
# float32, before a loop starts, so that decoding would hold all weights three times. And matrix
# units take tiles of rows: on a Xeon with AMX 13M bfloat16 weights take 3.2 ms with one row and
# 1.9 ms with four. From four rows on, a row's numbers do not depend on how many there are.
MIN_BFLOAT16_ROWS = 4


def activation_dtype(param_dtype: DTypeLike) -> jnp.dtype:
    """The dtype of activations in a model whose parameters have `param_dtype`."""
    dtype = jnp.dtype(param_dtype)
    return jnp.dtype(jnp.float32) if dtype.itemsize == 2 and platform() == "cpu" else dtype


def default_cache_dtype(param_dtype: DTypeLike, head_dims: Sequence[int]) -> jnp.dtype:
    """The dtype of cached keys and values in a model whose parameters have `param_dtype`.

    That of activations; but bfloat16 models have bfloat16 caches, half as large, on a CPU where a
    C++ kernel reads them. XLA would convert them in every step. On a CPU with matrix units, which
    that kernel does not use, XLA attends, to float32 caches.

    Args:
      head_dims: of all layers.
    """
    dtype, wanted = activation_dtype(param_dtype), jnp.dtype(param_dtype)
    if wanted != jnp.bfloat16 or dtype == wanted or has_bfloat16_matrix_units():
        return dtype
    has_kernel = native_code.is_callable_here() and all(map(native_code.fills_vectors, head_dims))
    return wanted if has_kernel else dtype


def attention_operands(param_dtype: DTypeLike) -> jnp.dtype | None:
    """The dtype in which cached attention multiplies; None for that of keys and values.

    Where activations and caches of bfloat16 models are float32, matrix units still want bfloat16,
    which is what transformers multiplies: 1.6 ms for 8 layers at batch 8, and 2.6 in float32. Other
    processors with products of bfloat16 take it for prompts alone (`attention.step_operands`).
    """
    dtype = jnp.dtype(param_dtype)
    return dtype if dtype == jnp.bfloat16 and has_bfloat16_products() else None


def product(x: Float[Array, "*rows K"], w: Float[Array, "*experts K N"]) -> Float[Array, "*rows N"]:
    """`x @ w` with operands in the dtype of `w`, and the result in the wider of both dtypes."""
    num_rows = x.shape[-2]
    is_narrowed = w.dtype == jnp.bfloat16 and x.dtype == jnp.float32
    x = _with_least_rows(x, w)
    multiplies_in_bfloat16 = is_narrowed and has_bfloat16_products() and x.ndim == w.ndim == 2
    y = _narrowed(x, w) if multiplies_in_bfloat16 else _matmul(x, w)
    return y[..., :num_rows, :]


def product_of_layout(x: Float[Array, "rows K"], w: Float[Array, "..."]) -> Float[Array, "rows N"]:
    """`product` of x and a matrix in any layout of `matrix_layouts`."""
    layout = layout_of_matrix(w)
    if layout == "tiles":
        return products_of_tiles(x, [w])[0]
    if layout == "transposed":
        return _by_transposed(_with_least_rows(x, w), w)[: len(x)]
    return product(x, w)


def products_of_tiles(
    x: Float[Array, "rows K"],
    matrices: Sequence[Float[Array, "_ parts columns numbers"]],
    norm: Norm | None = None,
) -> list[Float[Array, "rows _"]]:
    """`x`, or its norm, times each of several matrices in tiles, in one call."""
    return tiled_products(x.astype(jnp.float32), matrices, norm)


def gated_product_of_tiles(
    gate: Float[Array, "rows K"],
    up: Float[Array, "rows K"],
    matrix: Float[Array, "_ parts columns numbers"],
    activation: str,
) -> Float[Array, "rows _"]:
    """`activation(gate) * up` times a matrix in tiles, in one call."""
    return gated_products(gate, up, [matrix], activation)[0]


def _by_transposed(x: Array, w: Array) -> Array:
    wider, inputs = jnp.promote_types(x.dtype, w.dtype), (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x.astype(w.dtype), w[..., 0], inputs, preferred_element_type=wider)


def _with_least_rows(x: Array, w: Array) -> Array:
    """`x` with further rows of zeros, where a CPU wants more of them with such weights."""
    missing = MIN_BFLOAT16_ROWS - x.shape[-2]
    is_narrowed = w.dtype == jnp.bfloat16 and x.dtype == jnp.float32
    if not is_narrowed or missing <= 0 or platform() != "cpu":
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])


def _matmul(x: Array, w: Array) -> Array:
    wider = jnp.promote_types(x.dtype, w.dtype)
    return jnp.matmul(x.astype(w.dtype), w, preferred_element_type=wider)


def float32_product(x: Float[Array, "R K"], w: Float[Array, "K N"]) -> Float[Array, "R N"]:
    """`x @ w` as `product` multiplies it, with a result in float32.

    Sums of 16-bit operands are not rounded: logits of a loss keep what their products had.
    """
    is_narrow = x.dtype == w.dtype and x.dtype.itemsize == 2
    return _with_wide_sums(x, w) if is_narrow else product(x, w)


@jax.custom_vjp
def _with_wide_sums(x: Float[Array, "R K"], w: Float[Array, "K N"]) -> Float[Array, "R N"]:
    """A product of 16-bit operands in float32, whose gradients are products in 16 bits, too.

    Autodiff would multiply the float32 gradient with a 16-bit factor, without tensor cores.
    """
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def _with_wide_sums_forward(x, w):
    return _with_wide_sums(x, w), (x, w)


def _with_wide_sums_backward(saved, dy):
    x, w = saved
    dy = dy.astype(w.dtype)
    dx = jnp.matmul(dy, w.T, preferred_element_type=jnp.float32)
    dw = jnp.matmul(x.T, dy, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_with_wide_sums.defvjp(_with_wide_sums_forward, _with_wide_sums_backward)


@jax.custom_vjp
def _narrowed(x: Float[Array, "R K"], w: Float[Array, "K N"]) -> Float[Array, "R N"]:
    """A float32 product of operands that are rounded to bfloat16, also in its gradients.

    Autodiff multiplies the float32 gradient with a bfloat16 factor, which XLA converts to float32:
    two thirds of a training step then have no bfloat16 products.
    """
    return _matmul(x, w)


def _narrowed_forward(x, w):
    narrow = x.astype(w.dtype)
    y = jnp.matmul(narrow, w, preferred_element_type=x.dtype)
    return y, (narrow, w)


def _narrowed_backward(saved, dy):
    x, w = saved
    dy = dy.astype(w.dtype)
    if has_bfloat16_matrix_units():
        dx = jnp.matmul(dy, _written_transpose(w), preferred_element_type=jnp.float32)
    else:
        last_axes = (((1,), (1,)), ((), ()))
        dx = jax.lax.dot_general(dy, w, last_axes, preferred_element_type=jnp.float32)
    dw = jnp.matmul(_written_transpose(x), dy, preferred_element_type=jnp.float32)
    return dx, dw.astype(w.dtype)


def _written_transpose(x: Float[Array, "M N"]) -> Float[Array, "N M"]:
    """The transpose, as a slice of an array that is written.

    XLA makes another transpose a part of the product, and then converts both operands to float32:
    on a Xeon with AMX 1,024 x 512 x 1,024 take 9 ms so, and 2.5 ms with this (LOG.md, 2026-11-25).
    On an EPYC that is so where the first operand is transposed, and not where the second is
    (LOG.md, 2026-11-30, night).
    """
    return jnp.pad(x.T, [(0, 0), (0, 1)])[:, :-1]


_narrowed.defvjp(_narrowed_forward, _narrowed_backward)


def full_precision(model: Model) -> contextlib.AbstractContextManager:
    """A context in which the products of a float32 model are computed in float32.

    GPUs round the factors of float32 products to 10 bits of mantissa unless told otherwise, and
    lossless decoding is promised for float32. A model in fewer bits is computed as JAX does by
    default.
    """
    is_float32 = jnp.dtype(model.config.dtype) == jnp.float32
    return jax.default_matmul_precision("highest" if is_float32 else None)
