"""FP8 in the place of a model's matrices: `Linear` and `Stack` modules become ones that hold float8 values and their scales.

What stays as it is follows vLLM: routers (an error there chooses another expert), the target's output matrix, embeddings, norms.
"""

from collections.abc import Callable, Collection, Iterator, Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import fp8_matmul, vocab
from peagle_jax.kernels.fp8_matmul import E4M3, Fp8Matrix
from peagle_jax.layers.basic import Linear, along_last
from peagle_jax.layers.moe import ExpertLinear, Fp8ExpertLinear
from peagle_jax.weights import ParamTable, Tensor, fp8

KEPT = ("router", "lm_head")  # by the name of the module


class Fp8Linear(nnx.Module):
    """`x @ (values * scale).T`, `x` quantised on the way; [out, in], as checkpoints and tensor cores have it."""

    def __init__(self, linear: Linear, *, blocks: bool):
        inputs, outputs = linear.kernel.shape
        self.values = nnx.Param(jnp.zeros((outputs, inputs), E4M3))
        self.scale = nnx.Param(
            jnp.zeros(fp8_matmul.grid(outputs, inputs) if blocks else outputs, jnp.float32)
        )
        self.bias = linear.bias

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        y = fp8_matmul.matmul(x, Fp8Matrix(self.values[...], self.scale[...]))
        return y if self.bias is None else y + along_last(self.bias[...], y)

    def argmax_logits(self, x: Float[Array, "*rows inputs"]) -> Int[Array, "*rows"]:
        """The argmax of each row of the product; where a kernel finds it, of activations that are not quantised."""
        ids = None
        if self.bias is None and self.scale.ndim == 1:
            ids = vocab.argmax_logits(x, self.values[...], self.scale[...], by_word=True)
        return jnp.argmax(self(x), axis=-1) if ids is None else ids


def _fp8(matrix: Linear | ExpertLinear, blocks: bool) -> Fp8Linear | Fp8ExpertLinear:
    if isinstance(matrix, Linear):
        return Fp8Linear(matrix, blocks=blocks)
    return Fp8ExpertLinear(*matrix.kernel.shape, bias=matrix.bias, blocks=blocks)


def quantize_linears(
    make: Callable[[], nnx.Module],
    tensors: Mapping[str, Tensor],
    table: ParamTable,
    stored: Mapping[str, Tensor],
    keep: Collection[str] = KEPT,
) -> tuple[Callable[[], nnx.Module], dict[str, Tensor], ParamTable]:
    """What `weights.load` needs to make the same model with its matrices in FP8.

    Args:
      stored: the checkpoint's tensors with its float8 values and scales, by the names of `table`; empty where there are none.
      keep: names of modules whose matrices stay as they are.
    """
    blocks = fp8.has_block_scales(stored)
    paths = {path for *_, path in _matrices(nnx.eval_shape(make), keep)}
    return with_fp8_layers(make, blocks=blocks, keep=keep), *fp8.map_fp8_params(
        stored, tensors, table, paths, blocks=blocks
    )


def with_fp8_layers(
    make: Callable[[], nnx.Module], *, blocks: bool, keep: Collection[str] = KEPT
) -> Callable[[], nnx.Module]:
    """`make`, with matrices of zeros in FP8."""

    def made() -> nnx.Module:
        module = make()
        for parent, name, child, _ in list(_matrices(module, keep)):
            setattr(parent, name, _fp8(child, blocks))
        return module

    return made


def _matrices(
    module: nnx.Module, keep: Collection[str], at: str = ""
) -> Iterator[tuple[nnx.Module, str, nnx.Module, str]]:
    """(parent, name, matrix, dotted path) of all that become FP8."""
    for name, child in vars(module).items():
        if isinstance(child, Linear | ExpertLinear):
            if name not in keep:
                yield module, name, child, at + name
        elif isinstance(child, nnx.List):
            for i, each in enumerate(child):
                yield from _matrices(each, keep, f"{at}{name}.{i}.")
        elif isinstance(child, nnx.Module):
            yield from _matrices(child, keep, f"{at}{name}.")
