"""Models with FP8 matrices: `Linear` and `ExpertLinear` modules are replaced by FP8 ones.

What stays as it is follows vLLM: routers (an error there chooses another expert), the target's
output matrix, embeddings, norms, and what an FP8 checkpoint stores in another dtype.
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

NOT_QUANTIZED = ("router", "lm_head")  # names of modules


class Fp8Linear(nnx.Module):
    """`x @ (values * scale).T`, `x` quantized on the way.

    `values` is [out, in], as checkpoints and tensor cores have it.

    Args:
      linear: the layer in whose place this stands; its bias stays.
      blocks: one scale for 128 x 128 numbers, or else one for each output.
    """

    def __init__(self, linear: Linear, *, blocks: bool):
        inputs, outputs = linear.kernel.shape
        self.values = nnx.Param(jnp.zeros((outputs, inputs), E4M3))
        scale_shape = fp8_matmul.grid(outputs, inputs) if blocks else outputs
        self.scale = nnx.Param(jnp.zeros(scale_shape, jnp.float32))
        self.bias = linear.bias

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        y = fp8_matmul.matmul(x, Fp8Matrix(self.values[...], self.scale[...]))
        return y if self.bias is None else y + along_last(self.bias[...], y)

    def argmax_logits(self, x: Float[Array, "*rows inputs"]) -> Int[Array, "*rows"]:
        """The argmax of each row of the product.

        Where a kernel finds it, activations are not quantized.
        """
        ids = None
        if self.bias is None and self.scale.ndim == 1:
            ids = vocab.argmax_logits(x, self.values[...], self.scale[...], vocab_first=True)
        return vocab.argmax(self(x)) if ids is None else ids


def _fp8_layer(layer: Linear | ExpertLinear, blocks: bool) -> Fp8Linear | Fp8ExpertLinear:
    """The FP8 layer that stands in the place of `layer`, with zeros."""
    if isinstance(layer, Linear):
        return Fp8Linear(layer, blocks=blocks)
    count, inputs, outputs = layer.kernel.shape
    return Fp8ExpertLinear(count, inputs, outputs, bias=layer.bias, blocks=blocks)


def quantize_linears(
    make: Callable[[], nnx.Module],
    tensors: Mapping[str, Tensor],
    table: ParamTable,
    stored: Mapping[str, Tensor],
    keep: Collection[str] = NOT_QUANTIZED,
) -> tuple[Callable[[], nnx.Module], dict[str, Tensor], ParamTable]:
    """What `weights.load` needs to make the same model with its matrices in FP8.

    Args:
      make: makes the model.
      tensors: the checkpoint's tensors, which `table` maps to parameters.
      stored: the checkpoint's float8 values and their scales, by the names of `table`; empty where
        the checkpoint has none.
      keep: names of modules whose matrices stay as they are.

    Returns:
      `make`, `tensors` and `table` of the model in FP8.
    """
    blocks = fp8.has_block_scales(stored)
    paths = {path for *_, path in _linears(nnx.eval_shape(make), keep)}
    if in_float8 := {name for name, t in stored.items() if t.dtype in fp8.FLOAT8}:
        paths &= {
            path.removesuffix(".kernel") for name, (path, _) in table.items() if name in in_float8
        }
    return with_fp8_layers(make, blocks=blocks, keep=keep, paths=paths), *fp8.map_fp8_params(
        stored, tensors, table, paths, blocks=blocks
    )


def with_fp8_layers(
    make: Callable[[], nnx.Module],
    *,
    blocks: bool,
    keep: Collection[str] = NOT_QUANTIZED,
    paths: Collection[str] | None = None,
) -> Callable[[], nnx.Module]:
    """A function that makes the model of `make` with FP8 layers, which hold zeros.

    Args:
      keep: names of modules that stay as they are.
      paths: dotted paths of those that become FP8; None for all that `keep` does not name.
    """

    def make_fp8() -> nnx.Module:
        module = make()
        for parent, name, layer, path in list(_linears(module, keep)):
            if paths is None or path in paths:
                setattr(parent, name, _fp8_layer(layer, blocks))
        return module

    return make_fp8


def _linears(
    module: nnx.Module, keep: Collection[str], prefix: str = ""
) -> Iterator[tuple[nnx.Module, str, Linear | ExpertLinear, str]]:
    """(parent, name, layer, dotted path) of all layers that become FP8."""
    for name, child in vars(module).items():
        if isinstance(child, Linear | ExpertLinear):
            if name not in keep:
                yield module, name, child, prefix + name
        elif isinstance(child, nnx.List):
            for i, item in enumerate(child):
                yield from _linears(item, keep, f"{prefix}{name}.{i}.")
        elif isinstance(child, nnx.Module):
            yield from _linears(child, keep, f"{prefix}{name}.")
