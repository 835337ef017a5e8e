"""Norms and rotation of queries and keys in one Triton kernel.

It is bound by its launch: 36 heads of 128 numbers are 9 KB.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.launch import Launch, Launcher, on_gpu


@triton.jit
def rotate_kernel(
    q_ptr,
    k_ptr,
    q_gain_ptr,
    k_gain_ptr,
    position_ptr,
    frequency_ptr,
    q_out_ptr,
    k_out_ptr,
    N: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Program (i, t) takes head i of token t: a query's, or from N on a key's."""
    half: tl.constexpr = H // 2
    head = tl.program_id(0)
    token = tl.program_id(1)
    i = tl.arange(0, half)
    position = tl.load(position_ptr + token).to(tl.float32)
    angle = position * tl.load(frequency_ptr + i)
    if head < N:
        row = (token * N + head) * H
        rotated_row(q_ptr + row, q_gain_ptr, q_out_ptr + row, angle, half, H, EPS, SCALE)
    else:
        row = (token * G + head - N) * H
        rotated_row(k_ptr + row, k_gain_ptr, k_out_ptr + row, angle, half, H, EPS, SCALE)


@triton.jit
def rotated_row(
    x_ptr,
    gain_ptr,
    out_ptr,
    angle,
    half: tl.constexpr,
    H: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Normalizes, scales and rotates one head of one token."""
    i = tl.arange(0, half)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    a = tl.load(x_ptr + i).to(tl.float32)
    b = tl.load(x_ptr + half + i).to(tl.float32)
    factor = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / H + EPS)
    # what the layers round, in their order
    a_gain = tl.load(gain_ptr + i).to(tl.float32)
    b_gain = tl.load(gain_ptr + half + i).to(tl.float32)
    a = (a_gain * (a * factor).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    b = (b_gain * (b * factor).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    cos = (SCALE * tl.cos(angle)).to(dtype).to(tl.float32)
    sin = (SCALE * tl.sin(angle)).to(dtype).to(tl.float32)
    tl.store(out_ptr + i, (a * cos - b * sin).to(dtype))
    tl.store(out_ptr + half + i, (b * cos + a * sin).to(dtype))


def rotate(
    q: jax.Array,
    k: jax.Array,
    q_gain: jax.Array,
    k_gain: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    *,
    eps: float,
    scale: float,
    start: Launcher = on_gpu,
) -> tuple[jax.Array, jax.Array]:
    """As `norm_rotate.reference`.

    Args:
      start: executes a launch.
    """
    (n, N, H), G = q.shape, k.shape[1]
    launch = Launch(
        kernel=rotate_kernel,
        inputs=(q, k, q_gain, k_gain, positions.astype(jnp.int32), frequencies),
        outputs=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(k.shape, k.dtype),
        ),
        grid=(N + G, n),
        constants=dict(N=N, G=G, H=H, EPS=float(eps), SCALE=float(scale)),
        warps=1,
    )
    rotated_q, rotated_k = start(launch)
    return rotated_q, rotated_k
