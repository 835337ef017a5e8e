"""Experts: gated MLPs of which a router chooses a few a token. Weights are plain, FP8 or MXFP4."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from peagle_jax.kernels import experts, fp8_matmul
from peagle_jax.kernels.choose import non_16bit_reason
from peagle_jax.kernels.experts import StoredMatrices
from peagle_jax.kernels.launch import platform
from peagle_jax.kernels.tiled_products import from_tiles, tiled_product_of
from peagle_jax.layers.basic import normal
from peagle_jax.layers.products import product

AXIS = "model"  # of a device mesh, over which experts and heads are spread
ROW_AXES = ("data", "fsdp")  # likewise, over which the sequences of a batch are (train/mesh.py)
BLOCK = 32  # numbers that share one MXFP4 scale (OCP Microscaling formats, 1.0)
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (
    *_E2M1_MAGNITUDES,
    *(-x for x in _E2M1_MAGNITUDES),
)  # by code; the high bit is a sign


class ExpertLinear(nnx.Module):
    """One matrix an expert, [E in out], and a bias where the checkpoint has one.

    For decoding on a CPU the matrices may be in tiles (`matrix_layouts`).
    """

    def __init__(
        self,
        count: int,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.kernel = normal(rngs, (count, inputs, outputs), dtype, inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros((count, outputs), dtype)) if bias else None

    def matrices(
        self, which: int | slice | jax.Array, dtype: DTypeLike
    ) -> Float[Array, "*which inputs outputs"]:
        """The matrices of some experts: of a number, of an array of them, or of a slice.

        Args:
          dtype: of matrices that are decoded; these here have their own.
        """
        chosen = self.kernel[...][which]
        if self.kernel.ndim == 3:
            return chosen
        return from_tiles(chosen) if chosen.ndim == 4 else jax.vmap(from_tiles)(chosen)

    def product_of(self, expert: Int[Array, ""], x: Float[Array, "M _"]) -> Float[Array, "M _"]:
        """`x` times the matrix of one expert."""
        if self.kernel.ndim == 5:
            return tiled_product_of(x.astype(jnp.float32), self.kernel[...], expert)
        return _product_of(self, expert, x)

    def bias_of(self, which: int | slice | jax.Array) -> Float[Array, "*which outputs"] | None:
        """The biases of some experts; None where there are none."""
        return None if self.bias is None else self.bias[...][which]

    def stored(self) -> StoredMatrices:
        """All experts as they are stored, for kernels."""
        return StoredMatrices("plain", self.kernel[...], None, self.bias_of(slice(None)))


def _product_of(linear: Any, expert: Int[Array, ""], x: Float[Array, "M _"]) -> Float[Array, "M _"]:
    """`x` times the matrix of one expert, which is a slice: a gather of one would copy more."""
    return product(x, linear.matrices(expert, x.dtype))


class Mxfp4ExpertLinear(nnx.Module):
    """As `ExpertLinear`, in MXFP4: 4 bits a number, and one scale for 32 of them.

    An expert is decoded when it is used.
    """

    def __init__(
        self,
        count: int,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.blocks = nnx.Param(jnp.zeros((count, outputs, inputs // BLOCK, BLOCK // 2), jnp.uint8))
        self.scales = nnx.Param(jnp.zeros((count, outputs, inputs // BLOCK), jnp.uint8))
        self.bias = nnx.Param(jnp.zeros((count, outputs), dtype)) if bias else None

    def matrices(
        self, which: int | slice | jax.Array, dtype: DTypeLike
    ) -> Float[Array, "*which inputs outputs"]:
        decoded = decode_mxfp4(self.blocks[...][which], self.scales[...][which], dtype)
        return jnp.swapaxes(decoded, -1, -2)

    def stored(self) -> StoredMatrices:
        bias = self.bias_of(slice(None))
        return StoredMatrices("mxfp4", self.blocks[...], self.scales[...], bias)

    bias_of = ExpertLinear.bias_of
    product_of = _product_of


class Fp8ExpertLinear(nnx.Module):
    """As `ExpertLinear`, in float8 with scales, [E, out, in].

    An expert is decoded when it is used; activations stay as they are.

    Args:
      bias: of the layer in whose place this stands.
      blocks: one scale for 128 x 128 numbers, or else one for each of an expert's outputs.
    """

    def __init__(
        self, count: int, inputs: int, outputs: int, *, bias: nnx.Param | None, blocks: bool
    ):
        self.values = nnx.Param(jnp.zeros((count, outputs, inputs), fp8_matmul.E4M3))
        scale_shape = fp8_matmul.grid(outputs, inputs) if blocks else (outputs,)
        self.scale = nnx.Param(jnp.zeros((count, *scale_shape), jnp.float32))
        self.bias = bias

    def matrices(
        self, which: int | slice | jax.Array, dtype: DTypeLike
    ) -> Float[Array, "*which inputs outputs"]:
        def decode(values, scale):
            return fp8_matmul.Fp8Matrix(values, scale).dequantized().astype(dtype).T

        values, scale = self.values[...][which], self.scale[...][which]
        return decode(values, scale) if values.ndim == 2 else jax.vmap(decode)(values, scale)

    def stored(self) -> StoredMatrices:
        kind = "block" if self.scale.ndim == 3 else "row"
        bias = self.bias_of(slice(None))
        return StoredMatrices(kind, self.values[...], self.scale[...], bias)

    bias_of = ExpertLinear.bias_of
    product_of = _product_of


AnyExpertLinear = ExpertLinear | Mxfp4ExpertLinear | Fp8ExpertLinear


def decode_mxfp4(
    blocks: UInt8[Array, "*E out parts half"],
    scales: UInt8[Array, "*E out parts"],
    dtype: DTypeLike,
) -> Float[Array, "*E out inputs"]:
    """The numbers of MXFP4 blocks.

    A byte holds two numbers, the low nibble first. A scale is the exponent of a power of two,
    biased by 127 (transformers, integrations/mxfp4.py).
    """
    codes = jnp.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
    values = jnp.asarray(E2M1_VALUES, jnp.float32)[codes]
    values = jnp.ldexp(values, scales.astype(jnp.int32)[..., None] - 127)
    return values.reshape(*scales.shape[:-1], -1).astype(dtype)


@dataclasses.dataclass(frozen=True)
class GLU:
    """`act(gate) * up` of a product whose first half is the gate, and whose second half is up."""

    act: Callable

    @property
    def is_halved_swiglu(self) -> bool:
        """Whether `act` is SiLU, which kernels know how to do within the product."""
        return self.act is jax.nn.silu

    def __call__(self, x: Float[Array, "*rows I2"]) -> Float[Array, "*rows I"]:
        gate, up = jnp.split(x, 2, axis=-1)
        return self.act(gate) * up


class Experts(nnx.Module):
    """`down(act(gate_up(x)))` of each chosen expert, weighted and summed.

    On a mesh with an axis "model" every device runs the experts that it holds, and their sums are
    added up. On axes that divide a batch's sequences every device runs those of its own: rows are
    sorted by expert, and sorted together they would be those of all devices on each.

    Args:
      act: maps [.. 2I] to [.. I]; families keep gate and up in different orders.
      packed: weights are MXFP4.
    """

    def __init__(
        self,
        count: int,
        dim: int,
        mlp_dim: int,
        act: Callable,
        *,
        bias: bool,
        packed: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        linear = Mxfp4ExpertLinear if packed else ExpertLinear
        self.gate_up = linear(count, dim, 2 * mlp_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.down = linear(count, mlp_dim, dim, bias=bias, dtype=dtype, rngs=rngs)
        self.act, self.count = act, count

    def __call__(
        self,
        x: Float[Array, "*rows D"],
        topk_ids: Int[Array, "n k"],
        routing_weights: Float[Array, "n k"],
    ) -> Float[Array, "*rows D"]:
        """The weighted sum of the experts `topk_ids` of each of the n rows."""
        rows = x.reshape(-1, x.shape[-1])
        mesh = dict(jax.sharding.get_abstract_mesh().shape)
        num_devices = mesh.get(AXIS, 1)
        if self.count % num_devices:
            num_devices = 1  # experts that cannot be divided evenly are on every device
        num_local = self.count // num_devices
        axes = tuple(axis for axis in ROW_AXES if mesh.get(axis, 1) > 1)
        if x.ndim < 3 or x.shape[0] % math.prod(mesh[axis] for axis in axes):
            axes = ()
        n, k = topk_ids.shape
        n //= math.prod(mesh[axis] for axis in axes)
        name = experts.choose(n, k, num_local, platform(), non_16bit_reason(x))
        form = experts.FORMS[name]
        if num_devices == 1 and not axes:
            weights = ExpertWeights(self.gate_up, self.down, self.act, num_local)
            y = form(rows, topk_ids, routing_weights, weights)
            return y.astype(x.dtype).reshape(x.shape)
        graph, state = nnx.split((self.gate_up, self.down))

        def run_local(state, rows, topk_ids, routing_weights):
            """Runs this device's experts on its rows, and adds up the sums of all its experts."""
            gate_up, down = nnx.merge(graph, state)
            weights = ExpertWeights(gate_up, down, self.act, num_local, num_devices)
            if num_devices == 1:
                return form(rows, topk_ids, routing_weights, weights)
            local_ids = topk_ids - jax.lax.axis_index(AXIS) * num_local
            is_local = (local_ids >= 0) & (local_ids < num_local)
            # `num_local` is no expert of this device
            local_ids = jnp.where(is_local, local_ids, num_local)
            return jax.lax.psum(form(rows, local_ids, routing_weights, weights), AXIS)

        of_experts = (AXIS,) if num_devices > 1 else ()
        state_specs, of_rows = jax.tree.map(lambda _: P(*of_experts), state), P(axes or None)
        run_all = jax.shard_map(
            run_local,
            in_specs=(state_specs, of_rows, of_rows, of_rows),
            out_specs=of_rows,
            axis_names={*axes, *of_experts},
            check_vma=False,
        )
        y = run_all(state, rows, topk_ids, routing_weights)
        return y.astype(x.dtype).reshape(x.shape)


