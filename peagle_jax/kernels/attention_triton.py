"""Attention of a short block of queries over a long cache in Triton: split along the cache, merged by log-sum-exp.

Bound by reading the cache once: 8 rows x 4,096 slots x 4 heads x 128 in bfloat16 are 67 MB, 15.6 us at the 4.3 TB/s that a copy
reaches on an H200. So all queries of a KV head, (K + 1) tokens times its query heads, share one pass over its keys; a row reads
what its own length and window say, and no more; and the cache is split so that every multiprocessor has a part.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.launch import Launch, Start, gpu, on_gpu


@triton.jit
def kernel(
    q_ptr, k_ptr, v_ptr, position_ptr, held_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    B: tl.constexpr, T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, RING: tl.constexpr, SCALED: tl.constexpr, SPLITS: tl.constexpr,
    BQ: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Query tile of one row and KV head over one split. WINDOW 0: none. RING: `held` says what lies in a slot, otherwise its own."""
    R: tl.constexpr = N // G
    b = tl.program_id(0) // G
    g = tl.program_id(0) % G
    split = tl.program_id(1)
    row = tl.program_id(2) * BQ + tl.arange(0, BQ)  # token * R + head of the group
    h = tl.arange(0, BH)
    real = row < T * R
    at = (b * T + row // R) * N + g * R + row % R
    q = tl.load(q_ptr + at[:, None].to(tl.int64) * H + h[None, :], mask=real[:, None] & (h[None, :] < H), other=0.0)
    position = tl.load(position_ptr + b * T + row // R, mask=real, other=-1)
    if RING:
        low = 0
        high = S
    else:
        high = tl.minimum(tl.max(position, 0) + 1, S)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(tl.min(tl.where(real, position, S), 0) - WINDOW + 1, 0) // BS * BS
    span = tl.cdiv(tl.cdiv(high - low, SPLITS), BS) * BS
    begin = low + split * span
    end = tl.minimum(begin + span, high)
    base = (b * G + g).to(tl.int64) * S
    top = tl.full((BQ,), -1e30, tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BH), tl.float32)
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
    some = tl.maximum(total, 1e-30)
    out = (split * B * T * N + at).to(tl.int64)
    tl.store(out_ptr + out[:, None] * H + h[None, :], acc / some[:, None], mask=real[:, None] & (h[None, :] < H))
    tl.store(lse_ptr + out, tl.where(total > 0, (top + tl.log2(some)) * 0.6931471805599453, -1e30), mask=real)


def tiles(rows: int, batch: int, slots: int, head_dim: int, cores: int) -> dict:
    """`rows` queries a KV head, `batch` of those; the cache's tile is small where heads are wide, for shared memory's sake."""
    bq = min(32 if head_dim > 256 else 128, max(16, 1 << (rows - 1).bit_length()))  # 64 rows of 512 spill
    bs = 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16
    programs = batch * -(-rows // bq)
    splits = min(max(1, -(-cores // programs)), max(1, slots // (4 * bs)))
    return {"bq": bq, "bs": bs, "splits": splits, "warps": 4 if bq <= 64 and head_dim <= 256 else 8, "stages": 3 if head_dim <= 256 else 2}


def attend(q, k, v, positions, held, *, window, scale, sinks, k_scale=None, v_scale=None, start: Start = on_gpu, **overrides) -> jax.Array:
    """As `attention.reference`, but a query that sees nothing gives zeros. `overrides` of `tiles` are for measuring."""
    B, T, N, H = q.shape
    G, S = k.shape[1:3]
    how = tiles(T * (N // G), B * G, S, H, gpu().cores) | overrides
    splits, nothing = how["splits"], jnp.zeros(1, jnp.float32)  # in the place of arrays that the kernel will not read
    ring = held is not None
    launch = Launch(
        kernel=kernel,
        inputs=(
            q, k, v, positions.astype(jnp.int32), jnp.broadcast_to(held, (B, S)).astype(jnp.int32) if ring else jnp.zeros(1, jnp.int32),
            nothing if k_scale is None else k_scale, nothing if v_scale is None else v_scale,
        ),
        outputs=(jax.ShapeDtypeStruct((splits, B, T, N, H), jnp.float32), jax.ShapeDtypeStruct((splits, B, T, N), jnp.float32)),
        grid=(B * G, splits, -(-(T * (N // G)) // how["bq"])),
        constants=dict(
            B=B, T=T, N=N, G=G, S=S, H=H, SCALE=float(scale), WINDOW=window or 0, RING=ring, SCALED=k_scale is not None, SPLITS=splits,
            BQ=how["bq"], BS=how["bs"], BH=max(16, 1 << (H - 1).bit_length()),
        ),
        warps=how["warps"],
        stages=how["stages"],
    )  # fmt: skip
    out, lse = start(launch)
    return merge(out, lse, sinks).astype(q.dtype)


def merge(out, lse, sinks) -> jax.Array:
    """Parts of one softmax [P B T N H] with their log-sum-exps [P B T N] -> the whole [B T N H]."""
    top = lse.max(axis=0)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32), top.shape)
        top = jnp.maximum(top, sinks)
    share = jnp.exp(lse - top[None])
    total = share.sum(axis=0) + (0 if sinks is None else jnp.exp(sinks - top))
    return (out * share[..., None]).sum(axis=0) / total[..., None]
