"""Multi-layer feature fusion (arXiv:2503.01840, section 3): taps of several target layers become one vector a token."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from peagle_jax.layers import Linear, RMSNorm


class Fusion(nnx.Module):
    """`fc(concat(taps))`, with one norm over the concatenation (`before_fc`), one a tap (`per_tap`), or none."""

    def __init__(self, taps: int, target_dim: int, dim: int, eps: float, *, before_fc: bool, per_tap: bool, dtype, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(taps * target_dim, eps, dtype=dtype) if before_fc else None
        self.fc_norm = nnx.List([RMSNorm(target_dim, eps, dtype=dtype) for _ in range(taps)]) if per_tap else None
        self.fc = Linear(taps * target_dim, dim, dtype=dtype, rngs=rngs)

    def __call__(self, taps: Float[Array, "*rows A"]) -> Float[Array, "*rows D"]:
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = jnp.split(taps, len(self.fc_norm), axis=-1)
            taps = jnp.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        return self.fc(taps)