class ExpertWeights:
    """`kernels.experts.ExpertWeights`: the two matrices of each expert, and what lies between.

    Args:
      count: number of experts held here.
      num_shards: equal sets over which a layer's experts are spread; these are one of them.
    """

    def __init__(
        self,
        gate_up: AnyExpertLinear,
        down: AnyExpertLinear,
        act: Callable,
        count: int,
        num_shards: int = 1,
    ):
        self.gate_up, self.down, self.act = gate_up, down, act
        self.count, self.num_shards = count, num_shards

    def matrices(self) -> tuple[StoredMatrices, StoredMatrices]:
        return self.gate_up.stored(), self.down.stored()

    def run_expert(self, expert: Int[Array, ""], rows: Float[Array, "M D"]) -> Float[Array, "M D"]:
        def apply(linear: AnyExpertLinear, x):
            y, bias = linear.product_of(expert, x), linear.bias_of(expert)
            return y if bias is None else y + bias[None]

        return apply(self.down, self.act(apply(self.gate_up, rows)))

    def run_tiles(
        self, experts: Int[Array, " t"], rows: Float[Array, "t M D"]
    ) -> Float[Array, "t M D"]:
        def apply(linear: AnyExpertLinear, x):
            y = product(x, linear.matrices(experts, x.dtype))
            bias = linear.bias_of(experts)
            return y if bias is None else y + bias[:, None]

        return apply(self.down, self.act(apply(self.gate_up, rows)))
