"""Attention of a short block of queries over a long cache in Triton: split along the cache, merged by log-sum-exp.

Bound by reading the cache once: 8 rows x 4,096 slots x 4 heads x 128 in bfloat16 are 67 MB, 15.6 us at the 4.3 TB/s that a copy
reaches on an H200. So all queries of a KV head, (K + 1) tokens times its query heads, share one pass over its keys; a row reads
what its own length and window say, and no more; and the cache is cut into stretches so that every multiprocessor has a part.
Stretches begin at the same slots for one query and for a block of them: a row's sums are grouped alike in plain decoding and in
verifying. A prompt has queries enough to fill the GPU, and its cache is cut less or not at all.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.launch import Gpu, Launch, Launcher, gpu, on_gpu

BLOCK = 64  # tokens that decoding may verify at once; more are a prompt's


@triton.jit
def kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    held_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    B: tl.constexpr,
    T: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    BQ: tl.constexpr,
    BS: tl.constexpr,
    BH: tl.constexpr,
):
    """Query tile of one row and KV head over one stretch of SPAN slots. WINDOW 0: none. RING: `held` says what lies in a slot.

    Tiles of the same keys are neighbours in the grid, and so find them in the L2 cache. One stretch alone is the whole softmax.
    """
    R: tl.constexpr = N // G
    b = tl.program_id(1) // G
    g = tl.program_id(1) % G
    split = tl.program_id(2)
    row = tl.program_id(0) * BQ + tl.arange(0, BQ)  # token * R + head of the group
    h = tl.arange(0, BH)
    real = row < T * R
    head = g * R + row % R
    at = (b * T + row // R) * N + head
    position = tl.load(position_ptr + b * T + row // R, mask=real, other=-1)
    if RING:
        low = 0
        high = S
    else:
        high = tl.minimum(tl.max(position, 0) + 1, S)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(tl.min(tl.where(real, position, S), 0) - WINDOW + 1, 0) // BS * BS
    begin = tl.maximum(low, split * SPAN)
    end = tl.minimum(high, (split + 1) * SPAN)
    top = tl.full((BQ,), -1e30, tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BH), tl.float32)
    needed = row < tl.where(begin < end, T * R, 0)
    q = tl.load(
        q_ptr + at[:, None].to(tl.int64) * H + h[None, :],
        mask=needed[:, None] & (h[None, :] < H),
        other=0.0,
    )
    base = (b * G + g).to(tl.int64) * S
    for start in range(begin, end, BS):
        s = start + tl.arange(0, BS)
        there = s < end
        inside = there[:, None] & (h[None, :] < H)
        k = tl.load(k_ptr + (base + s)[:, None] * H + h[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + (base + s)[:, None] * H + h[None, :], mask=inside, other=0.0)
        x = tl.dot(q, k.to(q.dtype).T) * (SCALE * 1.4426950408889634)  # exp2 below
        if SCALED:
            x *= tl.load(k_scale_ptr + base + s, mask=there, other=0.0)[None, :]
        if RING:
            held = tl.load(held_ptr + b * S + s, mask=there, other=-1)
        else:
            held = tl.where(there, s, -1)
        seen = (held[None, :] >= 0) & (held[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= held[None, :] > position[:, None] - WINDOW
        x = tl.where(seen, x, float("-inf"))  # top stays finite: no NaN where a row sees nothing
        higher = tl.maximum(top, tl.max(x, 1))
        p = tl.exp2(x - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        if SCALED:
            p *= tl.load(v_scale_ptr + base + s, mask=there, other=0.0)[None, :]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None])
        top = higher
    if SPLITS == 1:
        if SINKS:
            sink = (
                tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            )
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            acc *= shrink[:, None]
            total = total * shrink + tl.exp2(sink - higher)
        y = acc / tl.maximum(total, 1e-30)[:, None]
        tl.store(
            out_ptr + at[:, None].to(tl.int64) * H + h[None, :],
            y.to(out_ptr.dtype.element_ty),
            mask=real[:, None] & (h[None, :] < H),
        )
    else:
        some = tl.maximum(total, 1e-30)
        out = (split * B * T * N + at).to(tl.int64)
        tl.store(
            lse_ptr + out,
            tl.where(total > 0, (top + tl.log2(some)) * 0.6931471805599453, -1e30),
            mask=real,
        )
        wrote = real & (total > 0)  # `merge_kernel` reads nothing else
        tl.store(
            out_ptr + out[:, None] * H + h[None, :],
            acc / some[:, None],
            mask=wrote[:, None] & (h[None, :] < H),
        )


@triton.jit
def merge_kernel(
    part_ptr,
    lse_ptr,
    sink_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    """Parts of M softmaxes [SPLITS M H] with their log-sum-exps [SPLITS M], M = tokens * heads, in one pass: the whole ones [M H]."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    h = tl.arange(0, BH)
    real = row < M
    if SINKS:
        top = tl.load(sink_ptr + row % N, mask=real, other=0.0).to(tl.float32)
        total = tl.full((BR,), 1.0, tl.float32)
    else:
        top = tl.full((BR,), -1e30, tl.float32)
        total = tl.zeros((BR,), tl.float32)
    acc = tl.zeros((BR, BH), tl.float32)
    for split in range(SPLITS):
        at = (split * M + row).to(tl.int64)
        lse = tl.load(lse_ptr + at, mask=real, other=-1e30)
        some = lse > -1e29
        part = tl.load(
            part_ptr + at[:, None] * H + h[None, :],
            mask=some[:, None] & (h[None, :] < H),
            other=0.0,
        )
        higher = tl.maximum(top, lse)
        shrink = tl.exp(top - higher)
        share = tl.where(some, tl.exp(lse - higher), 0.0)
        acc = acc * shrink[:, None] + part * share[:, None]
        total = total * shrink + share
        top = higher
    y = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(
        out_ptr + row[:, None].to(tl.int64) * H + h[None, :],
        y.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (h[None, :] < H),
    )


