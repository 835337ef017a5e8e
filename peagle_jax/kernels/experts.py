"""Mixture of experts: every token through the few experts that a router chose for it. Four forms of one sum.

    y[t] = sum over j of weight[t, j] * expert[chosen[t, j]](x[t])

`chosen` may hold `bank.count`, which is no expert: another device's, where experts are spread over devices. Sums are float32, whatever
the weights are: those of several devices are yet to be added.
"""

import functools
import logging
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOG = logging.getLogger(__name__)
TILE = 64  # rows of one expert in one round of a CPU's loop, at most: more wait for the slowest expert (LOG.md)
FEW = 4  # a tile of so many rows costs a CPU little more than one row: it is bound by reading the weights
GPU_TILE = 16  # rows, at least: what a tensor core takes at once


@runtime_checkable
class Bank(Protocol):
    """E experts, two ways to run them."""

    count: int  # E
    parts: int  # equal banks over which the experts are spread

    def one(self, expert: Int[Array, ""], rows: Float[Array, "M D"]) -> Float[Array, "M D"]:
        """One expert over all rows."""
        ...

    def tiles(self, experts: Int[Array, " t"], rows: Float[Array, "t M D"]) -> Float[Array, "t M D"]:
        """An expert of its own for each of t groups of rows."""
        ...


def reference(x: Float[Array, "n D"], chosen: Int[Array, "n k"], weight: Float[Array, "n k"], bank: Bank) -> Float[Array, "n D"]:
    """Every expert for every token: the definition of correct, and E/k times the work."""

    def add(y, expert):
        share = jnp.where(chosen == expert, weight, 0).sum(axis=1).astype(jnp.float32)
        return y + bank.one(expert, x).astype(jnp.float32) * share[:, None], None

    y, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), jnp.arange(bank.count))
    return y


def looped(x: Float[Array, "n D"], chosen: Int[Array, "n k"], weight: Float[Array, "n k"], bank: Bank) -> Float[Array, "n D"]:
    """A loop over tiles of rows sorted by expert; as many rounds as there are tiles.

    Reads each chosen expert once a tile, and no other. For CPUs: a round costs nothing there. Not differentiable in reverse.
    """
    (n, D), k, E = x.shape, chosen.shape[1], bank.count
    m, tile = n * k, tile_rows(n, k, E, parts=bank.parts, few=FEW, most=TILE)
    order, token, (start, sizes), (first, expert) = _tiled(chosen, E, tile)
    rows = jnp.pad(x[token], [(0, tile), (0, 0)])

    def run(i, out):
        e = expert[i]
        at = start[e] + (i - first[e]) * tile
        y = bank.one(e, jax.lax.dynamic_slice_in_dim(rows, at, tile))
        # rows past the expert's last are another's: they are overwritten, because that one's tile comes later
        return jax.lax.dynamic_update_slice_in_dim(out, y, at, 0)

    rounds = (-(-sizes // tile)).sum()
    out = jax.lax.fori_loop(0, rounds, run, jnp.zeros((m + tile, D), x.dtype))[:m]
    return _combine(out, order, weight * (chosen < E))


def gathered(x: Float[Array, "n D"], chosen: Int[Array, "n k"], weight: Float[Array, "n k"], bank: Bank) -> Float[Array, "n D"]:
    """The chosen experts' weights gathered, one batched product: a few rows on a GPU, where rounds of a loop cost launches."""
    n, k = chosen.shape
    y = bank.tiles(jnp.minimum(chosen, bank.count - 1).reshape(-1), jnp.repeat(x, k, axis=0)[:, None])[:, 0]
    share = jnp.where(chosen < bank.count, weight, 0).astype(jnp.float32)
    return (y.astype(jnp.float32).reshape(n, k, -1) * share[..., None]).sum(axis=1)


def grouped(x: Float[Array, "n D"], chosen: Int[Array, "n k"], weight: Float[Array, "n k"], bank: Bank) -> Float[Array, "n D"]:
    """Rows sorted by expert, in tiles of one expert each, one batched product: many rows on a GPU.

    At most two tiles an expert, so it reads and copies each bank at most twice. `jax.lax.ragged_dot` would be the thing to
    use, but XLA makes a dense product of it, on GPUs too: every expert for every row, and E copies of the rows (LOG.md).
    """
    (n, D), k, E = x.shape, chosen.shape[1], bank.count
    tile = tile_rows(n, k, E, parts=bank.parts, few=GPU_TILE, most=n * k)
    order, token, (start, sizes), (first, expert) = _tiled(chosen, E, tile)
    e = jnp.minimum(expert, E - 1)
    at = (start[e] + (jnp.arange(len(expert)) - first[e]) * tile)[:, None] + jnp.arange(tile)[None]
    rows = x[token][jnp.minimum(at, n * k - 1)]  # [t M D]; a tile's rows past its expert's last are computed for nothing
    out = bank.tiles(e, rows).reshape(-1, D)
    mine = jnp.minimum(chosen.reshape(-1)[order], E - 1)
    place = jnp.arange(n * k) - start[mine]
    return _combine(out[(first[mine] + place // tile) * tile + place % tile], order, weight * (chosen < E))


FORMS = {"reference": reference, "looped": looped, "gathered": gathered, "grouped": grouped}


@functools.cache  # and so said once
def choose(rows: int, k: int, experts: int, backend: str) -> str:
    """The form for so many tokens, each of which chooses k; `experts` are those of this device.

    On a GPU by arithmetic, not measured there: while the chosen experts are fewer than all, gathering reads less.
    """
    form = "looped" if backend == "cpu" else "gathered" if rows * k <= experts else "grouped"
    LOG.info("experts: %s for %d tokens, %d of %d experts each, on %s", form, rows, k, experts, backend)
    return form


def tile_rows(n: int, k: int, experts: int, *, parts: int, few: int, most: int) -> int:
    """Rows of a tile: what an expert gets on average, as a power of two, within bounds."""
    average = -(-n * k // (experts * parts))
    return min(most, max(1 << (average - 1).bit_length(), min(few, n)))


def _tiled(chosen: Int[Array, "n k"], experts: int, tile: int):
    """The n*k (token, choice) pairs sorted by expert and cut into tiles.

    Returns:
      order of the pairs; the token of each; (first pair, number of pairs) of every expert; (first tile of every expert,
      expert of every tile: as many as there can be, `experts` for those there are not).
    """
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=experts + 1)[:experts]
    tiles = -(-sizes // tile)
    n = len(chosen)  # rows of an expert, at most: a token chooses it once
    most = min(flat.size, experts + flat.size // tile, experts * -(-n // tile))
    expert = jnp.searchsorted(jnp.cumsum(tiles), jnp.arange(most), side="right")
    return order, order // chosen.shape[1], (jnp.cumsum(sizes) - sizes, sizes), (jnp.cumsum(tiles) - tiles, expert)


def _combine(out: Float[Array, "m D"], order: Int[Array, " m"], weight: Float[Array, "n k"]) -> Float[Array, "n D"]:
    """Back into the order of tokens, and summed over each one's experts. Gathers: adding by index would not be deterministic."""
    n, k = weight.shape
    own = out[jnp.argsort(order)].reshape(n, k, -1).astype(jnp.float32)
    share = weight.astype(jnp.float32)[..., None]
    return jnp.where(share != 0, own * share, 0).sum(axis=1)
