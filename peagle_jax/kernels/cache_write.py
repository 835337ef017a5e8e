"""Keys and values of new tokens into a layer's cache; where it is float8, with a scale a token and head."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import fp8_matmul
from peagle_jax.kernels.choose import choose, non_16bit_reason

Held = tuple[
    Float[Array, "..."], ...
]  # keys and values [B G S H], and of float8 both scales [B G S]


def reference(
    k: Float[Array, "B T G H"], v: Float[Array, "B T G H"], slot: Int[Array, "B T"], held: Held
) -> Held:
    """`held` with token t of row b in slot `slot[b, t]`; tokens whose slot does not exist (S and more) are dropped."""
    rows = jnp.arange(k.shape[0])[:, None]
    new = (k, v)
    if len(held) == 4:
        (k, k_scale), (v, v_scale) = (fp8_matmul.scaled(x, axis=-1) for x in new)
        new = (k, v, k_scale, v_scale)
    return tuple(
        old.at[rows, :, slot].set(x.astype(old.dtype), mode="drop")
        for old, x in zip(held, new, strict=True)
    )


def triton(k, v, slot, held):
    from peagle_jax.kernels import cache_write_triton

    return cache_write_triton.write(k, v, slot, held)


FORMS = {"reference": reference, "triton": triton}


def write(k, v, slot, held, *, form: str = "auto") -> Held:
    """As `reference`, by a form of FORMS or "auto"."""
    return FORMS[choose("cache writing", form, FORMS, non_16bit_reason(k, v))](k, v, slot, held)
