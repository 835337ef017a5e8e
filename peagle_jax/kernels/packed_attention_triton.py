"""COD training attention in Triton, forward and backward, without atomics: the same sums in the same order each time.

Bound by arithmetic: a row of 20,000 packed elements over 8,192 keys has 4 * 8192/2 * 128 operations a head in the forward pass and
2.5 times that in the backward; what is skipped (other documents, the future, what lies past a window) costs nothing.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels.launch import Launch, Launcher, gpu, on_gpu
from peagle_jax.kernels.packed_attention import AttentionIntervals


@triton.jit
def scores(
    q, k_ptr, row, there, inside, h, step: tl.constexpr, H: tl.constexpr, FACTOR: tl.constexpr
):
    """(keys, scaled scores with -inf outside) of one tile; keys are rows `row` of k_ptr, `step` apart."""
    k = tl.load(
        k_ptr + row[:, None].to(tl.int64) * step + h[None, :],
        mask=there[:, None] & (h[None, :] < H),
        other=0.0,
    )
    return k, tl.where(inside, tl.dot(q, k.T) * FACTOR, float("-inf"))


@triton.jit
def add(
    q,
    k_ptr,
    v_ptr,
    row,
    there,
    inside,
    h,
    top,
    total,
    acc,
    step: tl.constexpr,
    H: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """One more tile of keys in a running softmax."""
    k, x = scores(q, k_ptr, row, there, inside, h, step, H, FACTOR)
    v = tl.load(
        v_ptr + row[:, None].to(tl.int64) * step + h[None, :],
        mask=there[:, None] & (h[None, :] < H),
        other=0.0,
    )
    higher = tl.maximum(top, tl.max(x, 1))
    p = tl.exp2(x - higher[:, None])
    shrink = tl.exp2(top - higher)
    return higher, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * shrink[:, None])


@triton.jit
def descend(
    q,
    dy,
    lse,
    delta,
    k_ptr,
    v_ptr,
    row,
    there,
    inside,
    h,
    dq,
    step: tl.constexpr,
    H: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """One more tile of keys in the gradient of queries."""
    k, x = scores(q, k_ptr, row, there, inside, h, step, H, FACTOR)
    v = tl.load(
        v_ptr + row[:, None].to(tl.int64) * step + h[None, :],
        mask=there[:, None] & (h[None, :] < H),
        other=0.0,
    )
    d = tl.exp2(x - lse[:, None]) * (tl.dot(dy, v.T) - delta[:, None])
    return tl.dot(d.to(k.dtype), k, dq)


@triton.jit
def tile_rows(i, TILES0: tl.constexpr, SIZE: tl.constexpr, N0: tl.constexpr, P: tl.constexpr):
    """Rows of tile i, whether they exist, and the first of its part: TILES0 tiles of depth-0 rows, then tiles of packed ones."""
    packed = i >= TILES0
    begin = tl.where(packed, N0 + (i - TILES0) * SIZE, i * SIZE)
    row = begin + tl.arange(0, SIZE)
    return row, row < tl.where(packed, P, N0), begin


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    last_ptr,
    own_ptr,
    y_ptr,
    lse_ptr,
    P: tl.constexpr,
    N0: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    CHAIN: tl.constexpr,
    TILES0: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BH: tl.constexpr,
):
    b = tl.program_id(1) // N
    head = tl.program_id(1) % N
    row, real, begin = tile_rows(tl.program_id(0), TILES0, BQ, N0, P)
    h = tl.arange(0, BH)
    at = (b * P + row).to(tl.int64) * N + head
    q = tl.load(
        q_ptr + at[:, None] * H + h[None, :], mask=real[:, None] & (h[None, :] < H), other=0.0
    )
    first = tl.load(first_ptr + b * P + row, mask=real, other=P)
    last = tl.load(last_ptr + b * P + row, mask=real, other=-1)
    own = tl.load(own_ptr + b * P + row, mask=real, other=0)
    k_head = k_ptr + (b * P * G + head // (N // G)).to(tl.int64) * H
    v_head = v_ptr + (b * P * G + head // (N // G)).to(tl.int64) * H
    FACTOR: tl.constexpr = SCALE * 1.4426950408889634  # exp2 below
    top = tl.full((BQ,), -1e30, tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BH), tl.float32)
    some = first <= last
    low = tl.min(tl.where(some, first, P), 0) // BK * BK
    high = tl.max(tl.where(some, last, -1), 0) + 1
    for start in range(low, high, BK):
        s = start + tl.arange(0, BK)
        inside = (s[None, :] >= first[:, None]) & (s[None, :] <= last[:, None])
        top, total, acc = add(
            q, k_head, v_head, s, s < N0, inside, h, top, total, acc, G * H, H, FACTOR
        )
    if CHAIN > 0:
        if begin >= N0:
            for start in range(tl.maximum(begin - CHAIN + 1, N0), tl.minimum(begin + BQ, P), BK):
                s = start + tl.arange(0, BK)
                inside = (s[None, :] <= row[:, None]) & (s[None, :] > (row - own)[:, None])
                top, total, acc = add(
                    q, k_head, v_head, s, s < P, inside, h, top, total, acc, G * H, H, FACTOR
                )
    least = tl.maximum(total, 1e-30)
    y = acc / least[:, None]
    tl.store(
        y_ptr + at[:, None] * H + h[None, :],
        y.to(y_ptr.dtype.element_ty),
        mask=real[:, None] & (h[None, :] < H),
    )
    tl.store(
        lse_ptr + at,
        tl.where(total > 0, (top + tl.log2(least)) * 0.6931471805599453, -1e30),
        mask=real,
    )


@triton.jit
def query_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    last_ptr,
    own_ptr,
    dy_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    P: tl.constexpr,
    N0: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    CHAIN: tl.constexpr,
    TILES0: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BH: tl.constexpr,
):
    """Gradient of a tile of queries."""
    b = tl.program_id(1) // N
    head = tl.program_id(1) % N
    row, real, begin = tile_rows(tl.program_id(0), TILES0, BQ, N0, P)
    h = tl.arange(0, BH)
    at = (b * P + row).to(tl.int64) * N + head
    inside_q = real[:, None] & (h[None, :] < H)
    q = tl.load(q_ptr + at[:, None] * H + h[None, :], mask=inside_q, other=0.0)
    dy = tl.load(dy_ptr + at[:, None] * H + h[None, :], mask=inside_q, other=0.0)
    lse = tl.load(lse_ptr + at, mask=real, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + at, mask=real, other=0.0)
    first = tl.load(first_ptr + b * P + row, mask=real, other=P)
    last = tl.load(last_ptr + b * P + row, mask=real, other=-1)
    own = tl.load(own_ptr + b * P + row, mask=real, other=0)
    k_head = k_ptr + (b * P * G + head // (N // G)).to(tl.int64) * H
    v_head = v_ptr + (b * P * G + head // (N // G)).to(tl.int64) * H
    FACTOR: tl.constexpr = SCALE * 1.4426950408889634
    dq = tl.zeros((BQ, BH), tl.float32)
    some = first <= last
    low = tl.min(tl.where(some, first, P), 0) // BK * BK
    high = tl.max(tl.where(some, last, -1), 0) + 1
    for start in range(low, high, BK):
        s = start + tl.arange(0, BK)
        inside = (s[None, :] >= first[:, None]) & (s[None, :] <= last[:, None])
        dq = descend(q, dy, lse, delta, k_head, v_head, s, s < N0, inside, h, dq, G * H, H, FACTOR)
    if CHAIN > 0:
        if begin >= N0:
            for start in range(tl.maximum(begin - CHAIN + 1, N0), tl.minimum(begin + BQ, P), BK):
                s = start + tl.arange(0, BK)
                inside = (s[None, :] <= row[:, None]) & (s[None, :] > (row - own)[:, None])
                dq = descend(
                    q, dy, lse, delta, k_head, v_head, s, s < P, inside, h, dq, G * H, H, FACTOR
                )
    tl.store(
        dq_ptr + at[:, None] * H + h[None, :],
        (dq * SCALE).to(dq_ptr.dtype.element_ty),
        mask=inside_q,
    )


@triton.jit
def key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    last_ptr,
    own_ptr,
    dy_ptr,
    lse_ptr,
    delta_ptr,
    range_ptr,
    dk_ptr,
    dv_ptr,
    P: tl.constexpr,
    N0: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    CHAIN: tl.constexpr,
    TILES0: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BH: tl.constexpr,
):
    """Gradient of a tile of keys and values, summed over the query heads of its group. `range_ptr`: rows to look at, of both parts."""
    b = tl.program_id(1) // G
    g = tl.program_id(1) % G
    tile = tl.program_id(0)
    s, there, begin = tile_rows(tile, TILES0, BK, N0, P)
    h = tl.arange(0, BH)
    at_k = (b * P + s).to(tl.int64) * G + g
    inside_k = there[:, None] & (h[None, :] < H)
    k = tl.load(k_ptr + at_k[:, None] * H + h[None, :], mask=inside_k, other=0.0)
    v = tl.load(v_ptr + at_k[:, None] * H + h[None, :], mask=inside_k, other=0.0)
    FACTOR: tl.constexpr = SCALE * 1.4426950408889634
    R: tl.constexpr = N // G
    dk = tl.zeros((BK, BH), tl.float32)
    dv = tl.zeros((BK, BH), tl.float32)
    packed = begin >= N0
    for part in range(0, 2):  # depth-0 queries, packed queries; of a packed key only the latter
        if packed:
            low = begin
            high = tl.where(part == 1, tl.minimum(begin + BK + CHAIN - 1, P), begin)
        else:
            low = tl.load(range_ptr + ((b * TILES0 + tile) * 2 + part) * 2)
            high = tl.load(range_ptr + ((b * TILES0 + tile) * 2 + part) * 2 + 1)
        for start in range(low, high, BQ):
            row = start + tl.arange(0, BQ)
            real = row < high
            first = tl.load(first_ptr + b * P + row, mask=real, other=P)
            last = tl.load(last_ptr + b * P + row, mask=real, other=-1)
            own = tl.load(own_ptr + b * P + row, mask=real, other=0)
            if packed:
                inside = (s[:, None] <= row[None, :]) & (s[:, None] > (row - own)[None, :])
            else:
                inside = (s[:, None] >= first[None, :]) & (s[:, None] <= last[None, :])
            inside &= there[:, None]
            for r in range(0, R):
                at = (b * P + row).to(tl.int64) * N + g * R + r
                inside_q = real[:, None] & (h[None, :] < H)
                q = tl.load(q_ptr + at[:, None] * H + h[None, :], mask=inside_q, other=0.0)
                dy = tl.load(dy_ptr + at[:, None] * H + h[None, :], mask=inside_q, other=0.0)
                lse = tl.load(lse_ptr + at, mask=real, other=0.0) * 1.4426950408889634
                delta = tl.load(delta_ptr + at, mask=real, other=0.0)
                p = tl.where(
                    inside, tl.exp2(tl.minimum(tl.dot(k, q.T) * FACTOR - lse[None, :], 0.0)), 0.0
                )
                dv = tl.dot(p.to(dy.dtype), dy, dv)
                d = p * (tl.dot(v, dy.T) - delta[None, :])
                dk = tl.dot(d.to(q.dtype), q, dk)
    tl.store(
        dk_ptr + at_k[:, None] * H + h[None, :],
        (dk * SCALE).to(dk_ptr.dtype.element_ty),
        mask=inside_k,
    )
    tl.store(dv_ptr + at_k[:, None] * H + h[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside_k)


def tiles(head_dim: int) -> dict:
    """`kq`: the queries of a tile in the gradient of keys, where two sums in registers leave less room."""
    if gpu().shared < 200_000:
        return {"bq": 64, "kq": 32, "bk": 64 if head_dim <= 64 else 32, "warps": 8, "stages": 2}
    if head_dim > 128:
        return {"bq": 64, "kq": 32, "bk": 32, "warps": 8, "stages": 2}
    return {"bq": 128, "kq": 64 if head_dim <= 64 else 32, "bk": 64, "warps": 8, "stages": 3}


def attend(q, k, v, seen: AttentionIntervals, scale: float, start: Launcher = on_gpu, **overrides):
    """As `packed_attention.reference`, but rows that see nothing give zeros. `overrides` of `tiles` are for measuring."""
    numbers = (x.astype(jnp.int32) for x in (seen.first, seen.last, seen.own))
    return _attend(
        q, k, v, *numbers, (seen.depth0, seen.chain), float(scale), start, tuple(overrides.items())
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _attend(q, k, v, first, last, own, static, scale, start, overrides):
    return forward(
        q, k, v, AttentionIntervals(first, last, own, *static), scale, start, **dict(overrides)
    )


def _forward(*args):
    y, lse = _attend(*args)
    return (y, lse), (*args[:6], y, lse)


def _backward(static, scale, start, overrides, kept, above):
    q, k, v, *numbers, y, lse = kept
    return (
        *backward(
            q,
            k,
            v,
            AttentionIntervals(*numbers, *static),
            scale,
            y,
            lse,
            *above,
            start,
            **dict(overrides),
        ),
        None,
        None,
        None,
    )


_attend.defvjp(_forward, _backward)


def forward(q, k, v, seen, scale, start: Launcher, **overrides):
    """(y, lse)."""
    B, P, N, H = q.shape
    how = tiles(H) | overrides
    launch = Launch(
        kernel=forward_kernel,
        inputs=(q, k, v, seen.first, seen.last, seen.own),
        outputs=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, P, N), jnp.float32),
        ),
        grid=(_tiles(seen, P, how["bq"])[1], B * N),
        constants=_constants(q, k, seen, scale, how, how["bq"]),
        warps=how["warps"],
        stages=how["stages"],
    )
    return start(launch)


def backward(q, k, v, seen, scale, y, lse, dy, dlse, start: Launcher, **overrides):
    """Gradients of q, k and v."""
    B, P, N, H = q.shape
    how = tiles(H) | overrides
    delta = (dy.astype(jnp.float32) * y.astype(jnp.float32)).sum(axis=-1) - dlse
    given = (q, k, v, seen.first, seen.last, seen.own, dy.astype(q.dtype), lse, delta)
    queries = Launch(
        kernel=query_kernel,
        inputs=given,
        outputs=(jax.ShapeDtypeStruct(q.shape, q.dtype),),
        grid=(_tiles(seen, P, how["bq"])[1], B * N),
        constants=_constants(q, k, seen, scale, how, how["bq"]),
        warps=how["warps"],
        stages=how["stages"],
    )
    how |= {"bq": how["kq"]}
    keys = Launch(
        kernel=key_kernel,
        inputs=(*given, ranges(seen, how["bk"], how["bq"])),
        outputs=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        grid=(_tiles(seen, P, how["bk"])[1], B * k.shape[2]),
        constants=_constants(q, k, seen, scale, how, how["bk"]),
        warps=how["warps"],
        stages=how["stages"],
    )
    return start(queries) + start(keys)


def ranges(seen, keys: int, queries: int) -> jax.Array:
    """[B tiles 2 2]: of every tile of so many depth-0 keys, the rows first .. last + 1 that see any of it, of both parts.

    Found tile of queries by tile of keys, so up to a tile more than need be.
    """
    B, P = seen.first.shape
    n = seen.depth0
    begin = jnp.arange(-(-n // keys)) * keys
    found = []
    for low, high in ((0, n), (n, P)):
        count = -(-(high - low) // queries)
        if count == 0:
            found.append(jnp.zeros((B, len(begin), 2), jnp.int32))
            continue
        some = seen.first[:, low:high] <= seen.last[:, low:high]

        def by_tile(x, fill):
            return jnp.pad(
                x, [(0, 0), (0, count * queries - x.shape[1])], constant_values=fill
            ).reshape(B, count, queries)  # noqa:  B023

        first = by_tile(jnp.where(some, seen.first[:, low:high], P), P).min(axis=2)
        last = by_tile(jnp.where(some, seen.last[:, low:high], -1), -1).max(axis=2)
        meets = (first[..., None] < begin[None, None] + keys) & (
            last[..., None] >= begin[None, None]
        )  # [B count tiles]
        any_ = meets.any(axis=1)
        start = low + jnp.argmax(meets, axis=1) * queries
        end = jnp.minimum(low + (count - jnp.argmax(meets[:, ::-1], axis=1)) * queries, high)
        found.append(jnp.stack([jnp.where(any_, start, 0), jnp.where(any_, end, 0)], axis=-1))
    return jnp.stack(found, axis=2).astype(jnp.int32)


def _tiles(seen, P: int, size: int) -> tuple[int, int]:
    """Tiles of depth-0 rows, and all tiles."""
    n = seen.depth0
    return -(-n // size), -(-n // size) + -(-(P - n) // size)


def _constants(q, k, seen, scale, how, size) -> dict:
    (_, P, N, H), G = q.shape, k.shape[2]
    return dict(
        P=P,
        N0=seen.depth0,
        N=N,
        G=G,
        H=H,
        SCALE=float(scale),
        CHAIN=seen.chain,
        TILES0=_tiles(seen, P, size)[0],
        BQ=how["bq"],
        BK=how["bk"],
        BH=max(16, 1 << (H - 1).bit_length()),
    )
