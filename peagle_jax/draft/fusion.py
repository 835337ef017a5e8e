"""Multi-layer feature fusion (arXiv:2503.01840, section 3): taps of several target layers become one vector a token."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from peagle_jax.kernels import fusion
from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.layers import Linear, RMSNorm
from peagle_jax.layers.fp8 import Fp8Linear


class Fusion(nnx.Module):
    """`fc(concat(taps))`, with one norm over the concatenation (`before_fc`), one a tap (`per_tap`), or none."""

    def __init__(
        self,
        aux_hidden_states: int,
        target_dim: int,
        dim: int,
        eps: float,
        *,
        before_fc: bool,
        per_tap: bool,
        dtype,
        rngs: nnx.Rngs,
    ):
        self.input_norm = (
            RMSNorm(aux_hidden_states * target_dim, eps, dtype=dtype) if before_fc else None
        )
        self.fc_norm = (
            nnx.List([RMSNorm(target_dim, eps, dtype=dtype) for _ in range(aux_hidden_states)])
            if per_tap
            else None
        )
        self.fc = Linear(aux_hidden_states * target_dim, dim, dtype=dtype, rngs=rngs)
        self.aux_hidden_state_layers, self.eps = aux_hidden_states, eps

    def __call__(self, aux_hidden_states: Float[Array, "*rows A"]) -> Float[Array, "*rows D"]:
        parts = aux_hidden_states.reshape(
            -1,
            self.aux_hidden_state_layers,
            aux_hidden_states.shape[-1] // self.aux_hidden_state_layers,
        )
        w = (
            Fp8Matrix(self.fc.values[...], self.fc.scale[...])
            if isinstance(self.fc, Fp8Linear)
            else self.fc.kernel[...]
        )
        if (self.input_norm is None or self.fc_norm is None) and fusion.is_supported(parts, w):
            return self._at_once(parts, w).reshape(*aux_hidden_states.shape[:-1], -1)
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            parts = jnp.split(aux_hidden_states, self.aux_hidden_state_layers, axis=-1)
            aux_hidden_states = jnp.concatenate(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1
            )
        return self.fc(aux_hidden_states)

    def _at_once(self, parts, w) -> Float[Array, "M D"]:
        if self.input_norm is not None:
            return fusion.fuse(parts, w, self.input_norm.scale[...], "whole", self.eps, form="auto")
        if self.fc_norm is not None:
            return fusion.fuse(
                parts,
                w,
                jnp.concatenate([norm.scale[...] for norm in self.fc_norm]),
                "per_tap",
                self.eps,
                form="auto",
            )
        return fusion.fuse(parts, w, None, "none", self.eps, form="auto")
