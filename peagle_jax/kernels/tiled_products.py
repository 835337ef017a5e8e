"""Products with matrices in tiles on a CPU, in C++ (native/tiled_products.h).

XLA packs a matrix anew in every product, which takes longer than to multiply a few rows by it. The
kernel reads one that is stored as registers want it: both cores of an AMD EPYC multiply 8 rows by
13.7 million bfloat16 numbers in 1.0 ms, where XLA takes 3.4 (LOG.md, 2026-11-29, late).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import native_code

# Columns of a tile; `kColumns` of native/tiled_products.h.
COLUMNS = 32
# Of the gate of an MLP; their numbers are `Activation`'s of native/row_preparation.h.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class Norm(NamedTuple):
    """An RMS norm of rows, in float32: what normalized rows are multiplied by, and its epsilon."""

    gain: Float[Array, " K"]
    eps: float


def to_tiles(w: Float[Array, "K N"]) -> Float[Array, "tiles parts columns numbers"]:
    """The same matrix as [N/32 K/P 32 P]: of each 32 columns all rows, P of a column together.

    P is 2 in bfloat16 and 1 in float32. `can_be_tiled` says of which matrices there are tiles.
    """
    part = 4 // w.dtype.itemsize
    inputs, outputs = w.shape
    return w.reshape(inputs // part, part, outputs // COLUMNS, COLUMNS).transpose(2, 0, 3, 1)


def from_tiles(w: Float[Array, "tiles parts columns numbers"]) -> Float[Array, "K N"]:
    """The matrix as `Linear` has it."""
    return w.transpose(1, 3, 0, 2).reshape(w.shape[1] * w.shape[3], -1)


def can_be_tiled(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Whether there are tiles for a matrix of shape [K, N]."""
    inputs, outputs = shape
    is_known = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32)
    part = max(1, 4 // jnp.dtype(dtype).itemsize)
    return is_known and outputs > 0 and inputs % part == 0 and outputs % COLUMNS == 0


def tiled_products(
    x: Float[Array, "R K"],
    matrices: Sequence[Float[Array, "_ parts columns numbers"]],
    norm: Norm | None = None,
) -> list[Float[Array, "R _"]]:
    """`x @ w` of each matrix in tiles, in one call, as float32.

    A row's numbers depend neither on the other rows nor on the other matrices.

    Args:
      x: float32. With bfloat16 matrices it is rounded to bfloat16.
      matrices: all of one dtype.
      norm: of the rows, before they are rounded and multiplied.
    """
    gain, eps = norm or Norm(jnp.zeros(0), 0.0)
    call = native_code.function("peagle_tiled_products", _products(x, matrices))
    return call(x, gain.astype(jnp.float32), *matrices, eps=np.float32(eps))


def gated_products(
    gate: Float[Array, "R K"],
    up: Float[Array, "R K"],
    matrices: Sequence[Float[Array, "_ parts columns numbers"]],
    activation: str,
) -> list[Float[Array, "R _"]]:
    """`(activation(gate) * up) @ w`, as `tiled_products` multiplies.

    Args:
      activation: of ACTIVATIONS.
    """
    call = native_code.function("peagle_gated_products", _products(gate, matrices))
    return call(gate, up, *matrices, activation=np.int32(ACTIVATIONS[activation]))


def _products(x: Array, matrices: Sequence[Array]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((len(x), len(w) * COLUMNS), jnp.float32) for w in matrices]


def tiled_product_of(
    x: Float[Array, "R K"],
    matrices: Float[Array, "E tiles parts columns numbers"],
    number: Int[Array, ""],
) -> Float[Array, "R N"]:
    """`x @ w` of one of E matrices in tiles, as `tiled_products` multiplies.

    XLA would copy the matrix before it multiplies by it.

    Args:
      number: of the matrix; one that is out of range is that of the nearest.
    """
    result = jax.ShapeDtypeStruct((len(x), matrices.shape[1] * COLUMNS), jnp.float32)
    return native_code.function("peagle_tiled_product_of", result)(x, matrices, number)
