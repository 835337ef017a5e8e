"""Attention of packed rows in blocks of queries and keys, with a running softmax.

FlashAttention's algorithm (arXiv:2205.14135) as a loop of XLA's. A block of queries visits the
blocks of keys between the first and the last key that any of its rows sees, and no others: half of
them where rows are causal, and fewer where a sequence holds several documents. Scores are never
kept; the backward pass computes them again from the log-sum-exp.

Within a block rows stand as [B * G, R * size, ..]: one matrix product for each sequence and KV
head, with its R = N / G query heads behind each other.
"""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels.attention import MASKED
from peagle_jax.kernels.packed_attention_chains import (
    BLOCK,
    Chains,
    padded,
    visible_in_chains,
)


class Layout(NamedTuple):
    """Sizes: of sequences, KV heads, query heads of each, and blocks; hashable.

    Attributes:
      queries: of a block, a multiple of BLOCK.
      keys: of a block.
      before: as of `Chains`.
    """

    B: int
    G: int
    R: int
    queries: int
    keys: int
    before: int

    def of_queries(self, x: Float[Array, "B P N *rest"]) -> Array:
        """[B P N ..] -> [blocks B*G R*queries ..]."""
        x = x.reshape(self.B, -1, self.queries, self.G, self.R, *x.shape[3:])
        x = jnp.moveaxis(x, (1, 0, 3, 4, 2), range(5))
        return x.reshape(-1, self.B * self.G, self.R * self.queries, *x.shape[5:])

    def to_queries(self, x: Array) -> Float[Array, "B P N *rest"]:
        """The inverse of `of_queries`."""
        x = x.reshape(-1, self.B, self.G, self.R, self.queries, *x.shape[3:])
        x = jnp.moveaxis(x, (1, 0, 4, 2, 3), range(5))
        return x.reshape(self.B, -1, self.G * self.R, *x.shape[5:])

    def of_keys(self, x: Float[Array, "B n G H"]) -> Array:
        """[B n G H] -> [blocks B*G keys H], padded with zeros."""
        B, n, G, H = x.shape
        x = jnp.pad(x, [(0, 0), (0, -n % self.keys), (0, 0), (0, 0)])
        x = x.reshape(B, -1, self.keys, G, H).transpose(1, 0, 3, 2, 4)
        return x.reshape(-1, B * G, self.keys, H)

    def to_keys(self, x: Array, n: int) -> Float[Array, "B n G H"]:
        """The inverse of `of_keys`."""
        x = x.reshape(-1, self.B, self.G, self.keys, x.shape[-1]).transpose(1, 0, 3, 2, 4)
        return x.reshape(self.B, -1, self.G, x.shape[-1])[:, :n]

    def of_rows(self, x: Array) -> Array:
        """[B P ..] -> [blocks B P/blocks ..], of what heads share; also of blocks of chains."""
        rows = self.queries if x.ndim == 2 else self.queries // BLOCK
        return jnp.moveaxis(x.reshape(self.B, -1, rows, *x.shape[2:]), 1, 0)

    def to_chains(self, x: Array) -> Array:
        """[blocks B b/blocks ..] -> [B b ..]: the inverse of `of_rows`, of blocks of chains."""
        return jnp.moveaxis(x, 0, 1).reshape(self.B, -1, *x.shape[3:])

    def in_chains(self, x: Array) -> Array:
        """[B*G R*queries ..] -> [B*blocks*G R*BLOCK ..], of blocks of chains."""
        x = x.reshape(self.B, self.G, self.R, -1, BLOCK, *x.shape[2:])
        x = jnp.moveaxis(x, (0, 3, 1, 2, 4), range(5))
        return x.reshape(-1, self.R * BLOCK, *x.shape[5:])

    def from_chains(self, x: Array) -> Array:
        """The inverse of `in_chains`."""
        x = x.reshape(self.B, -1, self.G, self.R, BLOCK, *x.shape[2:])
        x = jnp.moveaxis(x, (0, 2, 3, 1, 4), range(5))
        return x.reshape(self.B * self.G, -1, *x.shape[5:])

    def chain_keys(self, x: Float[Array, "B b c G H"]) -> Array:
        """[B b c G H] -> [B*b*G c H]."""
        return jnp.moveaxis(x, 3, 2).reshape(-1, x.shape[2], x.shape[-1])

    def to_chain_keys(self, x: Array) -> Float[Array, "B b c G H"]:
        """The inverse of `chain_keys`."""
        return jnp.moveaxis(x.reshape(self.B, -1, self.G, *x.shape[1:]), 2, 3)

    def visible(self, first: Array, last: Array, block: Int[Array, ""]) -> Array:
        """Which keys of a block the rows of a block of queries see: [B*G R*queries keys]."""
        key = block * self.keys + jnp.arange(self.keys)[None, None]
        seen = (key >= first[..., None]) & (key <= last[..., None])
        shape = (self.B, self.G, self.R, self.queries, self.keys)
        return jnp.broadcast_to(seen[:, None, None], shape).reshape(self.B * self.G, -1, self.keys)

    def visible_in_chains(self, chain_len: Array, ahead: Array, num_keys: int) -> Array:
        """Likewise of the keys of chains: [B*b*G R*BLOCK c]."""
        seen = visible_in_chains(chain_len, ahead, self.before, num_keys)
        shape = (*seen.shape[:2], self.G, self.R, *seen.shape[2:])
        seen = jnp.broadcast_to(seen[:, :, None, None], shape)
        return seen.reshape(-1, self.R * BLOCK, num_keys)

    def visited(self, first: Array, last: Array) -> tuple[Array, Array]:
        """(first, end) of the blocks of keys that each block of queries visits."""
        sees = last >= first
        end = jnp.max(jnp.where(sees, last, -1), axis=(1, 2)) // self.keys + 1
        begin = jnp.min(jnp.where(sees, first, jnp.iinfo(first.dtype).max), axis=(1, 2))
        return jnp.minimum(begin // self.keys, end), end


def attend_in_blocks(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B n G H"],
    v: Float[Array, "B n G H"],
    first: Int[Array, "B P"],
    last: Int[Array, "B P"],
    chains: Chains | None,
    scale: float,
    sizes: tuple[int, int],
) -> tuple[Float[Array, "B P N H"], Float[Array, "B P N"]]:
    """As `packed_attention_dense.attend_dense`.

    Args:
      sizes: queries and keys of a block; the former are a multiple of BLOCK.
    """
    (B, P, N, _), (_, n, G, _) = q.shape, k.shape
    queries = min(sizes[0], P + -P % BLOCK)

    of_chains, before = None, 0
    if chains is not None:
        parts = (chains.keys, chains.values, chains.chain_len, chains.ahead)
        of_chains = tuple(padded(x, queries // BLOCK) for x in parts)
        before = chains.before
    layout = Layout(B, G, N // G, queries, min(sizes[1], max(1, n)), before)
    # keys behind the last one are padding
    first, last = padded(first, queries), padded(jnp.minimum(last, n - 1), queries, -1)
    result = _attend(layout, scale, padded(q, queries), k, v, first, last, of_chains)
    y, lse = cast(tuple[Array, Array], result)
    return y[:, :P], lse[:, :P]


def _product(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """A product for each of the leading axis, summed in float32 over one axis of each."""
    contracted = ((axes[0],), (axes[1],))
    return jax.lax.dot_general(a, b, (contracted, ((0,), (0,))), preferred_element_type=jnp.float32)


def _transposed(x: Array) -> Array:
    """With the last two axes swapped."""
    return jnp.swapaxes(x, -1, -2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(layout, scale, q, k, v, first, last, chains):
    """Attention and its log-sum-exp, of whole blocks of queries."""
    return _forward(layout, scale, q, k, v, first, last, chains)[0]


def _forward(layout, scale, q, k, v, first, last, chains):
    queries, keys, values = layout.of_queries(q), layout.of_keys(k), layout.of_keys(v)
    bounds = layout.of_rows(first), layout.of_rows(last)
    of_chains = jax.tree.map(layout.of_rows, chains)

    def of_block(args):
        q, (first, last), (begin, end), chains = args
        if chains is None:
            peak = jnp.full(q.shape[:2], MASKED, jnp.float32)
            carry = peak, jnp.zeros_like(peak), jnp.zeros(q.shape, jnp.float32)
        else:
            carry = _over_chains(layout, scale, q, *chains)

        def over_keys(block, carry):
            peak, total, sums = carry
            scores = _product(q, keys[block], (2, 2)) * scale
            scores = jnp.where(layout.visible(first, last, block), scores, MASKED)
            # where a row has seen nothing yet, its peak is MASKED, and what it has added up of
            # such scores becomes nothing by the factor below
            new_peak = jnp.maximum(peak, scores.max(axis=-1))
            factor, exps = jnp.exp(peak - new_peak), jnp.exp(scores - new_peak[..., None])
            weighted = _product(exps.astype(values.dtype), values[block], (2, 1))
            return (
                new_peak,
                total * factor + exps.sum(axis=-1),
                sums * factor[..., None] + weighted,
            )

        peak, total, sums = jax.lax.fori_loop(begin, end, over_keys, carry)
        total = jnp.where(total > 0, total, 1.0)  # of rows that see nothing at all
        return (sums / total[..., None]).astype(q.dtype), peak + jnp.log(total)

    visited = layout.visited(*bounds)
    y, lse = jax.lax.map(of_block, (queries, bounds, visited, of_chains))
    result = layout.to_queries(y), layout.to_queries(lse)
    return result, (q, k, v, first, last, chains, y, lse)


def _over_chains(layout, scale, q, keys, values, chain_len, ahead):
    """(peak, total, sums) of the scores of a block of queries over its chains."""
    seen = layout.visible_in_chains(chain_len, ahead, keys.shape[2])
    scores = _product(layout.in_chains(q), layout.chain_keys(keys), (2, 2)) * scale
    scores = jnp.where(seen, scores, MASKED)
    peak = scores.max(axis=-1)
    exps = jnp.exp(scores - peak[..., None])
    sums = _product(exps.astype(values.dtype), layout.chain_keys(values), (2, 1))
    return tuple(layout.from_chains(x) for x in (peak, exps.sum(axis=-1), sums))


def _backward(layout, scale, saved, cotangents):
    q, k, v, first, last, chains, y, lse = saved
    dy, dlse = map(layout.of_queries, cotangents)
    queries, keys, values = layout.of_queries(q), layout.of_keys(k), layout.of_keys(v)
    bounds = layout.of_rows(first), layout.of_rows(last)
    # of weights p = exp(score - lse): d score = p * (dp - sum(dy * y) + dlse), dp = dy . v
    shift = dlse - jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)

    def weights_and_dscores(seen, q, k, v, dy, lse, shift):
        weights = jnp.where(seen, jnp.exp(_product(q, k, (2, 2)) * scale - lse[..., None]), 0.0)
        dscores = weights * (_product(dy, v, (2, 2)) + shift[..., None]) * scale
        return weights.astype(v.dtype), dscores.astype(q.dtype)

    def of_block(dkeys_dvalues, args):
        q, transposed_q, (first, last), (begin, end), dy, transposed_dy, lse, shift, chains = args

        def over_keys(block, carry):
            dkeys, dvalues, dq = carry
            seen = layout.visible(first, last, block)
            weights, dscores = weights_and_dscores(
                seen, q, keys[block], values[block], dy, lse, shift
            )
            dkeys = dkeys.at[block].add(_product(transposed_q, dscores, (2, 1)))
            dvalues = dvalues.at[block].add(_product(transposed_dy, weights, (2, 1)))
            return dkeys, dvalues, dq + _product(dscores, keys[block], (2, 1))

        carry = *dkeys_dvalues, jnp.zeros(q.shape, jnp.float32)
        *dkeys_dvalues, dq = jax.lax.fori_loop(begin, end, over_keys, carry)
        of_chains = None
        if chains is not None:
            chain_keys, chain_values = (layout.chain_keys(x) for x in chains[:2])
            rows = tuple(layout.in_chains(x) for x in (q, dy, lse, shift))
            seen = layout.visible_in_chains(*chains[2:], chain_keys.shape[1])
            weights, dscores = weights_and_dscores(
                seen, rows[0], chain_keys, chain_values, *rows[1:]
            )
            dq += layout.from_chains(_product(dscores, chain_keys, (2, 1)))
            of_chains = _product(dscores, rows[0], (1, 1)), _product(weights, rows[1], (1, 1))
            of_chains = tuple(layout.to_chain_keys(x) for x in of_chains)
        return tuple(dkeys_dvalues), (dq.astype(q.dtype), of_chains)

    # A product that contracts the rows of both operands takes three times as long on a CPU as one
    # of operands as they stand. So the rows of queries and dy are their last axis, too, and so are
    # the keys of the gradients [blocks B*G H keys] until the end.
    nothing = tuple(jnp.zeros(_transposed(x).shape, jnp.float32) for x in (keys, values))
    of_chains = jax.tree.map(layout.of_rows, chains)
    args = (queries, _transposed(queries), bounds, layout.visited(*bounds))
    args += (dy, _transposed(dy), lse, shift, of_chains)
    (dkeys, dvalues), (dq, of_chains) = jax.lax.scan(of_block, nothing, args)
    dkeys, dvalues = _transposed(dkeys), _transposed(dvalues)
    dchains = None
    if of_chains is not None:
        dk, dv = (layout.to_chains(x) for x in of_chains)
        dchains = (dk.astype(k.dtype), dv.astype(v.dtype), None, None)
    n = k.shape[1]
    dk, dv = layout.to_keys(dkeys, n).astype(k.dtype), layout.to_keys(dvalues, n).astype(v.dtype)
    return layout.to_queries(dq), dk, dv, None, None, dchains


_attend.defvjp(_forward, _backward)
