"""Mixture of experts: every token goes through the few experts that a router chose for it.

    y[t] = sum over j of routing_weights[t, j] * expert[topk_ids[t, j]](x[t])

There are five forms of this one sum. `topk_ids` may hold `weights.count`, which is no expert of
these: where experts are spread over devices, it is another device's. Sums are float32 whatever the
weights are, because those of several devices are yet to be added.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from peagle_jax.kernels import choose as forms

# A round of a CPU's loop takes at most this many rows of one expert: with more, all wait for the
# slowest expert (LOG.md).
MAX_CPU_TILE = 64
# A tile of so many rows costs a CPU little more than one row: it is bound by reading the weights.
MIN_CPU_TILE = 4
MIN_GPU_TILE = 16  # rows that a tensor core takes at once


@dataclasses.dataclass(frozen=True)
class StoredMatrices:
    """One matrix an expert, as they are stored, for kernels that decode them on the way.

    Kinds: "plain" [E K N]; float8 [E N K] with scales, one a "row" [E N] or one a "block" of
    128 x 128 [E N/128 K/128]; "mxfp4", bytes [E N K/32 16] and exponents [E N K/32].
    """

    kind: str
    values: Num[Array, "..."]
    scale: Num[Array, "..."] | None
    bias: Float[Array, "E N"] | None

    @property
    def outputs(self) -> int:
        """N."""
        return self.values.shape[2 if self.kind == "plain" else 1]


@runtime_checkable
class ExpertWeights(Protocol):
    """E experts of one layer, and three ways to run them."""

    count: int  # E
    num_shards: int  # equal sets over which a layer's experts are spread; this is one of them
    act: Callable  # between the two matrices

    def matrices(self) -> tuple[StoredMatrices, StoredMatrices]:
        """Gate and up in one, and down."""
        ...

    def run_expert(self, expert: Int[Array, ""], rows: Float[Array, "M D"]) -> Float[Array, "M D"]:
        """One expert over all rows."""
        ...

    def run_tiles(
        self, experts: Int[Array, " t"], rows: Float[Array, "t M D"]
    ) -> Float[Array, "t M D"]:
        """Each of t groups of rows through an expert of its own."""
        ...


def reference(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n k"],
    routing_weights: Float[Array, "n k"],
    weights: ExpertWeights,
) -> Float[Array, "n D"]:
    """Every expert for every token: the definition of correct, and E/k times the work."""

    def add_expert(y, expert):
        share = jnp.where(topk_ids == expert, routing_weights, 0).sum(axis=1).astype(jnp.float32)
        return y + weights.run_expert(expert, x).astype(jnp.float32) * share[:, None], None

    y, _ = jax.lax.scan(add_expert, jnp.zeros(x.shape, jnp.float32), jnp.arange(weights.count))
    return y


def looped(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n k"],
    routing_weights: Float[Array, "n k"],
    weights: ExpertWeights,
) -> Float[Array, "n D"]:
    """A loop over tiles of rows sorted by expert, with as many rounds as there are tiles.

    It reads each chosen expert once a tile and no other expert. It is for CPUs, where a round costs
    nothing. It is not differentiable in reverse.
    """
    n, D = x.shape
    k, E = topk_ids.shape[1], weights.count
    size = tile_rows(n, k, E, num_shards=weights.num_shards, least=MIN_CPU_TILE, most=MAX_CPU_TILE)
    tiles = make_tiles(topk_ids, E, size)
    rows = jnp.pad(x[tiles.token], [(0, tiles.rows), (0, 0)])

    def run_tile(i, out):
        at = tiles.first[i]
        tile = jax.lax.dynamic_slice_in_dim(rows, at, tiles.rows)
        y = weights.run_expert(tiles.expert[i], tile)
        # rows past the expert's last are another expert's, whose tile comes later and overwrites
        # them
        return jax.lax.dynamic_update_slice_in_dim(out, y, at, 0)

    num_tiles = (tiles.size > 0).sum()
    out = jnp.zeros((n * k + tiles.rows, D), x.dtype)
    out = jax.lax.fori_loop(0, num_tiles, run_tile, out)[: n * k]
    return combine(out, tiles, routing_weights * (topk_ids < E))


def gathered(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n k"],
    routing_weights: Float[Array, "n k"],
    weights: ExpertWeights,
) -> Float[Array, "n D"]:
    """Gathers the chosen experts' weights for one batched product.

    It is for a few rows on a GPU, where rounds of a loop cost launches.
    """
    n, k = topk_ids.shape
    ids = jnp.minimum(topk_ids, weights.count - 1).reshape(-1)
    y = weights.run_tiles(ids, jnp.repeat(x, k, axis=0)[:, None])[:, 0]
    share = jnp.where(topk_ids < weights.count, routing_weights, 0).astype(jnp.float32)
    return (y.astype(jnp.float32).reshape(n, k, -1) * share[..., None]).sum(axis=1)


def grouped(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n k"],
    routing_weights: Float[Array, "n k"],
    weights: ExpertWeights,
) -> Float[Array, "n D"]:
    """Rows sorted by expert, in tiles of one expert each, for one batched product.

    It is for many rows on a GPU. There are at most two tiles an expert, so it reads and copies each
    matrix at most twice. `jax.lax.ragged_dot` would be the thing to use, but XLA makes a dense
    product of it, on GPUs too: every expert for every row, and E copies of the rows (LOG.md).
    """
    n, D = x.shape
    k, E = topk_ids.shape[1], weights.count
    size = tile_rows(n, k, E, num_shards=weights.num_shards, least=MIN_GPU_TILE, most=n * k)
    tiles = make_tiles(topk_ids, E, size)
    at = tiles.first[:, None] + jnp.arange(tiles.rows)[None]
    # [t M D]; a tile's rows past its expert's last are computed for nothing
    rows = x[tiles.token][jnp.minimum(at, n * k - 1)]
    out = weights.run_tiles(jnp.minimum(tiles.expert, E - 1), rows).reshape(-1, D)
    place = jnp.arange(n * k)
    begun = (place[:, None] >= tiles.first[None]) & (tiles.size > 0)[None]
    tile = begun.sum(axis=1) - 1  # the one that holds each pair
    pairs = out[tile * tiles.rows + place - tiles.first[tile]]
    return combine(pairs, tiles, routing_weights * (topk_ids < E))


def triton(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n k"],
    routing_weights: Float[Array, "n k"],
    weights: ExpertWeights,
) -> Float[Array, "n D"]:
    """As `grouped`, without a copy of any weight. Not differentiable."""
    from peagle_jax.kernels import experts_triton

    return experts_triton.mixture(x, topk_ids, routing_weights, weights)


FORMS = {
    "reference": reference,
    "looped": looped,
    "gathered": gathered,
    "grouped": grouped,
    "triton": triton,
}


def choose(rows: int, k: int, experts: int, backend: str, unsupported: str | None = None) -> str:
    """The form, a name of FORMS, for so many tokens of which each chooses k experts.

    Where Triton cannot run on a GPU, arithmetic decides: while the chosen experts are fewer than
    all, gathering reads less.

    Args:
      experts: of this device.
      backend: "cpu" or "gpu".
      unsupported: why Triton does not take the operands; None when it does.
    """
    if backend == "cpu":
        return "looped"
    if forms.choose("experts", "auto", FORMS, unsupported) == "triton":
        return "triton"
    return "gathered" if rows * k <= experts else "grouped"


def tile_rows(n: int, k: int, experts: int, *, num_shards: int, least: int, most: int) -> int:
    """Rows of a tile: what an expert gets on average, as a power of two, within bounds.

    Args:
      least: the smallest tile, unless there are fewer tokens.
      most: the largest tile.
    """
    average = -(-n * k // (experts * num_shards))
    return min(most, max(1 << (average - 1).bit_length(), min(least, n)))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The n * k pairs (token, choice), sorted by expert and cut into tiles.

    There are as many tiles as there can ever be, so a tile may have no rows.
    """

    rows: int  # of a tile, at most
    place: Int[Array, " pairs"]  # of pair t*k + j among the sorted ones
    token: Int[Array, " pairs"]  # of each place
    expert: Int[Array, " t"]  # of each tile; E where it has no rows
    first: Int[Array, " t"]  # place at which the tile begins
    size: Int[Array, " t"]  # rows that the tile has


