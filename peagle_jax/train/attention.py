"""Training attention: a causal prefix part and a short chain part, merged by log-sum-exp.

Element (a, d) sees every depth-0 element of its document with anchor <= a, and its own chain (a, 1) .. (a, d): exactly
what the runtime shows it. No packed-by-packed mask exists, and the cost is packed * context, not packed^2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.kernels.attention import MASKED
from peagle_jax.types import AttentionRule

QUERY_CHUNK = 2048  # queries whose scores exist at one time: bounds memory at long context


def prefix(
    q, k, v, anchor: Int[Array, "B P"], reach: Int[Array, "B P"], q_doc: Int[Array, "B P"], k_doc: Int[Array, "B n"], rule: AttentionRule
):
    """Attention of P packed queries over n depth-0 keys.

    Args:
      q, k, v: [B P N H], [B n G H], [B n G H].
      anchor: last key each query sees.
      reach: position of each query; with a window it sees keys after `reach - window`.
      q_doc, k_doc: document of every query and key; -1 sees nothing and is seen by nothing.
      rule: sinks not included: `with_sinks` adds them.

    Returns:
      Output [B P N H], and the log-sum-exp of its scores [B P N] (about -1e30 where nothing was seen).
    """

    def chunk(args):
        q, anchor, reach, q_doc = args
        B, P, N, H = q.shape
        G, n = k.shape[2], k.shape[1]
        R = N // G
        slot = jnp.arange(n)[None, None]
        seen = (slot <= anchor[..., None]) & (q_doc[..., None] == k_doc[:, None]) & (q_doc[..., None] >= 0)
        if rule.window is not None:
            seen &= slot > reach[..., None] - rule.window
        # one matrix product a (row, KV head), its queries grouped: half the time of one einsum over all axes on CPU (LOG.md)
        grouped = q.reshape(B, P, G, R, H).transpose(0, 2, 3, 1, 4).reshape(B * G, R * P, H)
        keys, values = k.transpose(0, 2, 3, 1).reshape(B * G, H, n), v.transpose(0, 2, 1, 3).reshape(B * G, n, H)
        scores = jnp.matmul(grouped, keys, preferred_element_type=jnp.float32) * rule.scale
        scores = jnp.where(seen[:, None, None], scores.reshape(B, G, R, P, n), MASKED)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(v.dtype).reshape(B * G, R * P, n)
        y = jnp.matmul(weights, values).reshape(B, G, R, P, H)
        return y.transpose(0, 3, 1, 2, 4).reshape(B, P, N, H), lse.transpose(0, 3, 1, 2).reshape(B, P, N)

    P = q.shape[1]
    if P <= QUERY_CHUNK:
        return chunk((q, anchor, reach, q_doc))
    parts = -(-P // QUERY_CHUNK)
    pad = lambda x: jnp.pad(x, [(0, 0), (0, parts * QUERY_CHUNK - P), *[(0, 0)] * (x.ndim - 2)])  # noqa: E731
    split = lambda x: jnp.moveaxis(pad(x).reshape(x.shape[0], parts, QUERY_CHUNK, *x.shape[2:]), 1, 0)  # noqa: E731
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(q.shape[0], -1, *x.shape[3:])[:, :P]  # noqa: E731
    y, lse = jax.lax.map(jax.checkpoint(chunk), tuple(split(x) for x in (q, anchor, reach, q_doc)))
    return join(y), join(lse)


def with_sinks(y: Float[Array, "B P N H"], lse: Float[Array, "B P N"], sinks: Float[Array, " N"] | None) -> Float[Array, "B P N H"]:
    """What the softmax gives when one more logit a head takes part in it."""
    if sinks is None:
        return y
    share = jnp.exp(lse - jnp.logaddexp(lse, sinks.astype(lse.dtype)[None, None]))
    return y * share[..., None].astype(y.dtype)


def merge_chain(q, y, lse, chain: list[tuple[Float[Array, "B P G H"], Float[Array, "B P G H"], Bool[Array, "B P"]]], scale: float):
    """Adds a few keys a query has of its own to attention already done over the prefix.

    Args:
      q: [B P N H].
      y, lse: what `prefix` returned.
      chain: (key, value, whether it is seen), one a chain step, aligned with the queries.
    """
    if not chain:
        return y
    B, P, N, H = q.shape
    G = chain[0][0].shape[2]
    grouped = q.reshape(B, P, G, N // G, H)
    scores = [
        jnp.where(seen[..., None, None], jnp.einsum("BPGRH,BPGH->BPGR", grouped, k, preferred_element_type=jnp.float32) * scale, MASKED)
        for k, _, seen in chain
    ]
    lse = lse.reshape(B, P, G, N // G)
    total = jax.nn.logsumexp(jnp.stack([lse, *scores]), axis=0)
    out = y.reshape(grouped.shape) * jnp.exp(lse - total)[..., None].astype(y.dtype)
    for score, (_, v, _) in zip(scores, chain, strict=True):
        out += jnp.exp(score - total)[..., None].astype(y.dtype) * v[:, :, :, None]
    return out.reshape(B, P, N, H)


@dataclasses.dataclass(frozen=True)
class PackedCausal:
    """Causal attention within documents, for whole rows: the target's, and depth 0 of a head's."""

    document: Int[Array, "B T"]

    def __call__(self, layer: int, q, k, v, state, rule: AttentionRule):
        """`state` holds the keys and values of every layer called so far, for those that share them."""
        held = {} if state is None else state
        k, v = held[layer] if k is None else (k, v)
        here = jnp.broadcast_to(jnp.arange(q.shape[1])[None], q.shape[:2])
        y, lse = prefix(q, k, v, here, here, self.document, self.document, rule)
        return with_sinks(y, lse, rule.sinks), {**held, layer: (k, v)}


@dataclasses.dataclass(frozen=True)
class PrefixChain:
    """Attention over [n depth-0 rows, M packed depth >= 1 rows], of a draft head: no sinks, every layer its own keys.

    The packed rows are ordered by (anchor, depth), so the chain of row m is the rows m-depth+1 .. m: a band, read by
    shifting the keys. No gather, and no scatter in the backward pass.
    """

    anchor: Int[Array, "B M"]
    depth: Int[Array, "B M"]
    document: Int[Array, "B n"]  # of the depth-0 rows
    depths: int  # K

    def __call__(self, layer: int, q, k, v, state, rule: AttentionRule):
        n = self.document.shape[1]
        here = jnp.broadcast_to(jnp.arange(n)[None], self.document.shape)
        anchor = jnp.concatenate([here, self.anchor], axis=1)
        reach = jnp.concatenate([here, self.anchor + self.depth], axis=1)
        doc = jnp.concatenate([self.document, jnp.take_along_axis(self.document, self.anchor, axis=1)], axis=1)
        y, lse = prefix(q, k[:, :n], v[:, :n], anchor, reach, doc, self.document, rule)
        chain = []
        for back in range(self.depths - 1):
            seen = self.depth > back
            if rule.window is not None:
                seen &= back < rule.window
            chain.append((_shift(k[:, n:], back), _shift(v[:, n:], back), seen))
        packed = merge_chain(q[:, n:], y[:, n:], lse[:, n:], chain, rule.scale)
        return jnp.concatenate([y[:, :n], packed], axis=1), state


def _shift(x: Float[Array, "B M G H"], back: int) -> Float[Array, "B M G H"]:
    """Row m becomes row m - back; the first rows become zeros."""
    return jnp.pad(x, [(0, 0), (back, 0), (0, 0), (0, 0)])[:, : x.shape[1]]
