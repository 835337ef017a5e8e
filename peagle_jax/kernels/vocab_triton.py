"""Output matrices in Triton: tiles of logits stay in registers, a few numbers a row and tile go to memory, XLA merges them.

Decoding is bound by reading the matrix (4096 x 152,000: 290 us in bfloat16, half in FP8, on an H200); training by arithmetic, and
there the gain is memory.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.launch import Launch, Launcher, on_gpu
from peagle_jax.kernels.vocab import DistillLoss, TopK


@triton.jit
def logits(
    x_ptr,
    w_ptr,
    m,
    v,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WK: tl.constexpr,
    WV: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """Tile [BV BM] of w.T @ x.T in float32; the matrix's steps along K and V are WK and WV."""
    acc = tl.zeros((BV, BM), tl.float32)
    x_row = x_ptr + m[:, None].to(tl.int64) * K
    w_row = w_ptr + v[:, None].to(tl.int64) * WV
    for at in range(0, K, BK):
        k = at + tl.arange(0, BK)
        x = tl.load(x_row + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(
            w_row + k[None, :].to(tl.int64) * WK,
            mask=(v[:, None] < V) & (k[None, :] < K),
            other=0.0,
        )
        acc = tl.dot(w.to(x.dtype), x.T, acc)
    return acc


@triton.jit
def place(x, best, BV: tl.constexpr):
    """Row of each column's largest number, of equals the lowest; an argmax that carries indices along spills on sm_100."""
    return tl.min(tl.where(x == best[None, :], tl.arange(0, BV)[:, None], BV), 0)


@triton.jit
def peaks_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    value_ptr,
    id_ptr,
    lse_ptr,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WK: tl.constexpr,
    WV: tl.constexpr,
    SCALED: tl.constexpr,
    TOP: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    tile = tl.program_id(0)
    v = tile * BV + tl.arange(0, BV)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    x = logits(x_ptr, w_ptr, m, v, M, K, V, WK, WV, BM, BV, BK)
    if SCALED:
        x *= tl.load(scale_ptr + v, mask=v < V, other=0.0)[:, None]
    x = tl.where(v[:, None] < V, x, float("-inf"))
    top = tl.max(x, 0)
    at = m * TILES + tile
    tl.store(lse_ptr + at, top + tl.log(tl.sum(tl.exp(x - top[None, :]), 0)), mask=m < M)
    for i in tl.static_range(TOP):
        best = tl.max(x, 0)
        index = place(x, best, BV)
        tl.store(value_ptr + at * TOP + i, best, mask=m < M)
        tl.store(id_ptr + at * TOP + i, tile * BV + index, mask=m < M)
        x = tl.where(tl.arange(0, BV)[:, None] == index[None, :], float("-inf"), x)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), from exponentials that cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x) / CAP)
    y = CAP * (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def placed(COUNT: tl.constexpr, ROWS: tl.constexpr):
    """(tile of words, tile of rows) of a program: 8 tiles of rows, which the L2 cache holds, pass over all words before the next."""
    pid = tl.program_id(0)
    first = pid // (8 * COUNT) * 8
    here = tl.minimum(ROWS - first, 8)
    return pid % (8 * COUNT) // here, first + pid % (8 * COUNT) % here


@triton.jit
def distance_kernel(
    x_ptr,
    w_ptr,
    tx_ptr,
    tw_ptr,
    number_ptr,
    id_ptr,
    P: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    WK: tl.constexpr,
    WV: tl.constexpr,
    TK: tl.constexpr,
    TV: tl.constexpr,
    CAP: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """Of a row and tile: the student's top and log-sum-exp, the teacher's, the sum of exp(teacher - its top) * (teacher - student), and the
    student at the teacher's best."""
    tile, rows = placed(TILES, (P + BM - 1) // BM)
    v = tile * BV + tl.arange(0, BV)
    m = rows * BM + tl.arange(0, BM)
    inside = v[:, None] < V
    s = logits(x_ptr, w_ptr, m, v, P, D, V, WK, WV, BM, BV, BK)
    t = logits(tx_ptr, tw_ptr, m, v, P, E, V, TK, TV, BM, BV, BK)
    if CAP > 0:
        t = capped(t, CAP)
    gap = t - s
    s = tl.where(inside, s, float("-inf"))
    t = tl.where(inside, t, float("-inf"))
    s_top, t_top = tl.max(s, 0), tl.max(t, 0)
    s_index, t_index = place(s, s_top, BV), place(t, t_top, BV)
    share = tl.exp(t - t_top[None, :])
    at = m * TILES + tile
    ok = m < P
    step: tl.constexpr = P * TILES
    tl.store(number_ptr + at, s_top, mask=ok)
    tl.store(number_ptr + step + at, s_top + tl.log(tl.sum(tl.exp(s - s_top[None, :]), 0)), mask=ok)
    tl.store(number_ptr + 2 * step + at, t_top, mask=ok)
    tl.store(number_ptr + 3 * step + at, t_top + tl.log(tl.sum(share, 0)), mask=ok)
    tl.store(number_ptr + 4 * step + at, tl.sum(tl.where(inside, share * gap, 0.0), 0), mask=ok)
    chosen = tl.arange(0, BV)[:, None] == t_index[None, :]
    tl.store(number_ptr + 5 * step + at, tl.sum(tl.where(chosen, s, 0.0), 0), mask=ok)
    tl.store(id_ptr + at, tile * BV + s_index, mask=ok)
    tl.store(id_ptr + step + at, tile * BV + t_index, mask=ok)


@triton.jit
def slopes_kernel(
    x_ptr,
    w_ptr,
    tx_ptr,
    tw_ptr,
    row_ptr,
    best_ptr,
    out_ptr,
    P: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    WK: tl.constexpr,
    WV: tl.constexpr,
    TK: tl.constexpr,
    TV: tl.constexpr,
    CAP: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """row_ptr: student's log-sum-exp, teacher's, weight of KL, of cross entropy. best_ptr: the teacher's argmax within this stretch."""
    tile, rows = placed((V + BV - 1) // BV, (P + BM - 1) // BM)
    v = tile * BV + tl.arange(0, BV)
    m = rows * BM + tl.arange(0, BM)
    ok = m < P
    s = logits(x_ptr, w_ptr, m, v, P, D, V, WK, WV, BM, BV, BK)
    t = logits(tx_ptr, tw_ptr, m, v, P, E, V, TK, TV, BM, BV, BK)
    if CAP > 0:
        t = capped(t, CAP)
    q = tl.exp(s - tl.load(row_ptr + m, mask=ok, other=0.0)[None, :])
    p = tl.exp(t - tl.load(row_ptr + P + m, mask=ok, other=0.0)[None, :])
    hard = tl.where(v[:, None] == tl.load(best_ptr + m, mask=ok, other=-1)[None, :], 1.0, 0.0)
    d = tl.load(row_ptr + 2 * P + m, mask=ok, other=0.0)[None, :] * (q - p)
    d += tl.load(row_ptr + 3 * P + m, mask=ok, other=0.0)[None, :] * (q - hard)
    out = out_ptr + m[None, :].to(tl.int64) * V + v[:, None]
    tl.store(out, d.to(out_ptr.dtype.element_ty), mask=ok[None, :] & (v[:, None] < V))


def tiles(rows: int) -> dict:
    bm = min(128, max(16, 1 << (rows - 1).bit_length()))
    return {"bm": bm, "bv": 128, "bk": 64, "warps": 8 if bm == 128 else 4, "stages": 3}


def peaks(x, w, k, scale=None, *, by_word=False, start: Launcher = on_gpu, **overrides):
    """As `vocab.reference`."""
    M, K = x.shape
    V, WK, WV = (w.shape[0], 1, K) if by_word else (w.shape[1], w.shape[1], 1)
    how = tiles(M) | overrides
    count = -(-V // how["bv"])
    shape = (M, count, k)
    launch = Launch(
        kernel=peaks_kernel,
        inputs=(x, w, jnp.zeros(1, jnp.float32) if scale is None else scale),
        outputs=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape[:2], jnp.float32),
        ),
        grid=(count, -(-M // how["bm"])),
        constants=dict(
            M=M,
            K=K,
            V=V,
            WK=WK,
            WV=WV,
            SCALED=scale is not None,
            TOP=k,
            TILES=count,
            BM=how["bm"],
            BV=how["bv"],
            BK=how["bk"],
        ),
        warps=how["warps"],
        stages=how["stages"],
    )
    values, ids, lse = start(launch)
    best, where = jax.lax.top_k(
        values.reshape(M, -1), k
    )  # stable: of equals the earlier tile, and so the lower id
    return TopK(
        best, jnp.take_along_axis(ids.reshape(M, -1), where, axis=1), jax.nn.logsumexp(lse, axis=1)
    )


def distance(x, w, teacher_x, teacher_w, cap, start: Launcher = on_gpu, **overrides):
    """As `vocab.distance_reference`."""
    P = x.shape[0]
    how = {
        "bm": 64,
        "bv": 128,
        "bk": 64,
        "warps": 8,
        "stages": 3,
    } | overrides  # two of 128 x 128 spill
    count = -(-w.shape[1] // how["bv"])
    launch = Launch(
        kernel=distance_kernel,
        inputs=(x, w, teacher_x, teacher_w),
        outputs=(
            jax.ShapeDtypeStruct((6, P, count), jnp.float32),
            jax.ShapeDtypeStruct((2, P, count), jnp.int32),
        ),
        grid=(count * -(-P // how["bm"]),),
        constants=_constants(x, w, teacher_x, teacher_w, cap, how) | {"TILES": count},
        warps=how["warps"],
        stages=how["stages"],
    )
    (s_top, s_lse, t_top, t_lse, gaps, at_best), (s_id, t_id) = start(launch)
    lse, teacher_lse = jax.nn.logsumexp(s_lse, axis=1), jax.nn.logsumexp(t_lse, axis=1)
    kl = (jnp.exp(t_top - teacher_lse[:, None]) * gaps).sum(axis=1) - teacher_lse + lse

    def at(rows, tile):
        return jnp.take_along_axis(rows, tile[:, None], axis=1)[:, 0]

    best = jnp.argmax(t_top, axis=1)
    return DistillLoss(
        kl,
        lse - at(at_best, best),
        at(s_id, jnp.argmax(s_top, axis=1)),
        at(t_id, best),
        lse,
        teacher_lse,
    )


def slopes(
    x,
    w,
    teacher_x,
    teacher_w,
    cap,
    found,
    first,
    kl,
    cross_entropy,
    start: Launcher = on_gpu,
    **overrides,
) -> jax.Array:
    """As `vocab.slopes_reference`."""
    P, W = x.shape[0], w.shape[1]
    how = {"bm": 128, "bv": 128, "bk": 64, "warps": 8, "stages": 3} | overrides
    launch = Launch(
        kernel=slopes_kernel,
        inputs=(
            x,
            w,
            teacher_x,
            teacher_w,
            jnp.stack([found.student_lse, found.teacher_lse, kl, cross_entropy]),
            found.teacher - first,
        ),
        outputs=(jax.ShapeDtypeStruct((P, W), x.dtype),),
        grid=(-(-W // how["bv"]) * -(-P // how["bm"]),),
        constants=_constants(x, w, teacher_x, teacher_w, cap, how),
        warps=how["warps"],
        stages=how["stages"],
    )
    return start(launch)[0]


def _constants(x, w, teacher_x, teacher_w, cap, how) -> dict:
    (P, D), E, V = x.shape, teacher_x.shape[1], w.shape[1]
    return dict(
        P=P,
        D=D,
        E=E,
        V=V,
        WK=V,
        WV=1,
        TK=V,
        TV=1,
        CAP=float(cap or 0),
        BM=how["bm"],
        BV=how["bv"],
        BK=how["bk"],
    )
