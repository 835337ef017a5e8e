"""Attention of COD training: a row sees a stretch of depth-0 keys, and a few rows up to itself.

Packed rows are ordered by (anchor, depth), and documents are contiguous. So what a row sees is two
intervals, which are three numbers: keys `first` .. `last` of the depth-0 rows, and the last
`chain_len` packed rows up to the row itself. Bidirectional placeholders have a fourth,
`chain_ahead` packed rows behind the row. No mask exists, and a kernel skips what lies outside by
arithmetic, not by lists.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.kernels import packed_attention_native
from peagle_jax.kernels.attention import MASKED
from peagle_jax.kernels.choose import choose, non_16bit_reason
from peagle_jax.kernels.launch import platform
from peagle_jax.kernels.packed_attention_blocks import attend_in_blocks
from peagle_jax.kernels.packed_attention_chains import (
    BLOCK,
    Chains,
    in_blocks,
    padded,
    with_rows_around,
)
from peagle_jax.kernels.packed_attention_dense import attend_dense

# More scores than these are computed in blocks of queries and keys (LOG.md, 2026-11-26).
MAX_SCORES = 2**22
# Queries and keys of a block: on a CPU, whose scores then stay in its cache, and elsewhere, where
# fewer and larger products are better. The latter were not measured.
CPU_BLOCKS, BLOCKS = (256, 256), (512, 1024)
MAX_BLOCK_SCORES = 2**24  # elsewhere, of all sequences and heads


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
    # packed rows behind itself that a packed row sees; None: no row sees any
    chain_ahead: Int[Array, "B P"] | None = None


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
    first, last = intervals.first[:, :n], intervals.last[:, :n]
    y, lse = _attend_rows(q[:, :n], k[:, :n], v[:, :n], first, last, None, scale)
    if q.shape[1] == n:
        return y, lse
    packed_y, packed_lse = _over_packed(q[:, n:], k, v, intervals, scale)
    return jnp.concatenate([y, packed_y], axis=1), jnp.concatenate([lse, packed_lse], axis=1)


def packed_reference(
    q: Float[Array, "B M N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    intervals: AttentionIntervals,
    scale: float,
) -> Float[Array, "B M N H"]:
    """As `reference`, of the M = P - n packed rows alone."""
    return _over_packed(q, k, v, intervals, scale)[0]


def block_sizes(rows_and_heads: int, queries: int, keys: int) -> tuple[int, int] | None:
    """How many queries and keys have scores at one time; None: all of them.

    Args:
      rows_and_heads: sequences times heads.
      queries: of each of them.
      keys: of depth 0.
    """
    if rows_and_heads * queries * keys <= MAX_SCORES:
        return None
    return CPU_BLOCKS if platform() == "cpu" else accelerator_blocks(rows_and_heads)


def accelerator_blocks(rows_and_heads: int) -> tuple[int, int]:
    """Queries and keys of a block: fewer queries where many sequences and heads have them."""
    queries, keys = BLOCKS
    most = MAX_BLOCK_SCORES // (rows_and_heads * keys) // BLOCK * BLOCK
    return max(BLOCK, min(queries, most)), keys


def _over_packed(q, k, v, intervals, scale):
    """Attention of the packed rows, over depth-0 keys and their own chains."""
    n, M = intervals.depth0, q.shape[1]
    first, last = intervals.first[:, n:], intervals.last[:, n:]
    chains = None
    if intervals.max_chain_len > 0:
        before = intervals.max_chain_len - 1
        ahead, after = intervals.chain_ahead, before
        if ahead is None:
            ahead, after = jnp.zeros_like(intervals.chain_len), 0
        # the rows around a block that its chains may reach into
        keys, values = (with_rows_around(x[:, n:], before, after) for x in (k, v))
        of_blocks = in_blocks(intervals.chain_len[:, n:]), in_blocks(ahead[:, n:])
        chains = Chains(keys, values, *of_blocks, before)
    seen = k[:, :n], v[:, :n], padded(first, BLOCK), padded(last, BLOCK, -1)
    y, lse = _attend_rows(padded(q, BLOCK), *seen, chains, scale)
    return y[:, :M], lse[:, :M]


def _attend_rows(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B n G H"],
    v: Float[Array, "B n G H"],
    first: Int[Array, "B P"],
    last: Int[Array, "B P"],
    chains: Chains | None,
    scale: float,
) -> tuple[Float[Array, "B P N H"], Float[Array, "B P N"]]:
    """Attention over keys `first` .. `last` and `chains`, in the form for so many scores."""
    sizes = block_sizes(q.shape[0] * q.shape[2], q.shape[1], k.shape[1])
    if sizes is None:
        return attend_dense(q, k, v, first, last, chains, scale)
    return attend_in_blocks(q, k, v, first, last, chains, scale, sizes)


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


def native(
    q: Float[Array, "B Q N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    intervals: AttentionIntervals,
    scale: float,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B Q N"]]:
    """As `reference`, by C++ on a CPU. There may be queries of the last Q rows alone."""
    rows = intervals.first, intervals.last, intervals.chain_len, intervals.chain_ahead
    return packed_attention_native.attend(q, k, v, *rows, intervals.depth0, scale)


FORMS = {"reference": reference, "triton": triton}


def unsupported(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P G H"],
    v: Float[Array, "B P G H"],
    intervals: AttentionIntervals,
) -> str | None:
    """Why the fast form cannot take these operands; None when it can."""
    if intervals.chain_ahead is not None:
        return "they have no bidirectional chains"
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
      form: a name of FORMS, or "auto": `native` where it can run, or else the fastest of FORMS.

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    if form == "auto" and packed_attention_native.can_attend(q, k, v):
        return native(q, k, v, intervals, scale)
    form = choose("packed_attention", form, FORMS, unsupported(q, k, v, intervals))
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
    if packed_attention_native.can_attend(q, k, v):
        return native(q, k, v, intervals, scale)[0]
    n = intervals.depth0
    reason = unsupported(q, k[:, n:], v[:, n:], intervals)
    if choose("packed_attention", "auto", FORMS, reason) == "reference":
        return packed_reference(q, k, v, intervals, scale)
    # the kernel has queries for all rows: those of depth 0 see nothing, and cost next to nothing
    is_depth0 = jnp.arange(k.shape[1])[None] < n
    last = jnp.where(is_depth0, -1, intervals.last)
    intervals = dataclasses.replace(intervals, last=last)
    all_rows = jnp.pad(q, [(0, 0), (n, 0), (0, 0), (0, 0)])
    return triton(all_rows, k, v, intervals, scale)[0][:, n:]
