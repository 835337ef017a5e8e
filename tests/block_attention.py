"""What rows of a draft head attend to in each design, by a mask over all pairs of rows.

A second description, which uses no code of the library: attention by whole matrices.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from scipy import special


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedAttention:
    """Attention of one sequence in which row i sees row j where `mask[i, j]` says so."""

    mask: np.ndarray

    def __call__(self, layer, q, k, v, state, rule):
        q, k, v = (np.asarray(x, np.float64)[0] for x in (q, k, v))
        _, heads, width = q.shape
        k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
        at = np.arange(len(q))
        mask = self.mask
        if rule.window is not None:
            mask = mask & (at[None] > at[:, None] - rule.window)
        y = np.zeros_like(q)
        for head in range(heads):
            scores = np.where(mask, q[:, head] @ k[:, head].T * width**-0.5, -np.inf)
            y[:, head] = special.softmax(scores, axis=-1) @ v[:, head]
        return jnp.asarray(y, jnp.float32)[None], state


def mask_of(design: str, num_committed: int, num_placeholders: int, padding: int = 0) -> np.ndarray:
    """Which rows see which: committed ones, then the placeholders of one step, then padding."""
    last = num_committed + num_placeholders
    mask = np.zeros((last + padding, last + padding), bool)
    for i in range(len(mask)):
        for j in range(len(mask)):
            if j < num_committed or i >= last:  # committed tokens, and padding, which is not read
                mask[i, j] = j <= i
            elif i >= num_committed and j < last:
                mask[i, j] = {"causal": j <= i, "bidirectional": True, "committed": j == i}[design]
    return mask
