"""Rows of an embedding on a CPU, in C++ (native/embedding_rows.h).

XLA copies a whole bfloat16 table before it reads rows of it, once in each call of a program: as
float32, or as integers where it is read as such.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import native_code


def can_read(table: Float[Array, "..."]) -> bool:
    """Whether the kernel can do it: on one CPU, of whole words of 32 bits."""
    is_known = table.dtype in (jnp.bfloat16, jnp.float32)
    is_known = is_known and table.dtype.itemsize * _width(table) % 4 == 0
    return is_known and len(table) > 0 and native_code.is_callable_here()


def read(table: Float[Array, "..."], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows K"]:
    """`table[tokens]`, as float32. It has no gradient.

    Args:
      table: [V K], or in the tiles of its transpose (`tiled_products.to_tiles`).
      tokens: counted from the end where they are negative; one that is out of range is the
        nearest. XLA does the same.
    """
    width = _width(table)
    result = jax.ShapeDtypeStruct((tokens.size, width), jnp.float32)
    call = native_code.function("peagle_embedding_rows", result)
    return call(table, tokens.reshape(-1).astype(jnp.int32)).reshape(*tokens.shape, width)


def _width(table: Float[Array, "..."]) -> int:
    """Numbers of a row."""
    return table.shape[1] * (1 if table.ndim == 2 else table.shape[3])