def make_tiles(topk_ids: Int[Array, "n k"], experts: int, rows: int) -> Tiles:
    """Tiles of at most `rows` rows of one expert each; those with rows come first.

    Pairs of no expert come last and are in no tile. Everything is compared with everything: on a
    GPU each line is then one launch, where a search or a running sum is a loop of launches.
    """
    n, k = topk_ids.shape
    flat = topk_ids.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True)
    # places before each expert's first
    start = (flat[:, None] < jnp.arange(experts + 1)[None]).sum(axis=0, dtype=jnp.int32)
    size = start[1:] - start[:-1]
    tiles = -(-size // rows)
    earlier_experts = jnp.tri(experts, k=-1, dtype=bool)
    before = jnp.where(earlier_experts, tiles[None], 0).sum(axis=1, dtype=jnp.int32)
    t = jnp.arange(max_tiles(n, k, experts, rows), dtype=jnp.int32)
    expert = (t[:, None] >= (before + tiles)[None]).sum(axis=1, dtype=jnp.int32)
    e = jnp.minimum(expert, experts - 1)
    done = (t - before[e]) * rows  # rows of the expert that earlier tiles hold
    size = jnp.where(expert < experts, jnp.minimum(size[e] - done, rows), 0)
    token = (order // k).astype(jnp.int32)
    return Tiles(rows, jnp.argsort(order), token, expert, start[e] + done, size)


def max_tiles(n: int, k: int, experts: int, rows: int) -> int:
    """How many tiles `make_tiles` can make at most: an expert has at most n rows."""
    return min(n * k, experts + n * k // rows, experts * -(-n // rows))


def tiles_of_one_token(topk_ids: Int[Array, "1 k"], experts: int) -> Tiles:
    """The tiles of a single token, which chooses an expert once: nothing has to be sorted.

    Each choice is a tile, in its own order; tiles without rows lie anywhere.
    """
    flat = topk_ids[0].astype(jnp.int32)
    at = jnp.arange(len(flat), dtype=jnp.int32)
    return Tiles(1, at, jnp.zeros_like(at), flat, at, (flat < experts).astype(jnp.int32))


def combine(
    out: Float[Array, "pairs D"], tiles: Tiles, routing_weights: Float[Array, "n k"]
) -> Float[Array, "n D"]:
    """Brings pairs back into the order of tokens and sums each token's experts.

    It gathers, because adding by index would not be deterministic.
    """
    n, k = routing_weights.shape
    return weighted_sum(out[tiles.place].reshape(n, k, -1), routing_weights)


def weighted_sum(
    pairs: Float[Array, "n k D"], routing_weights: Float[Array, "n k"]
) -> Float[Array, "n D"]:
    """Sums each token's experts. What weighs nothing may hold anything."""
    share = routing_weights.astype(jnp.float32)[..., None]
    return jnp.where(share != 0, pairs.astype(jnp.float32) * share, 0).sum(axis=1)
