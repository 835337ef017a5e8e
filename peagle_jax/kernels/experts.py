"""Mixture of experts: every token through the few experts that a router chose for it. Four forms of one sum.

    y[t] = sum over j of weight[t, j] * expert[chosen[t, j]](x[t])

`chosen` may hold `bank.count`, which is no expert: another device's, where experts are spread over devices.
"""

import logging
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOG = logging.getLogger(__name__)
TILE = 64  # rows of one expert computed together, at most
FEW = 4  # a tile of so many rows costs a CPU little more than one row: it is bound by reading the weights (LOG.md)


@runtime_checkable
class Bank(Protocol):
    """E experts, three ways to run them."""

    count: int

    def one(self, expert: Int[Array, ""], rows: Float[Array, "M D"]) -> Float[Array, "M D"]:
        """One expert over all rows."""
        ...

    def each(self, experts: Int[Array, " m"], rows: Float[Array, "m D"]) -> Float[Array, "m D"]:
        """An expert of its own a row."""
        ...

    def groups(self, sizes: Int[Array, " E"], experts: Int[Array, " m"], rows: Float[Array, "m D"]) -> Float[Array, "m D"]:
        """Rows sorted by expert, `sizes` of each."""
        ...


def reference(x: Float[Array, "n D"], chosen: Int[Array, "n k"], weight: Float[Array, "n k"], bank: Bank) -> Float[Array, "n D"]:
    """Every expert for every token: the definition of correct, and E/k times the work."""

    def add(y, expert):
        share = jnp.where(chosen == expert, weight, 0).sum(axis=1).astype(jnp.float32)
        return y + bank.one(expert, x).astype(jnp.float32) * share[:, None], None

    y, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), jnp.arange(bank.count))
    return y.astype(x.dtype)


def looped(x: Float[Array, "n D"], chosen: Int[Array, "n k"], weight: Float[Array, "n k"], bank: Bank) -> Float[Array, "n D"]:
    """A loop over tiles of rows sorted by expert; as many rounds as there are tiles.

    Reads each chosen expert once a tile, and no other. For CPUs: a round costs nothing there. Not differentiable in reverse.
    """
    (n, D), k = x.shape, chosen.shape[1]
    m, E = n * k, bank.count
    tile = tile_rows(n, k, E)
    order, token, sizes = _sorted(chosen, E)
    tiles = -(-sizes // tile)
    first, start = jnp.cumsum(tiles) - tiles, jnp.cumsum(sizes) - sizes
    expert = jnp.searchsorted(jnp.cumsum(tiles), jnp.arange(min(m, E + m // tile)), side="right")
    rows = jnp.pad(x[token], [(0, tile), (0, 0)])

    def run(i, out):
        e = expert[i]
        at = start[e] + (i - first[e]) * tile
        y = bank.one(e, jax.lax.dynamic_slice_in_dim(rows, at, tile))
        # rows past the expert's last are another's: they are overwritten, because that one's tile comes later
        return jax.lax.dynamic_update_slice_in_dim(out, y, at, 0)

    out = jax.lax.fori_loop(0, tiles.sum(), run, jnp.zeros((m + tile, D), x.dtype))[:m]
    return _combine(out, order, weight * (chosen < E))


def gathered(x: Float[Array, "n D"], chosen: Int[Array, "n k"], weight: Float[Array, "n k"], bank: Bank) -> Float[Array, "n D"]:
    """The chosen experts' weights gathered, one batched product: a few rows on a GPU, where rounds of a loop cost launches."""
    n, k = chosen.shape
    y = bank.each(jnp.minimum(chosen, bank.count - 1).reshape(-1), jnp.repeat(x, k, axis=0))
    share = jnp.where(chosen < bank.count, weight, 0).astype(jnp.float32)
    return (y.astype(jnp.float32).reshape(n, k, -1) * share[..., None]).sum(axis=1).astype(x.dtype)


def grouped(x: Float[Array, "n D"], chosen: Int[Array, "n k"], weight: Float[Array, "n k"], bank: Bank) -> Float[Array, "n D"]:
    """Rows sorted by expert and one grouped matmul (`jax.lax.ragged_dot`), for many rows on a GPU.

    Not for CPUs, where XLA computes every expert for every row.
    """
    order, token, sizes = _sorted(chosen, bank.count)
    ids = jnp.minimum(chosen.reshape(-1)[order], bank.count - 1)
    return _combine(bank.groups(sizes, ids, x[token]), order, weight * (chosen < bank.count))


FORMS = {"reference": reference, "looped": looped, "gathered": gathered, "grouped": grouped}


def choose(rows: int, k: int, experts: int, backend: str) -> str:
    """The form for so many tokens; said once a shape.

    On a GPU by arithmetic, not measured there: while the chosen experts are fewer than all, gathering reads less.
    """
    form = "looped" if backend == "cpu" else "gathered" if rows * k <= experts else "grouped"
    LOG.debug("experts: %s for %d tokens, %d of %d experts each, on %s", form, rows, k, experts, backend)
    return form


def tile_rows(n: int, k: int, experts: int) -> int:
    """Rows of a tile: what an expert gets on average, as a power of two."""
    average = -(-n * k // experts)
    return min(TILE, max(1 << (average - 1).bit_length(), min(FEW, n)))


def _sorted(chosen: Int[Array, "n k"], experts: int):
    """Order of the n*k (token, choice) pairs by expert, the token of each in that order, and how many each expert has."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    return order, order // chosen.shape[1], jnp.bincount(flat, length=experts + 1)[:experts]


def _combine(out: Float[Array, "m D"], order: Int[Array, " m"], weight: Float[Array, "n k"]) -> Float[Array, "n D"]:
    """Back into the order of tokens, and summed over each one's experts. Gathers: adding by index would not be deterministic."""
    n, k = weight.shape
    own = out[jnp.argsort(order)].reshape(n, k, -1).astype(jnp.float32)
    share = weight.astype(jnp.float32)[..., None]
    return jnp.where(share != 0, own * share, 0).sum(axis=1).astype(out.dtype)
