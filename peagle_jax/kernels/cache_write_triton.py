"""New keys and values into a cache in one launch, where XLA needs two in bfloat16 and six in float8. Bound by that launch."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.fp8_matmul_triton import quantized
from peagle_jax.kernels.launch import Launch, Launcher, on_gpu


@triton.jit
def put(
    new_ptr,
    held_ptr,
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
    """Heads of one token: `source` in the new ones, `row` of heads in the cache."""
    x = tl.load(new_ptr + source, mask=inside, other=0.0)
    place = row.to(tl.int64) * S + slot
    if SCALED:
        x, scale = quantized(x)
        tl.store(scale_ptr + place, scale, mask=real)
    tl.store(
        held_ptr + place[:, None] * H + tl.arange(0, BH)[None, :],
        x.to(held_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def kernel(
    new_k_ptr,
    new_v_ptr,
    slot_ptr,
    old_k_ptr,
    old_v_ptr,
    old_k_scale_ptr,
    old_v_scale_ptr,
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
    """All heads of one token. The old arrays are the new ones, and are not read."""
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token)
    there = tl.where((slot >= 0) & (slot < S), G, 0)
    g = tl.arange(0, BG)
    real = g < there
    inside = real[:, None] & (tl.arange(0, BH) < H)[None, :]
    source = (token.to(tl.int64) * G + g)[:, None] * H + tl.arange(0, BH)[None, :]
    row = token // T * G + g
    put(new_k_ptr, k_ptr, k_scale_ptr, source, inside, real, row, slot, S, H, SCALED, BH)
    put(new_v_ptr, v_ptr, v_scale_ptr, source, inside, real, row, slot, S, H, SCALED, BH)


def write(k, v, slot, held, start: Launcher = on_gpu):
    """As `cache_write.reference`."""
    B, T, G, H = k.shape
    scaled, nothing = len(held) == 4, jnp.zeros(1, jnp.float32)
    old = held if scaled else (*held, nothing, nothing)
    launch = Launch(
        kernel=kernel,
        inputs=(k, v, slot.astype(jnp.int32), *old),
        outputs=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old),
        grid=(B * T,),
        constants=dict(
            T=T,
            G=G,
            S=held[0].shape[2],
            H=H,
            SCALED=scaled,
            BG=triton.next_power_of_2(G),
            BH=triton.next_power_of_2(H),
        ),
        updates={3 + i: i for i in range(len(held))},
    )
    return tuple(start(launch)[: len(held)])
