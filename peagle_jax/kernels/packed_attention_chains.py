"""The chains of packed rows: the few keys around a block of rows that its queries may see."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 64  # packed rows whose chains are one product


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chains:
    """What blocks of BLOCK packed rows see of packed rows.

    Attributes:
      keys: of the rows of each block, of `before` rows before it and, with bidirectional
        placeholders, of as many behind it; c in all.
      values: theirs.
      chain_len: how many rows each row sees, itself included; 0: none.
      ahead: how many rows behind itself it sees.
      before: rows before the block whose keys are there.
    """

    keys: Float[Array, "B b c G H"]
    values: Float[Array, "B b c G H"]
    chain_len: Int[Array, "B b block"]
    ahead: Int[Array, "B b block"]
    before: int = dataclasses.field(metadata={"static": True})

    def visible(self) -> Array:
        """Which of its block's keys each row sees: [B b BLOCK c]."""
        return visible_in_chains(self.chain_len, self.ahead, self.before, self.keys.shape[2])


def visible_in_chains(
    chain_len: Int[Array, "B b block"], ahead: Int[Array, "B b block"], before: int, num_keys: int
) -> Bool[Array, "B b block c"]:
    """Which of its block's `num_keys` keys each row sees; the arguments are those of `Chains`."""
    # how many rows before the query each key stands
    back = jnp.arange(BLOCK)[:, None] - jnp.arange(num_keys)[None] + before
    back = back[None, None]
    return (back >= -ahead[..., None]) & (back < chain_len[..., None])


def padded(x: Array, rows: int, value: int = 0) -> Array:
    """Rows behind the last ones, of zeros or `value`, up to a multiple of `rows`."""
    pad = [(0, 0), (0, -x.shape[1] % rows), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, pad, constant_values=value)


def in_blocks(x: Array) -> Array:
    """[B M ..] -> [B blocks BLOCK ..]."""
    x = padded(x, BLOCK)
    return x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:])


def with_rows_around(
    x: Float[Array, "B M G H"], before: int, after: int
) -> Float[Array, "B b C G H"]:
    """Blocks of rows, each between the `before` rows and the `after` rows around it."""
    blocks = in_blocks(x)
    # more blocks than one, where chains are longer than a block
    num_before, num_after = -(-before // BLOCK), -(-after // BLOCK)
    num, rest = blocks.shape[1], [(0, 0)] * 3
    parts = [jnp.pad(blocks, [(0, 0), (i, 0), *rest])[:, :num] for i in range(num_before, 0, -1)]
    later = [jnp.pad(blocks, [(0, 0), (0, i), *rest])[:, i:] for i in range(1, num_after + 1)]
    first = num_before * BLOCK - before
    joined = jnp.concatenate([*parts, blocks, *later], axis=2)
    return joined[:, :, first : first + before + BLOCK + after]
