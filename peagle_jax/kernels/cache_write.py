"""Writes keys and values of new tokens into a layer's cache.

A float8 cache gets one scale for each token and head.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import fp8_matmul
from peagle_jax.kernels.choose import choose, non_16bit_reason

# keys and values [B G S H]; where they are float8, then the scales of both [B G S]
CacheArrays = tuple[Float[Array, "..."], ...]


def reference(
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    slots: Int[Array, "B T"],
    cache: CacheArrays,
) -> CacheArrays:
    """The cache with token t of row b in slot `slots[b, t]`; slots of S and more are dropped."""
    rows = jnp.arange(k.shape[0])[:, None]
    new: CacheArrays = (k, v)
    if len(cache) == 4:
        k_values, k_scale = fp8_matmul.scaled(k, axis=-1)
        v_values, v_scale = fp8_matmul.scaled(v, axis=-1)
        new = (k_values, v_values, k_scale, v_scale)
    return tuple(
        old.at[rows, :, slots].set(x.astype(old.dtype), mode="drop")
        for old, x in zip(cache, new, strict=True)
    )


def triton(
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    slots: Int[Array, "B T"],
    cache: CacheArrays,
) -> CacheArrays:
    """As `reference`, in place: the Triton kernel."""
    from peagle_jax.kernels import cache_write_triton

    return cache_write_triton.write(k, v, slots, cache)


FORMS = {"reference": reference, "triton": triton}


def write(
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    slots: Int[Array, "B T"],
    cache: CacheArrays,
    *,
    form: str = "auto",
) -> CacheArrays:
    """As `reference`.

    Args:
      form: a name of FORMS, or "auto".

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    form = choose("cache writing", form, FORMS, non_16bit_reason(k, v))
    return FORMS[form](k, v, slots, cache)
