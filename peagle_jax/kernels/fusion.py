"""Multi-layer feature fusion in one go: several taps, a norm over all or over each, and the matrix; no concatenation in memory."""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.kernels import fp8_matmul
from peagle_jax.kernels.choose import choose, non_16bit_reason
from peagle_jax.kernels.fp8_matmul import BLOCK, Fp8Matrix

Norm = Literal["none", "whole", "per_tap"]


def reference(
    aux_hidden_states: Sequence[Float[Array, "M E"]] | Float[Array, "M T E"],
    w: Float[Array, "A D"] | Fp8Matrix,
    gain: Float[Array, " A"] | None,
    norm: Norm,
    eps: float,
) -> Float[Array, "M D"]:
    """`rms_norm(concat(taps)) @ w`, sums and norms in float32, in the dtype of the taps.

    Args:
      taps: apart, or beside each other in one array.
      w: in the dtype of the taps; or FP8, [D A]: the taps times the gain are then quantised, a scale a row and 128 inputs.
      gain: of the norm, or of the norms one after the other; None where there is none.
      norm: over all taps together, over each, or none.
    """
    x = (
        aux_hidden_states
        if isinstance(aux_hidden_states, jax.Array)
        else jnp.stack(aux_hidden_states, axis=1)
    )
    (T, E), dtype = x.shape[1:], x.dtype
    x = x.astype(jnp.float32)
    mean = jnp.mean(x * x, axis=(1, 2) if norm == "whole" else 2, keepdims=True)
    factor = jnp.ones_like(mean) if norm == "none" else jax.lax.rsqrt(mean + eps)
    if gain is not None:
        x = x * gain.astype(jnp.float32).reshape(1, T, E)
    if isinstance(
        w, Fp8Matrix
    ):  # quantised before the norm's factor, which a whole tap shares: so a kernel needs one pass
        parts = []
        for i in range(T):
            values, scale = fp8_matmul.quantize_rows(x[:, i], blocks=True)
            here = slice(i * E, (i + 1) * E)
            w_scale = w.scale[:, i * E // BLOCK : (i + 1) * E // BLOCK] if w.blocks else w.scale
            parts.append(
                fp8_matmul.reference(values, scale, w.values[:, here], w_scale, jnp.float32)
            )
        y = jnp.stack(parts, axis=1)
    else:
        y = jnp.einsum(
            "MtE,tED->MtD",
            x.astype(w.dtype),
            w.reshape(T, E, -1),
            preferred_element_type=jnp.float32,
        )
    return (y * factor).sum(axis=1).astype(dtype)


def triton(aux_hidden_states, w, gain, norm, eps):
    from peagle_jax.kernels import fusion_triton

    return fusion_triton.fuse(aux_hidden_states, w, gain, norm, eps)


FORMS = {"reference": reference, "triton": triton}


def unsupported(aux_hidden_states, w) -> str | None:
    """Why the fast form cannot take these; None when it can."""
    joint = isinstance(aux_hidden_states, jax.Array)
    count, E = (
        aux_hidden_states.shape[1:]
        if joint
        else (len(aux_hidden_states), aux_hidden_states[0].shape[1])
    )
    if isinstance(w, Fp8Matrix) and E % BLOCK:
        return f"in FP8 taps must be multiples of {BLOCK} wide, and these have {E}"
    if wrong := non_16bit_reason(
        *([aux_hidden_states] if joint else aux_hidden_states),
        *([] if isinstance(w, Fp8Matrix) else [w]),
    ):
        return wrong
    return f"they take 4 taps at most, and there are {count}" if count > 4 else None


def fuse(aux_hidden_states, w, gain, norm: Norm, eps: float, *, form: str):
    """As `reference`, by a form of FORMS or "auto". The gradient is the reference's."""
    form = choose("fusion", form, FORMS, unsupported(aux_hidden_states, w))
    matrix = (w.values, w.scale) if isinstance(w, Fp8Matrix) else (w, None)
    return _fuse(aux_hidden_states, *matrix, gain, norm, eps, form)


def is_supported(aux_hidden_states, w) -> bool:
    """Whether "auto" takes a kernel for these here; otherwise a caller's own products may be better than the reference."""
    return choose("fusion", "auto", FORMS, unsupported(aux_hidden_states, w)) == "triton"


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _fuse(aux_hidden_states, w, scale, gain, norm, eps, form):
    return FORMS[form](
        aux_hidden_states, w if scale is None else Fp8Matrix(w, scale), gain, norm, eps
    )


def _forward(aux_hidden_states, w, scale, gain, norm, eps, form):
    return _fuse(aux_hidden_states, w, scale, gain, norm, eps, form), (
        aux_hidden_states,
        w,
        scale,
        gain,
    )


def _backward(norm, eps, form, kept, dy):
    aux_hidden_states, w, scale, gain = kept
    plain = w if scale is None else Fp8Matrix(w, scale).dequantized().T.astype(dy.dtype)
    dtaps, dw, dgain = jax.vjp(lambda *x: reference(*x, norm, eps), aux_hidden_states, plain, gain)[
        1
    ](dy)
    if scale is None:
        return dtaps, dw, None, dgain
    return (
        dtaps,
        jnp.zeros_like(w),
        jnp.zeros_like(scale),
        dgain,
    )  # straight through; FP8 weights are not trained


_fuse.defvjp(_forward, _backward)
