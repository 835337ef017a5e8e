"""Output matrices in Triton: tiles of logits stay in registers, XLA merges what they leave.

A few numbers a row and tile go to memory. Decoding is bound by reading the matrix (4096 x 152,000:
290 us in bfloat16, half in FP8, on an H200). Training is bound by arithmetic, and there the gain is
memory.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

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
    """Tile [BV BM] of w.T @ x.T in float32; WK and WV are the matrix's strides along K and V."""
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
def argmax(x, best, BV: tl.constexpr):
    """The first row of each column that holds `best`, the column's largest number.

    `tl.argmax`, which carries indices along, spills on sm_100.
    """
    return tl.min(tl.where(x == best[None, :], tl.arange(0, BV)[:, None], BV), 0)


@triton.jit
def topk_kernel(
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
    """The TOP largest logits and the log-sum-exp of each row, within one tile of the vocabulary.

    Program (t, m) takes tokens t * BV and on of the vocabulary, and rows m * BM and on. The
    vocabulary is the fastest axis: in decoding all rows fit one tile, and each part of the matrix
    is read by one program only.
    """
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
        index = argmax(x, best, BV)
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
def tile_of_program(VOCAB_TILES: tl.constexpr, ROW_TILES: tl.constexpr):
    """(tile of the vocabulary, tile of rows) of a program, for grids of one axis.

    Eight tiles of rows are a group, whose hidden states the L2 cache holds. Within a group the tile
    of rows is the faster index: the group passes over the whole vocabulary, so that each part of
    the matrix is read once for eight tiles, before the next group begins.
    """
    pid = tl.program_id(0)
    first = pid // (8 * VOCAB_TILES) * 8
    group = tl.minimum(ROW_TILES - first, 8)
    return pid % (8 * VOCAB_TILES) // group, first + pid % (8 * VOCAB_TILES) % group


@triton.jit
def distill_losses_kernel(
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
    """What both losses need of one tile: BV tokens of the vocabulary for BM rows.

    `tile_of_program` says which tile. Both logits of a tile are in registers at once. Stored are,
    for each row and tile: the student's largest logit and log-sum-exp; the teacher's; the sum of
    exp(teacher - its largest) * (teacher - student); the student's logit at the teacher's argmax;
    and both argmaxes.
    """
    tile, row_tile = tile_of_program(TILES, (P + BM - 1) // BM)
    v = tile * BV + tl.arange(0, BV)
    m = row_tile * BM + tl.arange(0, BM)
    inside = v[:, None] < V
    s = logits(x_ptr, w_ptr, m, v, P, D, V, WK, WV, BM, BV, BK)
    t = logits(tx_ptr, tw_ptr, m, v, P, E, V, TK, TV, BM, BV, BK)
    if CAP > 0:
        t = capped(t, CAP)
    gap = t - s
    s = tl.where(inside, s, float("-inf"))
    t = tl.where(inside, t, float("-inf"))
    s_top, t_top = tl.max(s, 0), tl.max(t, 0)
    s_index, t_index = argmax(s, s_top, BV), argmax(t, t_top, BV)
    share = tl.exp(t - t_top[None, :])
    at = m * TILES + tile
    real = m < P
    step: tl.constexpr = P * TILES
    # Sums are computed where they are stored: together, before all stores, they spill on sm_100.
    tl.store(number_ptr + at, s_top, mask=real)
    s_lse = s_top + tl.log(tl.sum(tl.exp(s - s_top[None, :]), 0))
    tl.store(number_ptr + step + at, s_lse, mask=real)
    tl.store(number_ptr + 2 * step + at, t_top, mask=real)
    tl.store(number_ptr + 3 * step + at, t_top + tl.log(tl.sum(share, 0)), mask=real)
    tl.store(number_ptr + 4 * step + at, tl.sum(tl.where(inside, share * gap, 0.0), 0), mask=real)
    is_best = tl.arange(0, BV)[:, None] == t_index[None, :]
    tl.store(number_ptr + 5 * step + at, tl.sum(tl.where(is_best, s, 0.0), 0), mask=real)
    tl.store(id_ptr + at, tile * BV + s_index, mask=real)
    tl.store(id_ptr + step + at, tile * BV + t_index, mask=real)


@triton.jit
def logit_grads_kernel(
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
    """The gradient in the student's logits: one tile of BV tokens of the vocabulary and BM rows.

    `tile_of_program` says which tile. Nothing was kept of the first pass but a few numbers a row,
    so both logits are computed again.

    `row_ptr` [4 P]: the student's log-sum-exp, the teacher's, the weight of KL, the weight of cross
    entropy. `best_ptr`: the teacher's argmax, counted from the first token of this chunk.
    """
    tile, row_tile = tile_of_program((V + BV - 1) // BV, (P + BM - 1) // BM)
    v = tile * BV + tl.arange(0, BV)
    m = row_tile * BM + tl.arange(0, BM)
    real = m < P
    s = logits(x_ptr, w_ptr, m, v, P, D, V, WK, WV, BM, BV, BK)
    t = logits(tx_ptr, tw_ptr, m, v, P, E, V, TK, TV, BM, BV, BK)
    if CAP > 0:
        t = capped(t, CAP)
    q = tl.exp(s - tl.load(row_ptr + m, mask=real, other=0.0)[None, :])
    p = tl.exp(t - tl.load(row_ptr + P + m, mask=real, other=0.0)[None, :])
    best = tl.load(best_ptr + m, mask=real, other=-1)
    hard = tl.where(v[:, None] == best[None, :], 1.0, 0.0)
    d = tl.load(row_ptr + 2 * P + m, mask=real, other=0.0)[None, :] * (q - p)
    d += tl.load(row_ptr + 3 * P + m, mask=real, other=0.0)[None, :] * (q - hard)
    out = out_ptr + m[None, :].to(tl.int64) * V + v[:, None]
    tl.store(out, d.to(out_ptr.dtype.element_ty), mask=real[None, :] & (v[:, None] < V))


def tile_config(rows: int) -> dict[str, int]:
    """Tile sizes and pipeline of `topk`."""
    bm = min(128, max(16, triton.next_power_of_2(rows)))
    return {"bm": bm, "bv": 128, "bk": 64, "warps": 8 if bm == 128 else 4, "stages": 3}


# two tiles of 128 x 128 logits at once spill
DISTILL_TILES = {"bm": 64, "bv": 128, "bk": 64, "warps": 8, "stages": 3}
LOGIT_GRADS_TILES = {"bm": 128, "bv": 128, "bk": 64, "warps": 8, "stages": 3}


def topk(
    x: jax.Array,
    w: jax.Array,
    k: int,
    scale: jax.Array | None = None,
    *,
    vocab_first: bool = False,
    start: Launcher = on_gpu,
    **overrides: int,
) -> TopK:
    """As `vocab.reference`.

    Args:
      start: executes a launch.
      overrides: of `tile_config`, for measuring.
    """
    M, K = x.shape
    if vocab_first:
        V, stride_k, stride_v = w.shape[0], 1, K
    else:
        V, stride_k, stride_v = w.shape[1], w.shape[1], 1
    tiles = tile_config(M) | overrides
    vocab_tiles = triton.cdiv(V, tiles["bv"])
    shape = (M, vocab_tiles, k)
    launch = Launch(
        kernel=topk_kernel,
        inputs=(x, w, jnp.zeros(1, jnp.float32) if scale is None else scale),
        outputs=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape[:2], jnp.float32),
        ),
        grid=(vocab_tiles, triton.cdiv(M, tiles["bm"])),
        constants=dict(
            M=M,
            K=K,
            V=V,
            WK=stride_k,
            WV=stride_v,
            SCALED=scale is not None,
            TOP=k,
            TILES=vocab_tiles,
            BM=tiles["bm"],
            BV=tiles["bv"],
            BK=tiles["bk"],
        ),
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    values, ids, lse = start(launch)
    # top_k is stable: of equal logits the earlier tile comes first, and so the lower id
    best, where = jax.lax.top_k(values.reshape(M, -1), k)
    best_ids = jnp.take_along_axis(ids.reshape(M, -1), where, axis=1)
    return TopK(best, best_ids, jax.nn.logsumexp(lse, axis=1))


def distill_losses(
    x: jax.Array,
    w: jax.Array,
    teacher_x: jax.Array,
    teacher_w: jax.Array,
    cap: float | None,
    start: Launcher = on_gpu,
    **overrides: int,
) -> DistillLoss:
    """As `vocab.distill_losses_reference`; `overrides` are of DISTILL_TILES."""
    P = x.shape[0]
    tiles = DISTILL_TILES | overrides
    vocab_tiles = triton.cdiv(w.shape[1], tiles["bv"])
    launch = Launch(
        kernel=distill_losses_kernel,
        inputs=(x, w, teacher_x, teacher_w),
        outputs=(
            jax.ShapeDtypeStruct((6, P, vocab_tiles), jnp.float32),
            jax.ShapeDtypeStruct((2, P, vocab_tiles), jnp.int32),
        ),
        grid=(vocab_tiles * triton.cdiv(P, tiles["bm"]),),
        constants=_constants(x, w, teacher_x, teacher_w, cap, tiles) | {"TILES": vocab_tiles},
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    (s_top, s_lse, t_top, t_lse, gaps, at_best), (s_id, t_id) = start(launch)
    lse, teacher_lse = jax.nn.logsumexp(s_lse, axis=1), jax.nn.logsumexp(t_lse, axis=1)
    kl = (jnp.exp(t_top - teacher_lse[:, None]) * gaps).sum(axis=1) - teacher_lse + lse

    def at(rows, tile):
        return jnp.take_along_axis(rows, tile[:, None], axis=1)[:, 0]

    best_tile = jnp.argmax(t_top, axis=1)
    return DistillLoss(
        kl,
        lse - at(at_best, best_tile),
        at(s_id, jnp.argmax(s_top, axis=1)),
        at(t_id, best_tile),
        lse,
        teacher_lse,
    )


def logit_grads(
    x: jax.Array,
    w: jax.Array,
    teacher_x: jax.Array,
    teacher_w: jax.Array,
    cap: float | None,
    losses: DistillLoss,
    first: int,
    kl: jax.Array,
    cross_entropy: jax.Array,
    start: Launcher = on_gpu,
    **overrides: int,
) -> jax.Array:
    """As `vocab.logit_grads_reference`; `overrides` are of LOGIT_GRADS_TILES."""
    P, W = x.shape[0], w.shape[1]
    tiles = LOGIT_GRADS_TILES | overrides
    launch = Launch(
        kernel=logit_grads_kernel,
        inputs=(
            x,
            w,
            teacher_x,
            teacher_w,
            jnp.stack([losses.student_lse, losses.teacher_lse, kl, cross_entropy]),
            losses.teacher - first,
        ),
        outputs=(jax.ShapeDtypeStruct((P, W), x.dtype),),
        grid=(triton.cdiv(W, tiles["bv"]) * triton.cdiv(P, tiles["bm"]),),
        constants=_constants(x, w, teacher_x, teacher_w, cap, tiles),
        warps=tiles["warps"],
        stages=tiles["stages"],
    )
    return start(launch)[0]


def _constants(x, w, teacher_x, teacher_w, cap: float | None, tiles: dict[str, int]) -> dict:
    """Constants that both kernels of the losses have."""
    P, D = x.shape
    E, V = teacher_x.shape[1], w.shape[1]
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
        BM=tiles["bm"],
        BV=tiles["bv"],
        BK=tiles["bk"],
    )
