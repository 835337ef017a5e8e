"""Attention of COD training: a row sees a stretch of depth-0 keys, and a few rows up to itself.

Packed rows are ordered by (anchor, depth), and documents are contiguous. So what a row sees is two
intervals, which are three numbers: keys `first` .. `last` of the depth-0 rows, and the last
`chain_len` packed rows up to the row itself. No mask exists, and a kernel skips what lies outside
by arithmetic, not by lists.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.kernels.attention import MASKED
from peagle_jax.kernels.choose import choose, non_16bit_reason

# Queries whose scores exist at one time in the reference: at most so many, fewer where these have
# more than so many scores, and never fewer than the last. Bounds memory at long context.
CHUNK, MAX_SCORES, MIN_CHUNK = 2048, 2**23, 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionIntervals:
    """What each of P rows sees: n depth-0 rows, followed by P - n packed ones."""

    first: Int[Array, "B P"]  # of the depth-0 keys; the row sees none where first > last
    last: Int[Array, "B P"]
    # packed rows that a packed row sees, itself included; 0 in depth-0 rows and in padding
    chain_len: Int[Array, "B P"]
    depth0: int = dataclasses.field(metadata={"static": True})  # n
    max_chain_len: int = dataclasses.field(metadata={"static": True})


# keys, values, and which rows see them
OwnKeys = tuple[Float[Array, "B P G H"], Float[Array, "B P G H"], Bool[Array, "B P"]]


def reference(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    intervals: AttentionIntervals,
    scale: float,
) -> tuple[Float[Array, "B P N H"], Float[Array, "B P N"]]:
    """Softmax attention, and the log-sum-exp of its scores; scores are float32.

    The log-sum-exp is about -1e30 where a row sees nothing.
    """
    n = intervals.depth0
    y, lse = _over_depth0(q, k[:, :n], v[:, :n], intervals.first, intervals.last, scale)
    if q.shape[1] == n:
        return y, lse
    packed_y, packed_lse = merge(
        q[:, n:], y[:, n:], lse[:, n:], _chain_keys(k, v, intervals), scale
    )
    return (
        jnp.concatenate([y[:, :n], packed_y], axis=1),
        jnp.concatenate([lse[:, :n], packed_lse], axis=1),
    )


def packed_reference(
    q: Float[Array, "B M N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    intervals: AttentionIntervals,
    scale: float,
) -> Float[Array, "B M N H"]:
    """As `reference`, of the M = P - n packed rows alone."""
    n = intervals.depth0
    first, last = intervals.first[:, n:], intervals.last[:, n:]
    y, lse = _over_depth0(q, k[:, :n], v[:, :n], first, last, scale)
    return merge(q, y, lse, _chain_keys(k, v, intervals), scale)[0]


def _chain_keys(k, v, intervals):
    """The key `back` rows before each packed row, for every distance that a chain can have."""
    n = intervals.depth0
    return [
        (_shift(k[:, n:], back), _shift(v[:, n:], back), intervals.chain_len[:, n:] > back)
        for back in range(intervals.max_chain_len)
    ]


def chunk_size(scores_of_query: int) -> int:
    """How many queries of each row are computed at one time.

    Args:
      scores_of_query: of all rows and heads together.
    """
    return min(CHUNK, max(MIN_CHUNK, MAX_SCORES // scores_of_query))


def _over_depth0(q, k, v, first, last, scale):
    """Attention of all rows over the depth-0 keys `first` .. `last`, CHUNK queries at a time."""

    def attend_chunk(args):
        q, first, last = args
        B, P, N, H = q.shape
        n, G = k.shape[1:3]
        R = N // G
        key = jnp.arange(n)[None, None]
        visible = (key >= first[..., None]) & (key <= last[..., None])
        # One matrix product for a row and KV head, with its queries grouped, takes half the time of
        # one einsum over all axes on a CPU (LOG.md).
        grouped = q.reshape(B, P, G, R, H).transpose(0, 2, 3, 1, 4).reshape(B * G, R * P, H)
        keys = k.transpose(0, 2, 3, 1).reshape(B * G, H, n)
        values = v.transpose(0, 2, 1, 3).reshape(B * G, n, H)
        scores = jnp.matmul(grouped, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(visible[:, None, None], scores.reshape(B, G, R, P, n), MASKED)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(v.dtype).reshape(B * G, R * P, n)
        y = jnp.matmul(weights, values).reshape(B, G, R, P, H)
        y = y.transpose(0, 3, 1, 2, 4).reshape(B, P, N, H)
        return y, lse.transpose(0, 3, 1, 2).reshape(B, P, N)

    B, P, N = q.shape[:3]
    size = chunk_size(B * N * k.shape[1])
    if P <= size:
        return attend_chunk((q, first, last))
    chunks = -(-P // size)

    def split(x):
        """[B P ..] -> [chunks B size ..], padded with zeros."""
        padding = [(0, 0), (0, chunks * size - P), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, padding).reshape(x.shape[0], chunks, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def join(x):
        """The inverse of `split`."""
        return jnp.moveaxis(x, 0, 1).reshape(q.shape[0], -1, *x.shape[3:])[:, :P]

    y, lse = jax.lax.map(jax.checkpoint(attend_chunk), (split(q), split(first), split(last)))
    return join(y), join(lse)


def merge(
    q: Float[Array, "B P N H"],
    y: Float[Array, "B P N H"],
    lse: Float[Array, "B P N"],
    own_keys: list[OwnKeys],
    scale: float,
) -> tuple[Float[Array, "B P N H"], Float[Array, "B P N"]]:
    """Adds keys that every row has of its own to attention that was done without them.

    Args:
      y, lse: as `reference` returns them.
      own_keys: each gives every row one more key, its value, and whether the row sees it.

    Returns:
      `y` and `lse` over the old keys and these.
    """
    if not own_keys:
        return y, lse
    B, P, N, H = q.shape
    G = own_keys[0][0].shape[2]
    grouped = q.reshape(B, P, G, N // G, H)

    def scores_of(k, visible):
        scores = jnp.einsum("BPGRH,BPGH->BPGR", grouped, k, preferred_element_type=jnp.float32)
        return jnp.where(visible[..., None, None], scores * scale, MASKED)

    scores = [scores_of(k, visible) for k, _, visible in own_keys]
    lse = lse.reshape(B, P, G, N // G)
    total = jax.nn.logsumexp(jnp.stack([lse, *scores]), axis=0)
    out = y.reshape(grouped.shape) * jnp.exp(lse - total)[..., None].astype(y.dtype)
    for score, (_, v, _) in zip(scores, own_keys, strict=True):
        out += jnp.exp(score - total)[..., None].astype(y.dtype) * v[:, :, :, None]
    return out.reshape(B, P, N, H), total.reshape(B, P, N)


def _shift(x: Float[Array, "B M G H"], back: int) -> Float[Array, "B M G H"]:
    """Row m becomes row m - back; the first rows become zeros."""
    return jnp.pad(x, [(0, 0), (back, 0), (0, 0), (0, 0)])[:, : x.shape[1]]


def triton(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    intervals: AttentionIntervals,
    scale: float,
) -> tuple[Float[Array, "B P N H"], Float[Array, "B P N"]]:
    """As `reference`, by the Triton kernels."""
    from peagle_jax.kernels import packed_attention_triton

    return packed_attention_triton.attend(q, k, v, intervals, scale)


FORMS = {"reference": reference, "triton": triton}


def unsupported(
    q: Float[Array, "B P N H"], k: Float[Array, "B P G H"], v: Float[Array, "B P G H"]
) -> str | None:
    """Why the fast form cannot take these operands; None when it can."""
    if reason := non_16bit_reason(q, k, v):
        return reason
    head_dim = q.shape[-1]
    if head_dim > 128:
        return f"they were compiled for heads up to 128, and these have {head_dim}"
    return None


def attend(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    intervals: AttentionIntervals,
    scale: float,
    *,
    form: str,
) -> tuple[Float[Array, "B P N H"], Float[Array, "B P N"]]:
    """As `reference`, but the result of rows that see nothing is not defined.

    Args:
      form: a name of FORMS, or "auto".

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    form = choose("packed_attention", form, FORMS, unsupported(q, k, v))
    return FORMS[form](q, k, v, intervals, scale)


def attend_packed(
    q: Float[Array, "B M N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    intervals: AttentionIntervals,
    scale: float,
) -> Float[Array, "B M N H"]:
    """As `attend`, of the M = P - n packed rows alone, which follow n depth-0 rows.

    Args:
      intervals: of all P rows; what it says of depth-0 rows is not read.
    """
    n = intervals.depth0
    reason = unsupported(q, k[:, n:], v[:, n:])
    if choose("packed_attention", "auto", FORMS, reason) == "reference":
        return packed_reference(q, k, v, intervals, scale)
    # the kernel has queries for all rows: those of depth 0 see nothing, and cost next to nothing
    is_depth0 = jnp.arange(k.shape[1])[None] < n
    last = jnp.where(is_depth0, -1, intervals.last)
    intervals = dataclasses.replace(intervals, last=last)
    padded = jnp.pad(q, [(0, 0), (n, 0), (0, 0), (0, 0)])
    return triton(padded, k, v, intervals, scale)[0][:, n:]
