"""A mixture's products in Triton: one launch for all experts of a layer's matrix, rows sorted by expert, weights decoded on the way.

Bound by reading the chosen experts: a token of Qwen3-Coder-30B-A3B takes 8 experts of 4.7M numbers a layer, 38 MB in FP8, 8.8 us at
the 4.3 TB/s that a copy reaches on an H200; in MXFP4 a token of GPT-OSS-20B takes 4 of 24.9M, 53 MB, 12.3 us. Every expert that was
chosen is read once a tile of rows, and no other: weights stay in memory as they are stored, which plain XLA cannot do (docs/sizes.md).
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from peagle_jax.kernels import experts
from peagle_jax.kernels.experts import Matrices, Tiles
from peagle_jax.kernels.launch import Launch, Launcher, on_gpu

SORTED, BANKS = (
    1024,
    256,
)  # pairs and experts, at most, that a kernel sorts: its work grows with their product, launches do not


@triton.jit
def decoded(code, scale):
    """E2M1 codes in float32, times a scale: float16 has the same fields further up, 2^14 times smaller."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * scale


@triton.jit
def kernel(
    x_ptr,
    row_ptr,
    expert_ptr,
    first_ptr,
    size_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATHER: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BN outputs of one expert for the `size` rows of tile t, which stand at `first` in the result.

    GATHER: row i of the result comes from row `row_ptr[i]` of x. W, the weights: "plain" [E K N]; float8 [E N K] with scales by "row"
    or "block"; "mxfp4" [E N K/2], then x holds each row's even numbers before its odd ones.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    tile = tl.program_id(1)
    size = tl.load(size_ptr + tile)
    e = tl.minimum(tl.load(expert_ptr + tile), E - 1).to(tl.int64)
    m = tl.arange(0, BM)
    row = tl.load(first_ptr + tile) + m
    source = row
    if GATHER:
        source = tl.load(row_ptr + row, mask=m < size, other=0)
    x_row = x_ptr + source[:, None].to(tl.int64) * K
    real = (m < size)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for at in range(0, tl.where(size > 0, K, 0), BK):  # a tile without rows reads nothing
        if W == "mxfp4":
            k = at // 2 + tl.arange(0, BK // 2)
            x = tl.load(x_row + k[None, :], mask=real & (k[None, :] < K // 2), other=0.0)
            odd = tl.load(x_row + K // 2 + k[None, :], mask=real & (k[None, :] < K // 2), other=0.0)
            g = at // 32 + tl.arange(0, BK // 32)  # 16 bytes share a scale
            there = (n[:, None] < N) & (g[None, :] < K // 32)
            group = (e * N + n[:, None]) * (K // 32) + g[None, :]
            exponent = tl.load(scale_ptr + group, mask=there, other=0)
            scale = ((exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 16384.0)[
                :, :, None
            ]
            byte = tl.load(
                w_ptr + group[:, :, None] * 16 + tl.arange(0, 16)[None, None, :],
                mask=there[:, :, None],
                other=0,
            ).to(tl.uint16)
            low = tl.reshape(decoded(byte & 15, scale), (BN, BK // 2)).to(x.dtype)
            high = tl.reshape(decoded(byte >> 4, scale), (BN, BK // 2)).to(x.dtype)
            acc = tl.dot(low, x.T, acc)
            acc = tl.dot(high, odd.T, acc)
        else:
            k = at + tl.arange(0, BK)
            x = tl.load(x_row + k[None, :], mask=real & (k[None, :] < K), other=0.0)
            there = (n[:, None] < N) & (k[None, :] < K)
            if W == "plain":
                w = tl.load(w_ptr + (e * K + k[None, :]) * N + n[:, None], mask=there, other=0.0)
            else:
                w = tl.load(w_ptr + (e * N + n[:, None]) * K + k[None, :], mask=there, other=0.0)
            if W == "block":
                across: tl.constexpr = (K + 127) // 128
                down: tl.constexpr = (N + 127) // 128
                part = tl.dot(w.to(x.dtype), x.T)
                acc += (
                    part
                    * tl.load(
                        scale_ptr + (e * down + n // 128) * across + at // 128,
                        mask=n < N,
                        other=0.0,
                    )[:, None]
                )
            else:
                acc = tl.dot(w.to(x.dtype), x.T, acc)
    if W == "row":
        acc *= tl.load(scale_ptr + e * N + n, mask=n < N, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + e * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + row[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < size))


@triton.jit
def sort_kernel(
    chosen_ptr,
    place_ptr,
    token_ptr,
    expert_ptr,
    first_ptr,
    size_ptr,
    PAIRS: tl.constexpr,
    CHOICES: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
):
    """BP pairs and BP tiles a program, each compared with all pairs: one launch, where a sort and its counts are seven."""
    i = tl.program_id(0) * BP + tl.arange(0, BP)
    mine = tl.load(chosen_ptr + i, mask=i < PAIRS, other=E)
    e = tl.arange(0, BE)
    place = tl.zeros((BP,), tl.int32)
    count = tl.zeros((BE,), tl.int32)
    for at in range(0, PAIRS, BP):
        j = at + tl.arange(0, BP)
        other = tl.load(chosen_ptr + j, mask=j < PAIRS, other=E + 1)
        before = (other[None, :] < mine[:, None]) | (
            (other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
        )
        place += tl.sum(before.to(tl.int32), 1)
        count += tl.sum((other[None, :] == e[:, None]).to(tl.int32), 1)
    tl.store(place_ptr + i, place, mask=i < PAIRS)
    tl.store(token_ptr + place, i // CHOICES, mask=i < PAIRS)
    count = tl.where(e < E, count, 0)
    tiles = (count + ROWS - 1) // ROWS
    until = tl.cumsum(tiles, 0)
    start = tl.cumsum(count, 0) - count
    expert = tl.sum((i[:, None] >= until[None, :]).to(tl.int32), 1)  # of tile i
    own = expert[:, None] == e[None, :]
    done = (i - tl.sum(tl.where(own, (until - tiles)[None, :], 0), 1)) * ROWS
    size = tl.minimum(tl.sum(tl.where(own, count[None, :], 0), 1) - done, ROWS)
    tl.store(expert_ptr + i, tl.minimum(expert, E), mask=i < TILES)
    tl.store(first_ptr + i, tl.sum(tl.where(own, start[None, :], 0), 1) + done, mask=i < TILES)
    tl.store(size_ptr + i, tl.where(expert < E, size, 0), mask=i < TILES)


def tiled(chosen, count: int, rows: int, start: Launcher = on_gpu) -> Tiles:
    """As `experts.tiled`; the work grows with the square of the pairs."""
    pairs, bp = chosen.size, 64
    tiles = experts.most_tiles(*chosen.shape, count, rows)

    def number(n):
        return jax.ShapeDtypeStruct((n,), jnp.int32)

    launch = Launch(
        kernel=sort_kernel,
        inputs=(chosen.reshape(-1).astype(jnp.int32),),
        outputs=(number(pairs), number(pairs), number(tiles), number(tiles), number(tiles)),
        grid=(-(-max(pairs, tiles) // bp),),
        constants=dict(
            PAIRS=pairs,
            CHOICES=chosen.shape[1],
            E=count,
            ROWS=rows,
            TILES=tiles,
            BP=bp,
            BE=triton.next_power_of_2(count),
        ),
        warps=min(
            16, max(4, triton.next_power_of_2(count) // 16)
        ),  # 128 experts and 4 warps: 254 registers; 256: spills
    )
    return Tiles(rows, *start(launch))


def sizes(rows: int, kind: str) -> dict:
    """Tiles for so many rows of an expert."""
    bm = max(16, 1 << (rows - 1).bit_length())
    bn = 128 if bm == 128 and kind != "mxfp4" else 64  # decoding 128 x 128 numbers spills on sm_120
    return {
        "bm": bm,
        "bn": bn,
        "bk": 64 if kind == "plain" else 128,
        "warps": 8 if bm == 128 else 4,
        "stages": 3 if bm == 128 else 4,
    }


def product(
    x, tiles: Tiles, w: Matrices, *, gather: bool, start: Launcher = on_gpu, **overrides
) -> jax.Array:
    """Every pair's row times its expert's matrix [pairs N], sorted by expert; rows of pairs that have no expert are not written.

    Args:
      x: a row a token where `gather`, otherwise a row a pair.
      overrides: of `sizes`, for measuring.
    """
    K, N = x.shape[1], w.outputs
    how = sizes(tiles.rows, w.kind) | overrides
    nothing = jnp.zeros(1, jnp.float32)  # in the place of arrays that the kernel will not read
    if w.kind == "mxfp4":
        x = x.reshape(-1, K // 2, 2).swapaxes(1, 2).reshape(-1, K)
    launch = Launch(
        kernel=kernel,
        inputs=(
            x,
            tiles.token,
            tiles.expert,
            tiles.first,
            tiles.size,
            w.values,
            nothing if w.scale is None else w.scale,
            nothing if w.bias is None else w.bias,
        ),
        outputs=(jax.ShapeDtypeStruct((len(tiles.token), N), x.dtype),),
        grid=(-(-N // how["bn"]), len(tiles.expert)),
        constants=dict(
            E=len(w.values),
            N=N,
            K=K,
            GATHER=gather,
            W=w.kind,
            BIAS=w.bias is not None,
            BM=how["bm"],
            BN=how["bn"],
            BK=how["bk"],
        ),
        warps=how["warps"],
        stages=how["stages"],
    )
    return start(launch)[0]


def mixture(x, chosen, weight, bank, start: Launcher = on_gpu) -> jax.Array:
    """As `experts.reference`; activations are multiplied as they are, whatever the weights are."""
    n, k = chosen.shape
    rows = experts.tile_rows(n, k, bank.count, parts=bank.parts, few=experts.GPU_TILE, most=128)
    if n == 1:
        tiles = experts.unsorted(chosen, bank.count)
    elif n * k <= SORTED and bank.count <= BANKS:
        tiles = tiled(chosen, bank.count, rows, start)
    else:
        tiles = experts.tiled(chosen, bank.count, rows)
    up, down = bank.matrices()
    hidden = bank.act(product(x, tiles, up, gather=True, start=start))
    return experts.combine(
        product(hidden, tiles, down, gather=False, start=start),
        tiles,
        weight * (chosen < bank.count),
    )
