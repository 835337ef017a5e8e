"""Attention of COD training: every packed row sees a stretch of the depth-0 keys, and a few rows that end in itself.

Packed rows are ordered by (anchor, depth) and documents are contiguous, so what a row sees is two intervals, three numbers: keys
`first` .. `last` of the depth-0 rows, and the `own` rows up to itself among the packed ones. No mask exists, and a kernel skips what
lies outside by arithmetic, not by lists.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.kernels.attention import MASKED
from peagle_jax.kernels.choose import choose, non_16bit_reason

CHUNK = (
    2048  # queries whose scores exist at one time in the reference: bounds memory at long context
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionIntervals:
    """What each of P rows sees: n depth-0 rows, followed by P - n packed ones."""

    first: Int[Array, "B P"]  # of the depth-0 keys; nothing where first > last
    last: Int[Array, "B P"]
    own: Int[Array, "B P"]  # packed rows, ending in itself; 0 in depth-0 rows and in padding
    depth0: int = dataclasses.field(metadata={"static": True})  # n
    chain: int = dataclasses.field(metadata={"static": True})  # most that `own` can be


def reference(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    seen: AttentionIntervals,
    scale: float,
) -> tuple[Float[Array, "B P N H"], Float[Array, "B P N"]]:
    """Softmax attention and the log-sum-exp of its scores (about -1e30 where a row sees nothing), scores in float32."""
    n = seen.depth0
    y, lse = _prefix(q, k[:, :n], v[:, :n], seen.first, seen.last, scale)
    if q.shape[1] == n:
        return y, lse
    own = [
        (_shift(k[:, n:], back), _shift(v[:, n:], back), seen.own[:, n:] > back)
        for back in range(seen.chain)
    ]
    packed, packed_lse = merge(q[:, n:], y[:, n:], lse[:, n:], own, scale)
    return jnp.concatenate([y[:, :n], packed], axis=1), jnp.concatenate(
        [lse[:, :n], packed_lse], axis=1
    )


def _prefix(q, k, v, first, last, scale):
    def chunk(args):
        q, first, last = args
        B, P, N, H = q.shape
        n, G = k.shape[1:3]
        R = N // G
        slot = jnp.arange(n)[None, None]
        inside = (slot >= first[..., None]) & (slot <= last[..., None])
        # one matrix product a (row, KV head), its queries grouped: half the time of one einsum over all axes on CPU (LOG.md)
        grouped = q.reshape(B, P, G, R, H).transpose(0, 2, 3, 1, 4).reshape(B * G, R * P, H)
        keys, values = (
            k.transpose(0, 2, 3, 1).reshape(B * G, H, n),
            v.transpose(0, 2, 1, 3).reshape(B * G, n, H),
        )
        scores = jnp.matmul(grouped, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(inside[:, None, None], scores.reshape(B, G, R, P, n), MASKED)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(v.dtype).reshape(B * G, R * P, n)
        y = jnp.matmul(weights, values).reshape(B, G, R, P, H)
        return y.transpose(0, 3, 1, 2, 4).reshape(B, P, N, H), lse.transpose(0, 3, 1, 2).reshape(
            B, P, N
        )

    P = q.shape[1]
    if P <= CHUNK:
        return chunk((q, first, last))
    parts = -(-P // CHUNK)

    def pad(x):
        return jnp.pad(x, [(0, 0), (0, parts * CHUNK - P), *[(0, 0)] * (x.ndim - 2)])

    def split(x):
        return jnp.moveaxis(pad(x).reshape(x.shape[0], parts, CHUNK, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(q.shape[0], -1, *x.shape[3:])[:, :P]

    y, lse = jax.lax.map(jax.checkpoint(chunk), tuple(split(x) for x in (q, first, last)))
    return join(y), join(lse)


def merge(
    q,
    y,
    lse,
    own: list[tuple[Float[Array, "B P G H"], Float[Array, "B P G H"], Bool[Array, "B P"]]],
    scale: float,
):
    """Adds a few keys that a row has of its own, (key, value, whether it is seen) each, to attention that was done.

    Args:
      y, lse: as `reference` gives them.

    Returns:
      The same, with those keys.
    """
    if not own:
        return y, lse
    B, P, N, H = q.shape
    G = own[0][0].shape[2]
    grouped = q.reshape(B, P, G, N // G, H)
    scores = [
        jnp.where(
            here[..., None, None],
            jnp.einsum("BPGRH,BPGH->BPGR", grouped, k, preferred_element_type=jnp.float32) * scale,
            MASKED,
        )
        for k, _, here in own
    ]
    lse = lse.reshape(B, P, G, N // G)
    total = jax.nn.logsumexp(jnp.stack([lse, *scores]), axis=0)
    out = y.reshape(grouped.shape) * jnp.exp(lse - total)[..., None].astype(y.dtype)
    for score, (_, v, _) in zip(scores, own, strict=True):
        out += jnp.exp(score - total)[..., None].astype(y.dtype) * v[:, :, :, None]
    return out.reshape(B, P, N, H), total.reshape(B, P, N)


def _shift(x: Float[Array, "B M G H"], back: int) -> Float[Array, "B M G H"]:
    """Row m becomes row m - back; the first rows become zeros."""
    return jnp.pad(x, [(0, 0), (back, 0), (0, 0), (0, 0)])[:, : x.shape[1]]


def triton(q, k, v, seen: AttentionIntervals, scale: float):
    from peagle_jax.kernels import packed_attention_triton

    return packed_attention_triton.attend(q, k, v, seen, scale)


FORMS = {"reference": reference, "triton": triton}


def unsupported(q, k, v) -> str | None:
    """Why the fast form cannot take these; None when it can."""
    H = q.shape[-1]
    return non_16bit_reason(q, k, v) or (
        f"they were compiled for heads up to 128, and these have {H}" if H > 128 else None
    )


def attend(q, k, v, seen: AttentionIntervals, scale: float, *, form: str):
    """As `reference`, by a form of FORMS or "auto". Rows that see nothing give anything."""
    return FORMS[choose("packed_attention", form, FORMS, unsupported(q, k, v))](
        q, k, v, seen, scale
    )
