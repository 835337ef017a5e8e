"""Writes new keys and values into a cache in one launch, which is also what bounds it.

XLA needs two launches in bfloat16 and six in float8.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.cache_write import CacheArrays
from peagle_jax.kernels.fp8_matmul_triton import quantized
from peagle_jax.kernels.launch import Launch, Launcher, on_gpu


@triton.jit
def write_heads(
    new_ptr,
    cache_ptr,
    scale_ptr,
    source,
    inside,
    real,
    row,
    slot,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALED: tl.constexpr,
    BH: tl.constexpr,
):
    """Writes all heads of one token: from offsets `source` of the new ones to rows `row` [B G]."""
    x = tl.load(new_ptr + source, mask=inside, other=0.0)
    place = row.to(tl.int64) * S + slot
    if SCALED:
        # NaN goes into the scale, because kernels that read float8 numbers know none
        nan = tl.sum(tl.where(x == x, 0.0, x.to(tl.float32)), 1)
        x, scale = quantized(x)
        scale += nan
        tl.store(scale_ptr + place, scale, mask=real)
    tl.store(
        cache_ptr + place[:, None] * H + tl.arange(0, BH)[None, :],
        x.to(cache_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def write_kernel(
    new_k_ptr,
    new_v_ptr,
    slot_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    T: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALED: tl.constexpr,
    BG: tl.constexpr,
    BH: tl.constexpr,
):
    """Program t writes token t of all B * T: its G heads are one tile [BG BH].

    The cache's arrays are changed in place, and are not read.
    """
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token)
    # a token without a slot has no heads to write
    heads = tl.where((slot >= 0) & (slot < S), G, 0)
    g = tl.arange(0, BG)
    real = g < heads
    inside = real[:, None] & (tl.arange(0, BH) < H)[None, :]
    source = (token.to(tl.int64) * G + g)[:, None] * H + tl.arange(0, BH)[None, :]
    row = token // T * G + g
    write_heads(new_k_ptr, k_ptr, k_scale_ptr, source, inside, real, row, slot, S, H, SCALED, BH)
    write_heads(new_v_ptr, v_ptr, v_scale_ptr, source, inside, real, row, slot, S, H, SCALED, BH)


def write(
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    cache: CacheArrays,
    start: Launcher = on_gpu,
) -> CacheArrays:
    """As `cache_write.reference`."""
    B, T, G, H = k.shape
    scaled = len(cache) == 4
    no_scale = jnp.zeros(1, jnp.float32)
    arrays = cache if scaled else (*cache, no_scale, no_scale)
    launch = Launch(
        kernel=write_kernel,
        inputs=(k, v, slots.astype(jnp.int32), *arrays),
        outputs=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache),
        grid=(B * T,),
        constants=dict(
            T=T,
            G=G,
            S=cache[0].shape[2],
            H=H,
            SCALED=scaled,
            BG=triton.next_power_of_2(G),
            BH=triton.next_power_of_2(H),
        ),
        input_output_aliases={3 + i: i for i in range(len(cache))},
    )
    return start(launch)
