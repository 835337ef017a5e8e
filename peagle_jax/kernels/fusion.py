"""Multi-layer feature fusion in one go: several taps, a norm over all or over each, and the matrix; no concatenation in memory."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.kernels import fp8_matmul
from peagle_jax.kernels.choose import choose, wide
from peagle_jax.kernels.fp8_matmul import BLOCK, Fp8Matrix

Norm = Literal["none", "whole", "per_tap"]


def reference(
    taps: Sequence[Float[Array, "M E"]], w: Float[Array, "A D"] | Fp8Matrix, gain: Float[Array, " A"] | None, norm: Norm, eps: float
) -> Float[Array, "M D"]:
    """`rms_norm(concat(taps)) @ w`, sums and norms in float32, in the dtype of the taps.

    Args:
      w: in the dtype of the taps; or FP8, [D A]: the taps times the gain are then quantised, a scale a row and 128 inputs.
      gain: of the norm, or of the norms one after the other; None where there is none.
      norm: over all taps together, over each, or none.
    """
    M, E = taps[0].shape
    x = jnp.stack([tap.astype(jnp.float32) for tap in taps], axis=1)  # [M taps E]
    mean = jnp.mean(x * x, axis=(1, 2) if norm == "whole" else 2, keepdims=True)
    factor = jnp.ones_like(mean) if norm == "none" else jax.lax.rsqrt(mean + eps)
    if gain is not None:
        x = x * gain.astype(jnp.float32).reshape(1, len(taps), E)
    if isinstance(w, Fp8Matrix):  # quantised before the norm's factor, which a whole tap shares: so a kernel needs one pass
        parts = []
        for i in range(len(taps)):
            values, scale = fp8_matmul.quantise_rows(x[:, i], blocks=True)
            here = slice(i * E, (i + 1) * E)
            w_scale = w.scale[:, i * E // BLOCK : (i + 1) * E // BLOCK] if w.blocks else w.scale
            parts.append(fp8_matmul.reference(values, scale, w.values[:, here], w_scale, jnp.float32))
        y = jnp.stack(parts, axis=1)
    else:
        y = jnp.einsum("MtE,tED->MtD", x.astype(w.dtype), w.reshape(len(taps), E, -1), preferred_element_type=jnp.float32)
    return (y * factor).sum(axis=1).astype(taps[0].dtype)


def triton(taps, w, gain, norm, eps):
    from peagle_jax.kernels import fusion_triton

    return fusion_triton.fuse(taps, w, gain, norm, eps)


FORMS = {"reference": reference, "triton": triton}


def unsupported(taps, w) -> str | None:
    """Why the fast form cannot take these; None when it can."""
    if isinstance(w, Fp8Matrix) and taps[0].shape[1] % BLOCK:
        return f"in FP8 taps must be multiples of {BLOCK} wide, and these have {taps[0].shape[1]}"
    if wrong := wide(*taps, *([] if isinstance(w, Fp8Matrix) else [w])):
        return wrong
    return f"they take 4 taps at most, and there are {len(taps)}" if len(taps) > 4 else None


def fuse(taps, w, gain, norm: Norm, eps: float, *, form: str):
    """As `reference`, by a form of FORMS or "auto"."""
    return FORMS[choose("fusion", form, FORMS, unsupported(taps, w))](taps, w, gain, norm, eps)
