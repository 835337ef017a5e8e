"""Fusion of the target's aux hidden states in one go: a norm over all or over each, and the matrix.

The aux hidden states of several layers become one vector a token, as `fc` does, without their
concatenation in memory.
"""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.kernels import fp8_matmul
from peagle_jax.kernels.choose import choose, non_16bit_reason
from peagle_jax.kernels.fp8_matmul import BLOCK, Fp8Matrix

# over all layers together, or over each layer's hidden states
Norm = Literal["none", "whole", "per_layer"]
# apart [M E] each, or beside each other in one array [M layers E]
AuxHiddenStates = Sequence[Float[Array, "M E"]] | Float[Array, "M layers E"]
MAX_LAYERS = 4  # that the kernel takes
# Tiles of 64 x 64 read their operands from the L2 cache at 5.5 TB/s, which is 176 TFLOP/s: a row of
# 6144 x 2048 takes 0.14 us. A library's product takes 0.03 us at 790 TFLOP/s, after 4 us for norms
# and a concatenation; both read the matrix in 6 us. They are even at some 70 rows.
MAX_AUTO_ROWS = 64


def reference(
    aux_hidden_states: AuxHiddenStates,
    w: Float[Array, "A D"] | Fp8Matrix,
    gain: Float[Array, " A"] | None,
    norm: Norm,
    eps: float,
) -> Float[Array, "M D"]:
    """`rms_norm(concat(aux_hidden_states)) @ w`, in their dtype; sums and norms are float32.

    Args:
      w: in the dtype of the aux hidden states; or FP8, [D A]: then the aux hidden states times the
        gain are quantized, with a scale a row and 128 inputs.
      gain: of the norm, or of the norms one after the other; None where there is none.
      norm: over all layers together ("whole"), over each ("per_layer"), or none.
    """
    if isinstance(aux_hidden_states, jax.Array):
        x = aux_hidden_states
    else:
        x = jnp.stack(aux_hidden_states, axis=1)
    (layers, E), dtype = x.shape[1:], x.dtype
    x = x.astype(jnp.float32)
    mean = jnp.mean(x * x, axis=(1, 2) if norm == "whole" else 2, keepdims=True)
    factor = jnp.ones_like(mean) if norm == "none" else jax.lax.rsqrt(mean + eps)
    if gain is not None:
        x = x * gain.astype(jnp.float32).reshape(1, layers, E)
    # The norm's factor is one number for a row of a layer, and so comes after the product: a kernel
    # then needs one pass, and quantizes before it knows the norm.
    if isinstance(w, Fp8Matrix):
        y = jnp.stack([_fp8_part(x[:, i], w, i) for i in range(layers)], axis=1)
    else:
        y = jnp.einsum(
            "MtE,tED->MtD",
            x.astype(w.dtype),
            w.reshape(layers, E, -1),
            preferred_element_type=jnp.float32,
        )
    return (y * factor).sum(axis=1).astype(dtype)


