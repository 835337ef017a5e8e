"""Norms of heads and their rotation on a CPU, in C++ (native/head_rotation.h).

XLA makes four to six operations of them, each of which takes longer to begin than to compute.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from peagle_jax.kernels import native_code


def can_rotate(x: Float[Array, "*rows H"]) -> bool:
    """Whether the kernel can do it: on one CPU, in float32, with half heads of whole vectors."""
    if x.dtype != jnp.float32 or x.shape[-1] % 2 or not native_code.is_callable_here():
        return False
    return native_code.fills_vectors(x.shape[-1] // 2)


def rotate(
    x: Float[Array, "n N H"],
    gain: Float[Array, " H"] | None,
    cos: Float[Array, "n h"],
    sin: Float[Array, "n h"],
    eps: float = 0.0,
) -> Float[Array, "n N H"]:
    """Heads of n tokens, normalized to a root mean square of 1, times the gain, and rotated.

    A head's numbers depend on no other head.

    Args:
      gain: None where heads have no norm.
      cos, sin: of the angle of each of the H/2 pairs x[i], x[i + H/2].
      eps: of the norm.
    """
    gain = jnp.zeros(0) if gain is None else gain
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    call = native_code.function("peagle_rotate_heads", result)
    tables = (table.astype(jnp.float32) for table in (cos, sin))
    return call(x, gain.astype(jnp.float32), *tables, eps=np.float32(eps))
