"""Mixture of experts: every token through the few experts that a router chose for it. Five forms of one sum.

    y[t] = sum over j of weight[t, j] * expert[chosen[t, j]](x[t])

`chosen` may hold `bank.count`, which is no expert: another device's, where experts are spread over devices. Sums are float32, whatever
the weights are: those of several devices are yet to be added.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from peagle_jax.kernels import choose as forms

TILE = 64  # rows of one expert in one round of a CPU's loop, at most: more wait for the slowest expert (LOG.md)
FEW = 4  # a tile of so many rows costs a CPU little more than one row: it is bound by reading the weights
GPU_TILE = 16  # rows, at least: what a tensor core takes at once


@dataclasses.dataclass(frozen=True)
class Matrices:
    """A matrix an expert as it is stored, for kernels that decode it on the way.

    `kind` says how: "plain" [E K N]; float8 [E N K] with a scale a "row" [E N] or a "block" [E N/128 K/128]; "mxfp4", bytes
    [E N K/32 16] and exponents [E N K/32].
    """

    kind: str
    values: Num[Array, "..."]
    scale: Num[Array, "..."] | None
    bias: Float[Array, "E N"] | None

    @property
    def outputs(self) -> int:
        return self.values.shape[2 if self.kind == "plain" else 1]


@runtime_checkable
class ExpertWeights(Protocol):
    """E experts, three ways to run them."""

    count: int  # E
    parts: int  # equal banks over which the experts are spread
    act: Callable  # between the two matrices

    def matrices(self) -> tuple[Matrices, Matrices]:
        """Gate and up in one, and down."""
        ...

    def one(self, expert: Int[Array, ""], rows: Float[Array, "M D"]) -> Float[Array, "M D"]:
        """One expert over all rows."""
        ...

    def tiles(
        self, experts: Int[Array, " t"], rows: Float[Array, "t M D"]
    ) -> Float[Array, "t M D"]:
        """An expert of its own for each of t groups of rows."""
        ...


def reference(
    x: Float[Array, "n D"],
    chosen: Int[Array, "n k"],
    weight: Float[Array, "n k"],
    bank: ExpertWeights,
) -> Float[Array, "n D"]:
    """Every expert for every token: the definition of correct, and E/k times the work."""

    def add(y, expert):
        share = jnp.where(chosen == expert, weight, 0).sum(axis=1).astype(jnp.float32)
        return y + bank.one(expert, x).astype(jnp.float32) * share[:, None], None

    y, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), jnp.arange(bank.count))
    return y


def looped(
    x: Float[Array, "n D"],
    chosen: Int[Array, "n k"],
    weight: Float[Array, "n k"],
    bank: ExpertWeights,
) -> Float[Array, "n D"]:
    """A loop over tiles of rows sorted by expert; as many rounds as there are tiles.

    Reads each chosen expert once a tile, and no other. For CPUs: a round costs nothing there. Not differentiable in reverse.
    """
    (n, D), k, E = x.shape, chosen.shape[1], bank.count
    tiles = tiled(chosen, E, tile_rows(n, k, E, parts=bank.parts, few=FEW, most=TILE))
    rows = jnp.pad(x[tiles.token], [(0, tiles.rows), (0, 0)])

    def run(i, out):
        at = tiles.first[i]
        y = bank.one(tiles.expert[i], jax.lax.dynamic_slice_in_dim(rows, at, tiles.rows))
        # rows past the expert's last are another's: they are overwritten, because that one's tile comes later
        return jax.lax.dynamic_update_slice_in_dim(out, y, at, 0)

    out = jax.lax.fori_loop(
        0, (tiles.size > 0).sum(), run, jnp.zeros((n * k + tiles.rows, D), x.dtype)
    )[: n * k]
    return combine(out, tiles, weight * (chosen < E))


def gathered(
    x: Float[Array, "n D"],
    chosen: Int[Array, "n k"],
    weight: Float[Array, "n k"],
    bank: ExpertWeights,
) -> Float[Array, "n D"]:
    """The chosen experts' weights gathered, one batched product: a few rows on a GPU, where rounds of a loop cost launches."""
    n, k = chosen.shape
    y = bank.tiles(
        jnp.minimum(chosen, bank.count - 1).reshape(-1), jnp.repeat(x, k, axis=0)[:, None]
    )[:, 0]
    share = jnp.where(chosen < bank.count, weight, 0).astype(jnp.float32)
    return (y.astype(jnp.float32).reshape(n, k, -1) * share[..., None]).sum(axis=1)


