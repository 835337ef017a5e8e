"""Linear, norms, embedding, gated MLP.

Numerics follow transformers: norms are computed in float32, everything else in the weights' dtype;
on a CPU everything but products is float32, see `products`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import embedding_rows, vocab
from peagle_jax.kernels.row_sums import with_one_axis_of_rows
from peagle_jax.kernels.tiled_products import Norm
from peagle_jax.layers.matrix_layouts import layout_of_matrix
from peagle_jax.layers.products import (
    activation_dtype,
    gated_product_of_tiles,
    product_of_layout,
    products_of_tiles,
)


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, scale: float = 0.02
) -> nnx.Param:
    """A parameter drawn from a normal distribution with standard deviation `scale`."""
    return nnx.Param((scale * jax.random.normal(rngs.params(), shape)).astype(dtype))


def along_last(vector: Float[Array, " D"], x: Float[Array, "*rows D"]) -> Float[Array, "*ones D"]:
    """`vector` in the rank of `x`: tests forbid JAX to promote ranks silently."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


class Linear(nnx.Module):
    """`x @ kernel`, by `products.product`.

    The kernel is [in, out]. For decoding on a CPU it may be in another layout (`matrix_layouts`).
    """

    def __init__(
        self, inputs: int, outputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs, bias: bool = False
    ):
        self.kernel = normal(rngs, (inputs, outputs), dtype, inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        # All rows in one axis: on a CPU XLA's gradient of a matrix contracts one axis of rows twice
        # as fast as two (LOG.md).
        rows, kernel = x.reshape(-1, x.shape[-1]), self.kernel[...]
        return self.add_bias(product_of_layout(rows, kernel).reshape(*x.shape[:-1], -1))

    def product_of_gate(
        self,
        gate: Float[Array, "*rows inputs"],
        up: Float[Array, "*rows inputs"],
        activation: str,
    ) -> Float[Array, "*rows outputs"] | None:
        """What it makes of `activation(gate) * up`, by a kernel; None where there is none.

        Args:
          activation: of `tiled_products.ACTIVATIONS`.
        """
        kernel = self.kernel[...]
        if layout_of_matrix(kernel) != "tiles" or gate.dtype != jnp.float32:
            return None
        gate_rows, up_rows = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
        y = gated_product_of_tiles(gate_rows, up_rows, kernel, activation)
        return self.add_bias(y.reshape(*gate.shape[:-1], -1))

    def add_bias(self, y: Float[Array, "*rows outputs"]) -> Float[Array, "*rows outputs"]:
        """A product with the layer's bias, where it has one."""
        return y if self.bias is None else y + along_last(self.bias[...], y)

    def argmax_logits(self, x: Float[Array, "*rows inputs"]) -> Int[Array, "*rows"]:
        """The argmax of each row of the product."""
        ids = self.argmax_by_kernel(x)
        return vocab.argmax(self(x)) if ids is None else ids

    def argmax_by_kernel(self, x: Float[Array, "*rows inputs"]) -> Int[Array, "*rows"] | None:
        """`argmax_logits` where a kernel finds it without the product in memory; else None."""
        return None if self.bias is not None else vocab.argmax_logits(x, self.kernel[...])


def joint_tiled_products(
    x: Float[Array, "*rows inputs"], layers: Sequence[nnx.Module], norm: "RMSNorm | None" = None
) -> tuple[Float[Array, "*rows outputs"], ...] | None:
    """What layers with matrices in tiles make of `x`, in one call; None where one has others.

    Between calls threads wait for each other.

    Args:
      norm: of `x` before the products, in the same call; None where there is none.
    """
    linears = [layer for layer in layers if isinstance(layer, Linear)]
    kernels = [layer.kernel[...] for layer in linears]
    if len(kernels) < len(layers) or len({w.dtype for w in kernels}) > 1:
        return None
    if any(layout_of_matrix(w) != "tiles" for w in kernels):
        return None
    first = None
    if norm is not None and (first := norm_of_kernel(norm, x)) is None:
        x = norm(x)
    results = products_of_tiles(x.reshape(-1, x.shape[-1]), kernels, first)
    products = (y.reshape(*x.shape[:-1], -1) for y in results)
    return tuple(layer.add_bias(y) for layer, y in zip(linears, products, strict=True))


def normalize(x: Float[Array, "*rows D"], eps: float) -> Float[Array, "*rows D"]:
    """Scales to root mean square 1 along the last axis; in float32, whatever `x` is."""
    y = with_one_axis_of_rows(x).astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).reshape(x.shape)


