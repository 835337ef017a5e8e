"""Norms of the heads of queries and keys, and their rotation, in one launch for both.

XLA launches four kernels for them, two of which wait for the other two.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels.choose import choose, non_16bit_reason

# Many rows keep a GPU busy, and launches then cost little beside them.
MAX_ROWS = 64


def reference(
    q: Float[Array, "n N H"],
    k: Float[Array, "n G H"],
    q_gain: Float[Array, " H"],
    k_gain: Float[Array, " H"],
    positions: Int[Array, " n"],
    frequencies: Float[Array, " h"],
    *,
    eps: float,
    scale: float,
) -> tuple[Float[Array, "n N H"], Float[Array, "n G H"]]:
    """(queries, keys): normalized to a root mean square of 1, times the gain, and rotated.

    Norms are float32 and rounded to the dtype of `q` before the gain, as are cosines and sines.

    Args:
      positions: of the tokens.
      frequencies: radians per token of each of the H/2 pairs x[i], x[i + H/2].
      scale: of cosines and sines.
    """
    angle = positions[:, None, None].astype(jnp.float32) * frequencies[None, None]
    cos, sin = (scale * f(angle) for f in (jnp.cos, jnp.sin))

    def rotated(x, gain):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
        a, b = jnp.split(gain[None, None] * y.astype(x.dtype), 2, axis=-1)
        c, s = cos.astype(x.dtype), sin.astype(x.dtype)
        return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    return rotated(q, q_gain), rotated(k, k_gain)


def triton(
    q: Float[Array, "n N H"],
    k: Float[Array, "n G H"],
    q_gain: Float[Array, " H"],
    k_gain: Float[Array, " H"],
    positions: Int[Array, " n"],
    frequencies: Float[Array, " h"],
    *,
    eps: float,
    scale: float,
) -> tuple[Float[Array, "n N H"], Float[Array, "n G H"]]:
    """As `reference`, but products within the rotation are float32 and rounded once."""
    from peagle_jax.kernels import norm_rotate_triton

    return norm_rotate_triton.rotate(
        q, k, q_gain, k_gain, positions, frequencies, eps=eps, scale=scale
    )


FORMS = {"reference": reference, "triton": triton}


def rotate(
    q: Float[Array, "n N H"],
    k: Float[Array, "n G H"],
    q_gain: Float[Array, " H"],
    k_gain: Float[Array, " H"],
    positions: Int[Array, " n"],
    frequencies: Float[Array, " h"],
    *,
    eps: float,
    scale: float,
) -> tuple[Float[Array, "n N H"], Float[Array, "n G H"]] | None:
    """As `reference`, where a kernel runs; None where the caller's own layers are to do it."""
    head_dim = q.shape[-1]
    reason = non_16bit_reason(q, k)
    if len(q) > MAX_ROWS:
        reason = f"{len(q)} tokens are enough work for separate launches"
    elif head_dim & (head_dim - 1) or head_dim < 2:
        reason = f"heads have {head_dim} numbers, which is no power of two"
    elif 2 * len(frequencies) != head_dim:
        reason = "only a part of each head is rotated"
    if choose("norm_rotate", "auto", FORMS, reason) == "reference":
        return None
    return _rotate(q, k, q_gain, k_gain, positions, frequencies, eps, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _rotate(q, k, q_gain, k_gain, positions, frequencies, eps, scale):
    return triton(q, k, q_gain, k_gain, positions, frequencies, eps=eps, scale=scale)


def _forward(q, k, q_gain, k_gain, positions, frequencies, eps, scale):
    args = q, k, q_gain, k_gain, positions, frequencies
    return _rotate(*args, eps, scale), args


def _backward(eps, scale, args, grads):
    """By the reference: few rows are not worth a kernel."""
    positions, frequencies = args[4:]

    def of_floats(q, k, q_gain, k_gain):
        return reference(q, k, q_gain, k_gain, positions, frequencies, eps=eps, scale=scale)

    _, vjp = jax.vjp(of_floats, *args[:4])
    return *vjp(grads), None, None


_rotate.defvjp(_forward, _backward)