def grouped(
    x: Float[Array, "n D"],
    chosen: Int[Array, "n k"],
    weight: Float[Array, "n k"],
    bank: ExpertWeights,
) -> Float[Array, "n D"]:
    """Rows sorted by expert, in tiles of one expert each, one batched product: many rows on a GPU.

    At most two tiles an expert, so it reads and copies each bank at most twice. `jax.lax.ragged_dot` would be the thing to
    use, but XLA makes a dense product of it, on GPUs too: every expert for every row, and E copies of the rows (LOG.md).
    """
    (n, D), k, E = x.shape, chosen.shape[1], bank.count
    tiles = tiled(chosen, E, tile_rows(n, k, E, parts=bank.parts, few=GPU_TILE, most=n * k))
    at = tiles.first[:, None] + jnp.arange(tiles.rows)[None]
    rows = x[tiles.token][
        jnp.minimum(at, n * k - 1)
    ]  # [t M D]; a tile's rows past its expert's last are computed for nothing
    out = bank.tiles(jnp.minimum(tiles.expert, E - 1), rows).reshape(-1, D)
    place = jnp.arange(n * k)
    begun = (place[:, None] >= tiles.first[None]) & (tiles.size > 0)[None]
    tile = begun.sum(axis=1) - 1  # which holds each pair
    return combine(out[tile * tiles.rows + place - tiles.first[tile]], tiles, weight * (chosen < E))


def triton(
    x: Float[Array, "n D"],
    chosen: Int[Array, "n k"],
    weight: Float[Array, "n k"],
    bank: ExpertWeights,
) -> Float[Array, "n D"]:
    """`grouped`, without a copy of any weight. Not differentiable."""
    from peagle_jax.kernels import experts_triton

    return experts_triton.mixture(x, chosen, weight, bank)


FORMS = {
    "reference": reference,
    "looped": looped,
    "gathered": gathered,
    "grouped": grouped,
    "triton": triton,
}


def choose(rows: int, k: int, experts: int, backend: str, unsupported: str | None = None) -> str:
    """The form for so many tokens, each of which chooses k; `experts` are those of this device.

    Where Triton cannot serve on a GPU, by arithmetic: while the chosen experts are fewer than all, gathering reads less.

    Args:
      unsupported: why Triton does not take the operands.
    """
    if backend == "cpu":
        return "looped"
    if forms.choose("experts", "auto", FORMS, unsupported) == "triton":
        return "triton"
    return "gathered" if rows * k <= experts else "grouped"


def tile_rows(n: int, k: int, experts: int, *, parts: int, few: int, most: int) -> int:
    """Rows of a tile: what an expert gets on average, as a power of two, within bounds."""
    average = -(-n * k // (experts * parts))
    return min(most, max(1 << (average - 1).bit_length(), min(few, n)))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The n*k (token, choice) pairs sorted by expert and cut into tiles, as many as there can be: a tile may have no rows."""

    rows: int  # of a tile, at most
    place: Int[Array, " pairs"]  # of pair t*k + j among the sorted ones
    token: Int[Array, " pairs"]  # of each place
    expert: Int[Array, " t"]  # E where there are no rows
    first: Int[Array, " t"]  # place
    size: Int[Array, " t"]  # rows


def tiled(chosen: Int[Array, "n k"], experts: int, rows: int) -> Tiles:
    """Tiles of at most `rows` rows of one expert each; those with rows come first. Pairs of no expert come last and are in none.

    By comparing everything with everything: on a GPU each line is one launch, where a search or a running sum is a loop of them.
    """
    n, k = chosen.shape
    flat = chosen.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True)
    start = (flat[:, None] < jnp.arange(experts + 1)[None]).sum(
        axis=0, dtype=jnp.int32
    )  # places before each expert's own
    size = start[1:] - start[:-1]
    tiles = -(-size // rows)
    before = jnp.where(jnp.tri(experts, k=-1, dtype=bool), tiles[None], 0).sum(
        axis=1, dtype=jnp.int32
    )
    t = jnp.arange(most_tiles(n, k, experts, rows), dtype=jnp.int32)
    expert = (t[:, None] >= (before + tiles)[None]).sum(axis=1, dtype=jnp.int32)
    e = jnp.minimum(expert, experts - 1)
    done = (t - before[e]) * rows  # of the expert's rows, by the tiles before
    size = jnp.where(expert < experts, jnp.minimum(size[e] - done, rows), 0)
    token = (order // k).astype(jnp.int32)
    return Tiles(rows, jnp.argsort(order), token, expert, start[e] + done, size)


def most_tiles(n: int, k: int, experts: int, rows: int) -> int:
    """As many as `tiled` can make: an expert has n rows at most."""
    return min(n * k, experts + n * k // rows, experts * -(-n // rows))


def unsorted(chosen: Int[Array, "1 k"], experts: int) -> Tiles:
    """Of one token, which chooses an expert once: a tile each, in the order that they come in; those without rows lie anywhere."""
    flat = chosen[0].astype(jnp.int32)
    at = jnp.arange(len(flat), dtype=jnp.int32)
    return Tiles(1, at, jnp.zeros_like(at), flat, at, (flat < experts).astype(jnp.int32))


def combine(
    out: Float[Array, "pairs D"], tiles: Tiles, weight: Float[Array, "n k"]
) -> Float[Array, "n D"]:
    """Back into the order of tokens, and summed over each one's experts. Gathers: adding by index would not be deterministic."""
    n, k = weight.shape
    own = out[tiles.place].reshape(n, k, -1).astype(jnp.float32)
    share = weight.astype(jnp.float32)[..., None]
    return jnp.where(share != 0, own * share, 0).sum(axis=1)