def _fp8_part(x: Float[Array, "M E"], w: Fp8Matrix, i: int) -> Float[Array, "M D"]:
    """The product of the i-th layer's aux hidden states with its columns of an FP8 matrix."""
    E = x.shape[1]
    values, scale = fp8_matmul.quantize_rows(x, blocks=True)
    w_scale = w.scale
    if w.blocks:
        w_scale = w_scale[:, i * E // BLOCK : (i + 1) * E // BLOCK]
    columns = w.values[:, i * E : (i + 1) * E]
    return fp8_matmul.reference(values, scale, columns, w_scale, jnp.float32)


def triton(
    aux_hidden_states: AuxHiddenStates,
    w: Float[Array, "A D"] | Fp8Matrix,
    gain: Float[Array, " A"] | None,
    norm: Norm,
    eps: float,
) -> Float[Array, "M D"]:
    """As `reference`, by the Triton kernel."""
    from peagle_jax.kernels import fusion_triton

    return fusion_triton.fuse(aux_hidden_states, w, gain, norm, eps)


FORMS = {"reference": reference, "triton": triton}


def unsupported(
    aux_hidden_states: AuxHiddenStates, w: Float[Array, "A D"] | Fp8Matrix
) -> str | None:
    """Why the fast form cannot take these operands; None when it can."""
    if isinstance(aux_hidden_states, jax.Array):
        arrays = [aux_hidden_states]
        layers, E = aux_hidden_states.shape[1:]
    else:
        arrays = list(aux_hidden_states)
        layers, E = len(aux_hidden_states), aux_hidden_states[0].shape[1]
    if not isinstance(w, Fp8Matrix):
        arrays.append(w)
    elif E % BLOCK:
        return f"in FP8 hidden states must be multiples of {BLOCK} wide, and these have {E}"
    if reason := non_16bit_reason(*arrays):
        return reason
    if layers > MAX_LAYERS:
        return f"they take {MAX_LAYERS} aux hidden state layers at most, and there are {layers}"
    return None


def fuse(
    aux_hidden_states: AuxHiddenStates,
    w: Float[Array, "A D"] | Fp8Matrix,
    gain: Float[Array, " A"] | None,
    norm: Norm,
    eps: float,
    *,
    form: str,
) -> Float[Array, "M D"]:
    """As `reference`, whose gradient every form has.

    Args:
      form: a name of FORMS, or "auto".

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    reason = unsupported(aux_hidden_states, w)
    if form == "auto":
        reason = reason or many_rows_reason(aux_hidden_states)
    form = choose("fusion", form, FORMS, reason)
    matrix = (w.values, w.scale) if isinstance(w, Fp8Matrix) else (w, None)
    return _fuse(aux_hidden_states, *matrix, gain, norm, eps, form)


def is_supported(aux_hidden_states: AuxHiddenStates, w: Float[Array, "A D"] | Fp8Matrix) -> bool:
    """Whether "auto" takes a kernel for these operands here.

    Where it does not, a caller's own products may be better than the reference.
    """
    reason = unsupported(aux_hidden_states, w) or many_rows_reason(aux_hidden_states)
    return choose("fusion", "auto", FORMS, reason) == "triton"


def many_rows_reason(aux_hidden_states: AuxHiddenStates) -> str | None:
    """Why "auto" takes no kernel for so many rows; None where it does."""
    x = aux_hidden_states if isinstance(aux_hidden_states, jax.Array) else aux_hidden_states[0]
    if len(x) <= MAX_AUTO_ROWS:
        return None
    return f"a library's product is faster for more than {MAX_AUTO_ROWS} rows"


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _fuse(aux_hidden_states, w, scale, gain, norm, eps, form):
    matrix = w if scale is None else Fp8Matrix(w, scale)
    return FORMS[form](aux_hidden_states, matrix, gain, norm, eps)


def _forward(aux_hidden_states, w, scale, gain, norm, eps, form):
    y = _fuse(aux_hidden_states, w, scale, gain, norm, eps, form)
    return y, (aux_hidden_states, w, scale, gain)


def _backward(norm, eps, form, residuals, dy):
    """The reference's gradient; straight through an FP8 matrix, which is not trained itself."""
    aux_hidden_states, w, scale, gain = residuals
    plain = w if scale is None else Fp8Matrix(w, scale).dequantized().T.astype(dy.dtype)

    def fuse_by_reference(aux_hidden_states, w, gain):
        return reference(aux_hidden_states, w, gain, norm, eps)

    _, vjp = jax.vjp(fuse_by_reference, aux_hidden_states, plain, gain)
    dx, dw, dgain = vjp(dy)
    if scale is None:
        return dx, dw, None, dgain
    return dx, jnp.zeros_like(w), jnp.zeros_like(scale), dgain


_fuse.defvjp(_forward, _backward)
