"""Fusion of the aux hidden states of several layers (arXiv:2503.01840, section 3).

They become one vector for each token.
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from peagle_jax.kernels import fusion
from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.layers import Linear, RMSNorm
from peagle_jax.layers.fp8 import Fp8Linear


class Fusion(nnx.Module):
    """`fc(concat(aux_hidden_states))`, after one norm over all of them, one over each, or none.

    Args:
      num_aux_layers: how many layers' hidden states there are.
      target_dim: width of each, E; A is `num_aux_layers` times E.
      dim: width of the result, D.
      eps: of the norms.
      before_fc: one norm over the concatenation (`norm_before_fc` of a head).
      norm_per_layer: one norm over each aux hidden state (`fc_norm` of a head).
      dtype: of the parameters.
      rngs: for the matrix.
    """

    def __init__(
        self,
        num_aux_layers: int,
        target_dim: int,
        dim: int,
        eps: float,
        *,
        before_fc: bool,
        norm_per_layer: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        aux_dim = num_aux_layers * target_dim
        self.input_norm = RMSNorm(aux_dim, eps, dtype=dtype) if before_fc else None
        norms = [RMSNorm(target_dim, eps, dtype=dtype) for _ in range(num_aux_layers)]
        self.fc_norm = nnx.List(norms) if norm_per_layer else None
        self.fc = Linear(aux_dim, dim, dtype=dtype, rngs=rngs)
        self.num_aux_layers, self.eps = num_aux_layers, eps

    def __call__(self, aux_hidden_states: Float[Array, "*rows A"]) -> Float[Array, "*rows D"]:
        """Fuses concatenated aux hidden states; by one kernel, where there is one for them."""
        by_layer = aux_hidden_states.reshape(
            -1, self.num_aux_layers, aux_hidden_states.shape[-1] // self.num_aux_layers
        )
        if isinstance(self.fc, Fp8Linear):
            matrix = Fp8Matrix(self.fc.values[...], self.fc.scale[...])
        else:
            matrix = self.fc.kernel[...]
        has_both_norms = self.input_norm is not None and self.fc_norm is not None
        is_plain = isinstance(matrix, Fp8Matrix) or matrix.ndim == 2  # in no other layout
        if is_plain and not has_both_norms and fusion.is_supported(by_layer, matrix):
            fused = self._by_kernel(by_layer, matrix)
            return fused.reshape(*aux_hidden_states.shape[:-1], -1)
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            parts = jnp.split(aux_hidden_states, self.num_aux_layers, axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            aux_hidden_states = jnp.concatenate(normed, axis=-1)
        return self.fc(aux_hidden_states)

    def _by_kernel(
        self, by_layer: Float[Array, "M layers E"], matrix: Float[Array, "A D"] | Fp8Matrix
    ) -> Float[Array, "M D"]:
        """Norms and matrix in one kernel, which takes one of the two kinds of norms."""
        if self.input_norm is not None:
            gain = self.input_norm.scale[...]
            return fusion.fuse(by_layer, matrix, gain, "whole", self.eps, form="auto")
        if self.fc_norm is not None:
            gain = jnp.concatenate([norm.scale[...] for norm in self.fc_norm])
            return fusion.fuse(by_layer, matrix, gain, "per_layer", self.eps, form="auto")
        return fusion.fuse(by_layer, matrix, None, "none", self.eps, form="auto")
