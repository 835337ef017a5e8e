"""Feature fusion in Triton: one pass over the taps for the norm and the product both, operands swapped as in `fp8_matmul_triton`.

Bound by reading the matrix: three taps of 4096 and a head of 4096 are 101 MB in bfloat16, 23.5 us at an H200's 4.3 TB/s, half in FP8.
A norm's factor is one number a row, and so comes after the product. Where there are fewer tiles than multiprocessors every
tap is cut into stretches; sums and sums of squares of those are put together by XLA, in one small fused kernel.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.kernels.fp8_matmul_triton import quantized
from peagle_jax.kernels.launch import Gpu, Launch, Launcher, gpu, on_gpu


@triton.jit
def kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    gain_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    square_ptr,
    M: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    AUX_LAYER_IDS: tl.constexpr,
    JOINT: tl.constexpr,
    GAIN: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    W: tl.constexpr,
    SPAN: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
):
    """JOINT: the taps are [M TAPS E], and all pointers are theirs. NORM: "none", "whole", "per_tap".

    W: "plain" [A D], "row" or "block" (FP8, [D A]).

    WHOLE: one stretch is all of a tap, and the result is stored. Otherwise sums of stretch s [S M D], or [S TAPS M D] with a norm
    a tap, and sums of squares [S M], [S TAPS M].
    """
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    begin = split * SPAN
    end = tl.minimum(begin + SPAN, E)
    inside = (m[None, :] < M) & (d[:, None] < D)
    one = m < tl.where(
        tl.program_id(0) == 0, M, 0
    )  # of all programs with these rows the first stores their squares
    A: tl.constexpr = AUX_LAYER_IDS * E
    acc = tl.zeros((BD, BM), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for tap in tl.static_range(AUX_LAYER_IDS):
        x_ptr = a_ptr if tap == 0 else (b_ptr if tap == 1 else (c_ptr if tap == 2 else d_ptr))
        x_row = x_ptr + m[:, None].to(tl.int64) * (A if JOINT else E) + (tap * E if JOINT else 0)
        part = tl.zeros((BD, BM), tl.float32)
        if NORM == "per_tap":
            squares = tl.zeros((BM,), tl.float32)
        for at in range(begin, end, BE):
            e = at + tl.arange(0, BE)
            x = tl.load(x_row + e[None, :], mask=(m[:, None] < M) & (e[None, :] < E), other=0.0)
            if NORM != "none":
                non_16bit_reason = x.to(tl.float32)
                squares += tl.sum(non_16bit_reason * non_16bit_reason, 1)
            if GAIN:
                gained = (
                    x.to(tl.float32)
                    * tl.load(gain_ptr + tap * E + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
                )
                x = gained.to(x.dtype) if W == "plain" else gained  # FP8 is quantised from float32
            if W == "plain":
                w_at = w_ptr + (tap * E + e[None, :]).to(tl.int64) * D + d[:, None]
                w = tl.load(w_at, mask=(d[:, None] < D) & (e[None, :] < E), other=0.0)
                part = tl.dot(w, x.T, part)
            else:
                w_at = w_ptr + d[:, None].to(tl.int64) * A + tap * E + e[None, :]
                w = tl.load(w_at, mask=(d[:, None] < D) & (e[None, :] < E), other=0.0)
                values, scale = quantized(x)
                y = tl.dot(w, values.T) * scale[None, :]
                if W == "block":
                    y *= tl.load(
                        w_scale_ptr + (d // 128) * (A // 128) + (tap * E + at) // 128,
                        mask=d < D,
                        other=0.0,
                    )[:, None]
                part += y
        if NORM == "per_tap":
            if WHOLE:
                part *= tl.rsqrt(squares / E + EPS)[None, :]
            else:
                if W == "row":
                    part *= tl.load(w_scale_ptr + d, mask=d < D, other=0.0)[:, None]
                row = (split * AUX_LAYER_IDS + tap) * M + m
                tl.store(square_ptr + row, squares, mask=one)
                tl.store(out_ptr + row[None, :].to(tl.int64) * D + d[:, None], part, mask=inside)
        acc += part
    if WHOLE or NORM != "per_tap":
        if W == "row":
            acc *= tl.load(w_scale_ptr + d, mask=d < D, other=0.0)[:, None]
        if NORM == "whole":
            if WHOLE:
                acc *= tl.rsqrt(squares / A + EPS)[None, :]
            else:
                tl.store(square_ptr + split * M + m, squares, mask=one)
        row = split * M + m
        tl.store(
            out_ptr + row[None, :].to(tl.int64) * D + d[:, None],
            acc.to(out_ptr.dtype.element_ty),
            mask=inside,
        )


def tiles(M: int, E: int, D: int, fp8: bool, gpu: Gpu) -> dict:
    """A tap is cut while tiles are few; not where rows are many, whose sums would take more than the matrix."""
    bm, be = min(64, max(16, 1 << (M - 1).bit_length())), 128 if fp8 else 64
    programs, splits = -(-D // 64) * -(-M // bm), 1
    while M <= 64 and programs * splits < 2 * gpu.cores and E // (2 * splits) >= 4 * be:
        splits *= 2
    warps, stages = 8 if fp8 and bm == 64 else 4, 4 if gpu.shared > 200_000 else 3
    return {"bm": bm, "bd": 64, "be": be, "splits": splits, "warps": warps, "stages": stages}


def fuse(aux_hidden_states, w, gain, norm, eps, start: Launcher = on_gpu, **overrides) -> jax.Array:
    """As `fusion.reference`. `overrides` of `tiles` are for measuring."""
    joint, fp8 = isinstance(aux_hidden_states, jax.Array), isinstance(w, Fp8Matrix)
    M, T, E = (
        aux_hidden_states.shape
        if joint
        else (len(aux_hidden_states[0]), len(aux_hidden_states), aux_hidden_states[0].shape[1])
    )
    dtype = aux_hidden_states.dtype if joint else aux_hidden_states[0].dtype
    D = w.values.shape[0] if fp8 else w.shape[1]
    how = tiles(M, E, D, fp8, gpu()) | overrides
    nothing = jnp.zeros(1, jnp.float32)
    span = -(-E // (how["splits"] * how["be"])) * how["be"]
    splits = -(-E // span)
    shape = () if splits == 1 else (splits, T, M) if norm == "per_tap" else (splits, M)
    out = (
        jax.ShapeDtypeStruct((*shape, D), jnp.float32)
        if shape
        else jax.ShapeDtypeStruct((M, D), dtype)
    )
    launch = Launch(
        kernel=kernel,
        inputs=(
            *[aux_hidden_states if joint else aux_hidden_states[min(i, T - 1)] for i in range(4)],
            nothing if gain is None else gain,
            w.values if fp8 else w,
            w.scale if fp8 else nothing,
        ),
        outputs=(
            out,
            jax.ShapeDtypeStruct(shape if shape and norm != "none" else (1,), jnp.float32),
        ),
        grid=(-(-D // how["bd"]), -(-M // how["bm"]), splits),
        constants=dict(
            M=M,
            D=D,
            E=E,
            AUX_LAYER_IDS=T,
            JOINT=joint,
            GAIN=gain is not None,
            NORM=norm,
            EPS=float(eps),
            W="plain" if not fp8 else "block" if w.blocks else "row",
            SPAN=span,
            WHOLE=splits == 1,
            BM=how["bm"],
            BD=how["bd"],
            BE=how["be"],
        ),
        warps=how["warps"],
        stages=how["stages"],
    )
    y, squares = start(launch)
    if splits == 1:
        return y
    y = y.sum(axis=0)
    if norm != "none":
        y *= jax.lax.rsqrt(squares.sum(axis=0) / (E if norm == "per_tap" else E * T) + eps)[
            ..., None
        ]
    return (y.sum(axis=0) if norm == "per_tap" else y).astype(dtype)