class RMSNorm(nnx.Module):
    """Normalizes in float32, rounds to the input's dtype, then scales.

    As modeling_llama.py in transformers 5.23 does.
    """

    def __init__(self, dim: int, eps: float, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(dim, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        rows = with_one_axis_of_rows(x)
        y = along_last(self.scale[...], rows) * normalize(rows, self.eps).astype(x.dtype)
        return y.reshape(x.shape)


class LateRMSNorm(RMSNorm):
    """Scales in float32 as well, and rounds last; in bfloat16 the numbers are not `RMSNorm`'s.

    As modeling_gpt_oss.py and modeling_gemma4.py in transformers 5.23 do.
    """

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        rows = with_one_axis_of_rows(x)
        scale = along_last(self.scale[...].astype(jnp.float32), rows)
        return (scale * normalize(rows, self.eps)).astype(x.dtype).reshape(x.shape)


def norm_of_kernel(norm: RMSNorm, x: Float[Array, "*rows D"]) -> Norm | None:
    """The norm as kernels for a CPU take it; None where they do not compute what the layer does.

    In float32 both kinds of norm are the same.
    """
    if x.dtype != jnp.float32 or type(norm) not in (RMSNorm, LateRMSNorm):
        return None
    return Norm(norm.scale[...], norm.eps)


class Embedding(nnx.Module):
    """One row of the table a token, in the dtype of activations.

    For decoding on a CPU the table may be in the tiles of its transpose (`matrix_layouts`).
    """

    def __init__(self, vocab: int, dim: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.table = normal(rngs, (vocab, dim), dtype)

    def __call__(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        table = self.table[...]
        return embedding_rows.read(table, tokens) if table.ndim == 4 else _rows(table, tokens)


@jax.custom_jvp
def _rows(table: Float[Array, "V D"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """`table[tokens]`, in the dtype of activations.

    XLA reads rows of a bfloat16 table on a CPU after it has converted all of it to float32, which
    is kept through the decoding loop: twice the table's memory. It reads rows of integers as they
    are, but copies the table, too.
    """
    dtype = activation_dtype(table.dtype)
    if table.dtype != jnp.bfloat16 or dtype == table.dtype:
        return table[tokens].astype(dtype)
    if embedding_rows.can_read(table):
        return embedding_rows.read(table, tokens)
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits[tokens], jnp.bfloat16).astype(dtype)


@_rows.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    (table, tokens), (d_table, _) = primals, tangents
    rows = _rows(table, tokens)
    return rows, d_table[tokens].astype(rows.dtype)


class MLP(nnx.Module):
    """Gated MLP: `down(act(gate(x)) * up(x))`."""

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        bias: bool = False,
        act: Callable = jax.nn.silu,
    ):
        self.gate = Linear(dim, mlp_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear(dim, mlp_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(mlp_dim, dim, bias=bias, dtype=dtype, rngs=rngs)
        self.act = act

    def __call__(
        self, x: Float[Array, "B T D"], norm: RMSNorm | None = None
    ) -> Float[Array, "B T D"]:
        """The output for `x`, or for `norm(x)`, which a kernel may compute beside the products."""
        gate_and_up = joint_tiled_products(x, (self.gate, self.up), norm)
        if gate_and_up is None:
            x = x if norm is None else norm(x)
            gate_and_up = self.gate(x), self.up(x)
        gate, up = gate_and_up
        y = None
        if (activation := NAMES_OF_ACTIVATIONS.get(self.act)) and isinstance(self.down, Linear):
            y = self.down.product_of_gate(gate, up, activation)
        return self.down(self.act(gate) * up) if y is None else y


def soft_cap(logits: Float[Array, "*rows V"], cap: float | None) -> Float[Array, "*rows V"]:
    """Logits squeezed into -cap .. cap by tanh (Gemma); None leaves them."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation, `gelu_pytorch_tanh` in a config.json."""
    return jax.nn.gelu(x, approximate=True)


# what kernels call them (`tiled_products.ACTIVATIONS`); an MLP with others computes its gate itself
NAMES_OF_ACTIVATIONS: dict[Callable, str] = {jax.nn.silu: "silu", gelu_tanh: "gelu_tanh"}
