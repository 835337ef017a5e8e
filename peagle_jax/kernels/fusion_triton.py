"""Fusion in Triton: one pass over the aux hidden states for the norm and the product both.

It is bound by reading the matrix: three layers of 4096 and a head of 4096 are 101 MB in bfloat16,
23.5 us at an H200's 4.3 TB/s, and half of that in FP8. Operands are swapped as in
`fp8_matmul_triton`. A norm's factor is one number a row, and so comes after the product. Where
there are fewer tiles than multiprocessors, every layer's part is split; XLA puts the sums and the
sums of squares of the splits together, in one small fused kernel.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.kernels.fp8_matmul_triton import quantized
from peagle_jax.kernels.fusion import MAX_LAYERS, AuxHiddenStates, Norm
from peagle_jax.kernels.launch import Gpu, Launch, Launcher, gpu, on_gpu


@triton.jit
def fusion_kernel(
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
    LAYERS: tl.constexpr,
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
    """One tile [BD BM] of the fused states, over one split of every layer's part.

    Program (d, m, s) takes outputs d * BD and on and tokens m * BM and on. Of each layer it takes
    inputs s * SPAN and on, BE at a time, layer after layer. Outputs are the fastest axis: every
    weight is read by one program only while M fits one tile, and all programs side by side find
    the same tokens in the L2 cache.

    JOINT: the aux hidden states are one array [M LAYERS E], and a_ptr .. d_ptr all point to it.
    NORM: "none", "whole", "per_layer". W: "plain" [A D], "row" or "block" (FP8, [D A]).

    WHOLE: one split is all of a layer, and the result is stored. Otherwise it stores sums of split
    s [S M D], or with a norm a layer [S LAYERS M D], and sums of squares [S M] or [S LAYERS M].
    """
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    begin = split * SPAN
    end = tl.minimum(begin + SPAN, E)
    inside = (m[None, :] < M) & (d[:, None] < D)
    # all programs with these tokens have their squares, and the first one stores them
    stores_squares = m < tl.where(tl.program_id(0) == 0, M, 0)
    A: tl.constexpr = LAYERS * E
    acc = tl.zeros((BD, BM), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for layer in tl.static_range(LAYERS):
        if layer == 0:
            x_ptr = a_ptr
        elif layer == 1:
            x_ptr = b_ptr
        elif layer == 2:
            x_ptr = c_ptr
        else:
            x_ptr = d_ptr
        x_row = x_ptr + m[:, None].to(tl.int64) * (A if JOINT else E) + (layer * E if JOINT else 0)
        part = tl.zeros((BD, BM), tl.float32)
        if NORM == "per_layer":
            squares = tl.zeros((BM,), tl.float32)
        for at in range(begin, end, BE):
            e = at + tl.arange(0, BE)
            x = tl.load(x_row + e[None, :], mask=(m[:, None] < M) & (e[None, :] < E), other=0.0)
            if NORM != "none":
                x_float32 = x.to(tl.float32)
                squares += tl.sum(x_float32 * x_float32, 1)
            if GAIN:
                gain = tl.load(gain_ptr + layer * E + e, mask=e < E, other=0.0).to(tl.float32)
                scaled = x.to(tl.float32) * gain[None, :]
                # FP8 is quantized from float32
                x = scaled.to(x.dtype) if W == "plain" else scaled
            if W == "plain":
                w_at = w_ptr + (layer * E + e[None, :]).to(tl.int64) * D + d[:, None]
                w = tl.load(w_at, mask=(d[:, None] < D) & (e[None, :] < E), other=0.0)
                part = tl.dot(w, x.T, part)
            else:
                w_at = w_ptr + d[:, None].to(tl.int64) * A + layer * E + e[None, :]
                w = tl.load(w_at, mask=(d[:, None] < D) & (e[None, :] < E), other=0.0)
                values, scale = quantized(x)
                y = tl.dot(w, values.T) * scale[None, :]
                if W == "block":
                    block = (d // 128) * (A // 128) + (layer * E + at) // 128
                    y *= tl.load(w_scale_ptr + block, mask=d < D, other=0.0)[:, None]
                part += y
        if NORM == "per_layer":
            if WHOLE:
                part *= tl.rsqrt(squares / E + EPS)[None, :]
            else:
                if W == "row":
                    part *= tl.load(w_scale_ptr + d, mask=d < D, other=0.0)[:, None]
                row = (split * LAYERS + layer) * M + m
                tl.store(square_ptr + row, squares, mask=stores_squares)
                tl.store(out_ptr + row[None, :].to(tl.int64) * D + d[:, None], part, mask=inside)
        acc += part
    if WHOLE or NORM != "per_layer":
        if W == "row":
            acc *= tl.load(w_scale_ptr + d, mask=d < D, other=0.0)[:, None]
        if NORM == "whole":
            if WHOLE:
                acc *= tl.rsqrt(squares / A + EPS)[None, :]
            else:
                tl.store(square_ptr + split * M + m, squares, mask=stores_squares)
        row = split * M + m
        tl.store(
            out_ptr + row[None, :].to(tl.int64) * D + d[:, None],
            acc.to(out_ptr.dtype.element_ty),
            mask=inside,
        )


def tile_config(M: int, E: int, D: int, fp8: bool, gpu: Gpu) -> dict[str, int]:
    """Tile sizes, splits and pipeline.

    A layer's part is split while tiles are few. It is not split where rows are many, because their
    sums would take more memory than the matrix.
    """
    bm = min(64, max(16, triton.next_power_of_2(M)))
    bd = 64
    be = 128 if fp8 else 64
    num_tiles = triton.cdiv(D, bd) * triton.cdiv(M, bm)
    splits = 1
    while M <= 64 and num_tiles * splits < 2 * gpu.num_sms and E // (2 * splits) >= 4 * be:
        splits *= 2
    return {
        "bm": bm,
        "bd": bd,
        "be": be,
        "splits": splits,
        "warps": 8 if fp8 and bm == 64 else 4,
        "stages": 4 if gpu.shared_memory > 200_000 else 3,
    }


def fuse(
    aux_hidden_states: AuxHiddenStates,
    w: jax.Array | Fp8Matrix,
    gain: jax.Array | None,
    norm: Norm,
    eps: float,
    start: Launcher = on_gpu,
    **overrides: int,
) -> jax.Array:
    """As `fusion.reference`.

    Args:
      start: executes a launch.
      overrides: of `tile_config`, for measuring.
    """
    joint = isinstance(aux_hidden_states, jax.Array)
    if isinstance(aux_hidden_states, jax.Array):
        M, layers, E = aux_hidden_states.shape
        dtype = aux_hidden_states.dtype
        arrays = [aux_hidden_states] * MAX_LAYERS
    else:
        layers = len(aux_hidden_states)
        M, E = aux_hidden_states[0].shape
        dtype = aux_hidden_states[0].dtype
        # the kernel has four pointers; those past the last layer are not read
        arrays = [aux_hidden_states[min(i, layers - 1)] for i in range(MAX_LAYERS)]
    absent = jnp.zeros(1, jnp.float32)  # in the place of arrays that the kernel will not read
    if isinstance(w, Fp8Matrix):
        kind = "block" if w.blocks else "row"
        D, matrix, w_scale = w.values.shape[0], w.values, w.scale
    else:
        kind, D, matrix, w_scale = "plain", w.shape[1], w, absent
    tiles = tile_config(M, E, D, kind != "plain", gpu()) | overrides
    span = triton.cdiv(E, tiles["splits"] * tiles["be"]) * tiles["be"]
    splits = triton.cdiv(E, span)
    if splits == 1:
        out = jax.ShapeDtypeStruct((M, D), dtype)
        squares_shape = (1,)
    else:
        rows_shape = (splits, layers, M) if norm == "per_layer" else (splits, M)
        out = jax.ShapeDtypeStruct((*rows_shape, D), jnp.float32)
        squares_shape = (1,) if norm == "none" else rows_shape
    launch = Launch(
        kernel=fusion_kernel,
        inputs=(*arrays, absent if gain is None else gain, matrix, w_scale),
        outputs=(out, jax.ShapeDtypeStruct(squares_shape, jnp.float32)),
        grid=(triton.cdiv(D, tiles["bd"]), triton.cdiv(M, tiles["bm"]), splits),
        constants=dict(
            M=M,
            D=D,
            E=E,
            LAYERS=layers,
            JOINT=joint,
            GAIN=gain is not None,
            NORM=norm,
            EPS=float(eps),
            W=kind,
            SPAN=span,
            WHOLE=splits == 1,
            BM=tiles["bm"],
            BD=tiles["bd"],
            BE=tiles["be"],
        ),
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    y, squares = start(launch)
    if splits == 1:
        return y
    y = y.sum(axis=0)
    if norm != "none":
        mean = squares.sum(axis=0) / (E if norm == "per_layer" else E * layers)
        y *= jax.lax.rsqrt(mean + eps)[..., None]
    if norm == "per_layer":
        y = y.sum(axis=0)
    return y.astype(dtype)
