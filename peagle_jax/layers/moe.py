"""A bank of experts: gated MLPs of which a router chooses a few a token. Weights plain, or packed as MXFP4."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt8

from peagle_jax.kernels import experts, fp8_matmul
from peagle_jax.kernels.choose import non_16bit_reason
from peagle_jax.kernels.launch import platform
from peagle_jax.layers.basic import normal

AXIS = "model"  # of a device mesh, over which experts and heads are spread
BLOCK = 32  # numbers that share one MXFP4 scale (OCP Microscaling formats, 1.0)
FP4 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)  # E2M1 by its code


class ExpertLinear(nnx.Module):
    """One matrix an expert, [E in out], and a bias where the checkpoint has one."""

    def __init__(self, count: int, inputs: int, outputs: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        self.kernel = normal(rngs, (count, inputs, outputs), dtype, inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros((count, outputs), dtype)) if bias else None

    def matrices(self, which, dtype) -> Float[Array, "*which inputs outputs"]:
        """Of the experts `which`: a number, an array of them, or `slice(None)`."""
        return self.kernel[...][which].astype(dtype)

    def shift(self, which) -> Float[Array, "*which outputs"] | None:
        return None if self.bias is None else self.bias[...][which]

    def stored(self) -> experts.Matrices:
        return experts.Matrices("plain", self.kernel[...], None, self.shift(slice(None)))


class Mxfp4ExpertLinear(nnx.Module):
    """The same in MXFP4: 4 bits a number and a scale for 32 of them, decoded when an expert is used."""

    def __init__(self, count: int, inputs: int, outputs: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        self.blocks = nnx.Param(jnp.zeros((count, outputs, inputs // BLOCK, BLOCK // 2), jnp.uint8))
        self.scales = nnx.Param(jnp.zeros((count, outputs, inputs // BLOCK), jnp.uint8))
        self.bias = nnx.Param(jnp.zeros((count, outputs), dtype)) if bias else None

    def matrices(self, which, dtype) -> Float[Array, "*which inputs outputs"]:
        return jnp.swapaxes(
            decode_mxfp4(self.blocks[...][which], self.scales[...][which], dtype), -1, -2
        )

    def stored(self) -> experts.Matrices:
        return experts.Matrices(
            "mxfp4", self.blocks[...], self.scales[...], self.shift(slice(None))
        )

    shift = ExpertLinear.shift


class Fp8ExpertLinear(nnx.Module):
    """The same in float8 with scales, [E, out, in], decoded when an expert is used; activations stay as they are.

    Args:
      bias: of the stack in whose place this stands.
      blocks: a scale for 128 x 128 numbers, or one for each of an expert's outputs.
    """

    def __init__(
        self, count: int, inputs: int, outputs: int, *, bias: nnx.Param | None, blocks: bool
    ):
        self.values = nnx.Param(jnp.zeros((count, outputs, inputs), fp8_matmul.E4M3))
        grid = fp8_matmul.grid(outputs, inputs) if blocks else (outputs,)
        self.scale = nnx.Param(jnp.zeros((count, *grid), jnp.float32))
        self.bias = bias

    def matrices(self, which, dtype) -> Float[Array, "*which inputs outputs"]:
        def decode(values, scale):
            return fp8_matmul.Fp8Matrix(values, scale).dequantized().astype(dtype).T

        values, scale = self.values[...][which], self.scale[...][which]
        return decode(values, scale) if values.ndim == 2 else jax.vmap(decode)(values, scale)

    def stored(self) -> experts.Matrices:
        kind = "block" if self.scale.ndim == 3 else "row"
        return experts.Matrices(kind, self.values[...], self.scale[...], self.shift(slice(None)))

    shift = ExpertLinear.shift


AnyExpertLinear = ExpertLinear | Mxfp4ExpertLinear | Fp8ExpertLinear


def decode_mxfp4(
    blocks: UInt8[Array, "*E out parts half"], scales: UInt8[Array, "*E out parts"], dtype
) -> Float[Array, "*E out inputs"]:
    """Low nibble first; a scale is the exponent of a power of two, biased by 127 (transformers, integrations/mxfp4.py)."""
    codes = jnp.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
    values = jnp.asarray(FP4, jnp.float32)[codes]
    values = jnp.ldexp(values, scales.astype(jnp.int32)[..., None] - 127)
    return values.reshape(*scales.shape[:-1], -1).astype(dtype)


@dataclasses.dataclass(frozen=True)
class GLU:
    """`act(gate) * up` of a product that holds all of the gate first, then all of up."""

    act: Callable

    def __call__(self, x: Float[Array, "*rows I2"]) -> Float[Array, "*rows I"]:
        gate, up = jnp.split(x, 2, axis=-1)
        return self.act(gate) * up


class Experts(nnx.Module):
    """`down(act(gate_up(x)))` of each chosen expert, weighted and summed.

    On a mesh with an axis "model" every device runs the experts it holds, and the sums are added up.
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
        dtype,
        rngs: nnx.Rngs,
    ):
        stack = Mxfp4ExpertLinear if packed else ExpertLinear
        self.gate_up = stack(count, dim, 2 * mlp_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.down = stack(count, mlp_dim, dim, bias=bias, dtype=dtype, rngs=rngs)
        self.act, self.count = (
            act,
            count,
        )  # act: [.. 2I] -> [.. I]; families keep gate and up in different orders

    def __call__(
        self, x: Float[Array, "*rows D"], chosen: Int[Array, "n k"], weight: Float[Array, "n k"]
    ) -> Float[Array, "*rows D"]:
        rows, mesh = x.reshape(-1, x.shape[-1]), jax.sharding.get_abstract_mesh()
        parts = mesh.shape.get(AXIS, 1)
        parts = parts if self.count % parts == 0 else 1
        mine = self.count // parts
        form = experts.FORMS[experts.choose(*chosen.shape, mine, platform(), non_16bit_reason(x))]
        if parts == 1:
            return (
                form(rows, chosen, weight, ExpertWeights(self.gate_up, self.down, self.act, mine))
                .astype(x.dtype)
                .reshape(x.shape)
            )
        graph, state = nnx.split((self.gate_up, self.down))

        def local(state, rows, chosen, weight):
            here = chosen - jax.lax.axis_index(AXIS) * mine
            here = jnp.where((here >= 0) & (here < mine), here, mine)
            return jax.lax.psum(
                form(
                    rows,
                    here,
                    weight,
                    ExpertWeights(*nnx.merge(graph, state), self.act, mine, parts),
                ),
                AXIS,
            )

        spread = jax.tree.map(lambda _: P(AXIS), state)
        y = jax.shard_map(local, in_specs=(spread, P(), P(), P()), out_specs=P(), check_vma=False)(
            state, rows, chosen, weight
        )
        return y.astype(x.dtype).reshape(x.shape)


class ExpertWeights:
    """Two stacks and what lies between, as `kernels.experts` runs them: `count` experts, an equal share of `parts` such banks."""

    def __init__(
        self,
        gate_up: AnyExpertLinear,
        down: AnyExpertLinear,
        act: Callable,
        count: int,
        parts: int = 1,
    ):
        self.gate_up, self.down, self.act, self.count, self.parts = gate_up, down, act, count, parts

    def matrices(self) -> tuple[experts.Matrices, experts.Matrices]:
        return self.gate_up.stored(), self.down.stored()

    def one(self, expert: Int[Array, ""], rows: Float[Array, "M D"]) -> Float[Array, "M D"]:
        def product(stack, x):
            y, shift = (
                x @ stack.matrices(expert, x.dtype),
                stack.shift(expert),
            )  # a slice: XLA copies less than for a gather of one
            return y if shift is None else y + shift[None]

        return product(self.down, self.act(product(self.gate_up, rows)))

    def tiles(
        self, experts: Int[Array, " t"], rows: Float[Array, "t M D"]
    ) -> Float[Array, "t M D"]:
        def product(stack, x):
            y, shift = (
                jnp.einsum("tmi,tio->tmo", x, stack.matrices(experts, x.dtype)),
                stack.shift(experts),
            )
            return y if shift is None else y + shift[:, None]

        return product(self.down, self.act(product(self.gate_up, rows)))