def tiles(tokens: int, rows: int, batch: int, slots: int, head_dim: int, gpu: Gpu) -> dict:
    """`rows` queries of `tokens` tokens a KV head, `batch` of those; tiles of slots are small for wide heads, for shared memory's sake.

    For a block of decoding the stretch follows from the batch and the cache alone. A part of it costs 8 bytes a query and number
    of a head, written and read, beside 4 bytes a slot and number: so it is long where there are parts enough. Of a prompt there
    are not more parts than multiprocessors: a few megabytes, where stretches of 1,024 were gigabytes.
    """
    most = 32 if head_dim > 256 else 64 if head_dim > 128 and gpu.shared < 200_000 else 128
    bq = min(most, max(16, 1 << (rows - 1).bit_length()))  # 64 rows of 512 spill
    bs = 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16
    prompt = tokens > BLOCK
    each = -(-slots * batch * (-(-rows // bq) if prompt else 1) // gpu.cores)
    span = max(128, 1 << (each - 1).bit_length())
    span = span if prompt else min(1024, span)
    few = bq <= 64 and head_dim <= 256 and bq * head_dim <= 8192
    return {
        "bq": bq,
        "bs": bs,
        "span": span,
        "warps": 4 if few else 8,
        "stages": 2 if head_dim > 256 or bq == most == 64 else 3,
    }


def attend(
    q,
    k,
    v,
    positions,
    held,
    *,
    window,
    scale,
    sinks,
    k_scale=None,
    v_scale=None,
    start: Launcher = on_gpu,
    **overrides,
) -> jax.Array:
    """As `attention.reference`, but a query that sees nothing gives zeros. `overrides` of `tiles` are for measuring."""
    B, T, N, H = q.shape
    G, S = k.shape[1:3]
    how = tiles(T, T * (N // G), B * G, S, H, gpu()) | overrides
    splits, nothing = (
        -(-S // how["span"]),
        jnp.zeros(1, jnp.float32),
    )  # in the place of arrays that the kernel will not read
    ring, non_16bit_reason = held is not None, max(16, 1 << (H - 1).bit_length())
    shape = (B, T, N, H)
    alone = jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct((1,), jnp.float32)
    parts = (
        jax.ShapeDtypeStruct((splits, *shape), jnp.float32),
        jax.ShapeDtypeStruct((splits, *shape[:3]), jnp.float32),
    )
    sink = nothing if sinks is None else sinks
    out, lse = start(
        Launch(
            kernel=kernel,
            inputs=(
                q,
                k,
                v,
                positions.astype(jnp.int32),
                jnp.broadcast_to(held, (B, S)).astype(jnp.int32)
                if ring
                else jnp.zeros(1, jnp.int32),
                nothing if k_scale is None else k_scale,
                nothing if v_scale is None else v_scale,
                sink,
            ),
            outputs=alone if splits == 1 else parts,
            grid=(-(-(T * (N // G)) // how["bq"]), B * G, splits),
            constants=dict(
                B=B,
                T=T,
                N=N,
                G=G,
                S=S,
                H=H,
                SCALE=float(scale),
                WINDOW=window or 0,
                RING=ring,
                SCALED=k_scale is not None,
                SINKS=sinks is not None,
                SPAN=how["span"],
                SPLITS=splits,
                BQ=how["bq"],
                BS=how["bs"],
                BH=non_16bit_reason,
            ),
            warps=how["warps"],
            stages=how["stages"],
        )
    )
    if splits == 1:
        return out
    M, rows = B * T * N, max(1, 512 // non_16bit_reason)
    merge = Launch(
        kernel=merge_kernel,
        inputs=(out, lse, sink),
        outputs=(alone[0],),
        grid=(-(-M // rows),),
        constants=dict(
            M=M, N=N, H=H, SPLITS=splits, SINKS=sinks is not None, BR=rows, BH=non_16bit_reason
        ),
        warps=4,
        stages=1,
    )
    return start(merge)[0]
