"""Every kernel against float64 on fresh random operands, in memory that was full of NaN before."""

import functools
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from gpu import checking, exact
from gpu.checking import error
from gpu.exact import to_float64
from gpu.numerics_attention import attentions, trainings, writes
from gpu.numerics_layers import joint_products, losses, rotations, routers
from peagle_jax.kernels import experts, fp8_matmul, fusion, vocab
from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.layers.moe import (
    GLU,
    AnyExpertLinear,
    ExpertLinear,
    ExpertWeights,
    Fp8ExpertLinear,
    Mxfp4ExpertLinear,
)
from peagle_jax.targets.gpt_oss import ClampedSwiGLU

PRODUCT_SHAPES = [
    (1, 2048, 4096),
    (7, 4000, 2080),
    (8, 2048, 4096),  # in parts along the inputs
    (16, 4096, 4096),
    (64, 4096, 8192),
    (130, 6144, 4096),
    (2000, 4096, 4096),
]


def products(rng: np.random.Generator, tiny: bool, kind: str = "triton") -> Iterator[dict]:
    """FP8 products with both kinds of scales; rows of activations differ in size."""
    for M, N, K in [(3, 96, 256), (2, 70, 1000)] if tiny else PRODUCT_SHAPES:
        for blocks in (False, True):
            w = fp8_matmul.quantize(checking.random(rng, N, K, dtype=jnp.float32), blocks=blocks)
            row_sizes = jnp.asarray(rng.uniform(0.1, 10, (M, 1)), checking.DTYPE)
            x = checking.random(rng, M, K) * row_sizes
            values, scale = fp8_matmul.quantize_rows(x, blocks=blocks)
            scales = np.repeat(to_float64(scale), 128 if blocks else K, axis=1)[:, :K]
            want = to_float64(values) * scales @ to_float64(w.dequantized()).T
            for form in checking.forms(kind):
                if fp8_matmul.unsupported(form, x, w):
                    continue

                def multiply(x, values, scale, form=form):
                    return fp8_matmul.matmul(x, Fp8Matrix(values, scale), form)

                got = checking.run(multiply, x, w.values, w.scale)
                text = f"{M} x {N} x {K}{', blocks' if blocks else ''}"
                yield checking.row("fp8_matmul", form, text, error(got, want))


def fusions(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """Fusion of three layers: a plain matrix with every norm, and an FP8 matrix without."""
    shapes = [(1, 2048, 2048), (14, 2880, 2880), (100, 4096, 4096)]
    for M, E, D in [(3, 128, 64)] if tiny else shapes:
        x = checking.random(rng, M, 3, E)
        gain = jnp.asarray(rng.uniform(0.5, 2, 3 * E), checking.DTYPE)
        w = checking.random(rng, 3 * E, D, scale=E**-0.5)
        for norm in ("none", "whole", "per_layer"):
            yield from _plain_fusions(x, w, None if norm == "none" else gain, norm)
        if E % 128 == 0:
            yield from _fp8_fusions(x, fp8_matmul.quantize(w.T))


def _plain_fusions(x, w, gain, norm: str) -> Iterator[dict]:
    M, _, E = x.shape
    normed = to_float64(x)
    mean = (normed**2).mean(axis=(1, 2) if norm == "whole" else 2, keepdims=True)
    if norm != "none":
        normed = normed / np.sqrt(mean + 1e-5)
    want = normed.reshape(M, -1) * (1 if gain is None else to_float64(gain)) @ to_float64(w)
    for form in checking.forms("triton"):
        fuse = functools.partial(fusion.fuse, norm=norm, eps=1e-5, form=form)
        got = checking.run(fuse, *checking.operands(form, x, w, gain))
        yield checking.row("fusion", form, f"{M} x {E} x {w.shape[1]}, {norm}", error(got, want))


def _fp8_fusions(x, w: Fp8Matrix) -> Iterator[dict]:
    M, _, E = x.shape
    D = len(w.values)
    want = np.zeros((M, D))
    for i in range(3):
        values, scale = fp8_matmul.quantize_rows(x[:, i], blocks=True)
        scales = np.repeat(to_float64(scale), 128, axis=1)
        columns = to_float64(w.dequantized()[:, i * E : (i + 1) * E])
        want += to_float64(values) * scales @ columns.T
    for form in checking.forms("triton"):

        def fuse(x, values, scale, form=form):
            return fusion.fuse(x, Fp8Matrix(values, scale), None, "none", 1e-5, form=form)

        got = checking.run(fuse, x, w.values, w.scale)
        yield checking.row("fusion", form, f"{M} x {E} x {D}, float8", error(got, want))


def largest_logits(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """The logits of the tokens that were found, beside the largest logits."""
    shapes = [(1, 2048, 151936), (8, 2048, 151936), (100, 2880, 32000)]
    for M, K, V in [(3, 64, 300)] if tiny else shapes:
        x, w = checking.random(rng, M, K), checking.random(rng, K, V, scale=K**-0.5)
        text = f"{M} x {K} x {V}"
        logits = to_float64(x) @ to_float64(w)
        lse = np.log(np.exp(logits).sum(axis=1))
        three_largest = np.sort(logits, axis=1)[:, :-4:-1]
        for form in checking.forms("triton"):

            def topk_one(x, w, form=form):
                return vocab.topk(x, w, 1, form=form)

            top = checking.run(topk_one, x, w)
            of_ids = np.take_along_axis(logits, np.asarray(top.ids), 1)[:, 0]
            errors = error(top.lse, lse), error(of_ids, logits.max(axis=1))
            yield checking.row("vocab topk", form, text, *errors)

            def topk_three(x, w, form=form):
                return vocab.topk(x, w, 3, vocab_first=True, form=form)

            top = checking.run(topk_three, x, w.T)
            of_ids = np.take_along_axis(logits, np.asarray(top.ids), 1)
            errors = error(top.values, three_largest), error(of_ids, three_largest)
            yield checking.row("vocab topk", form, f"{text}, tied, three largest", *errors)
        w8 = fp8_matmul.quantize(w.T)
        logits = to_float64(x) @ to_float64(w8.dequantized()).T
        for form in checking.forms("triton"):

            def topk_fp8(x, values, scale, form=form):
                return vocab.topk(x, values, 1, scale, vocab_first=True, form=form)

            top = checking.run(topk_fp8, x, w8.values, w8.scale)
            of_ids = np.take_along_axis(logits, np.asarray(top.ids), 1)[:, 0]
            errors = error(of_ids, logits.max(axis=1)), error(top.values[:, 0], of_ids)
            yield checking.row("vocab topk", form, f"{text}, float8", *errors)


def mixtures(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """Mixtures of experts, by every form that a GPU may take; some pairs are another device's.

    MXFP4 is as GPT-OSS has it, gate and up in turns, with biases.
    """
    count, dim, width, k = (5, 64, 32, 2) if tiny else (32, 1024, 512, 4)
    for kind in ("plain", "row", "block", "mxfp4"):
        act = ClampedSwiGLU(1.5, 1.3) if kind == "mxfp4" else GLU(jax.nn.silu)
        sizes = (dim, 2 * width), (width, dim)
        linears = [random_expert_linear(rng, kind, count, *size) for size in sizes]
        graph, state = nnx.split(nnx.List(linears))
        for n in (1, 7) if tiny else (1, 8, 77, 300):
            x = checking.random(rng, n, dim)
            topk_ids = np.stack([rng.permutation(count)[:k] for _ in range(n)])
            routing_weights = rng.uniform(0.1, 1, (n, k))
            topk_ids[rng.random((n, k)) < 0.1] = count
            want = exact.mixture(to_float64(x), topk_ids, routing_weights, linears, act)
            ids = jnp.asarray(topk_ids, jnp.int32)
            shares = jnp.asarray(routing_weights, jnp.float32)
            text = f"{n} tokens of {k} of {count}, {dim} x {width}, {kind}"
            for form in ["grouped", *checking.forms("triton")[1:]]:

                def mix(state, x, ids, shares, form=form, graph=graph, act=act):
                    weights = ExpertWeights(*nnx.merge(graph, state), act, count)
                    return experts.FORMS[form](x, ids, shares, weights)

                got = checking.run(mix, state, x, ids, shares)
                yield checking.row("experts", form, text, error(got, want))


def random_expert_linear(
    rng: np.random.Generator, kind: str, count: int, inputs: int, outputs: int
) -> AnyExpertLinear:
    """The matrices of `count` experts, of a kind of `StoredMatrices`."""
    dtype = checking.DTYPE
    if kind == "plain":
        linear = ExpertLinear(count, inputs, outputs, bias=False, dtype=dtype, rngs=nnx.Rngs(0))
        linear.kernel[...] = checking.random(rng, count, inputs, outputs, scale=inputs**-0.5)
    elif kind == "mxfp4":
        linear = Mxfp4ExpertLinear(count, inputs, outputs, bias=True, dtype=dtype, rngs=nnx.Rngs(0))
        linear.blocks[...] = jnp.asarray(rng.integers(0, 256, linear.blocks.shape), jnp.uint8)
        linear.scales[...] = jnp.asarray(rng.integers(118, 123, linear.scales.shape), jnp.uint8)
        linear.bias[...] = checking.random(rng, count, outputs, scale=0.3)
    else:
        linear = Fp8ExpertLinear(count, inputs, outputs, bias=None, blocks=kind == "block")
        values = rng.standard_normal(linear.values.shape, np.float32)
        scale = rng.uniform(0.5, 2, linear.scale.shape) * inputs**-0.5
        linear.values[...] = jnp.asarray(values.astype(ml_dtypes.float8_e4m3fn))
        linear.scale[...] = jnp.asarray(scale, jnp.float32)
    return linear


def mosaic_products(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """FP8 products in Mosaic GPU; where kernels are interpreted, by its interpreter."""
    if not checking.IS_INTERPRETED:
        yield from products(rng, tiny, kind="mosaic")
        return
    if jax.__version_info__ < (0, 11):
        print("without Mosaic GPU's interpreter, which needs jax 0.11", file=sys.stderr)
        return
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    from peagle_jax.kernels import fp8_matmul_mosaic

    M, N, K = 3, 128, 256
    w = fp8_matmul.quantize(checking.random(rng, N, K, dtype=jnp.float32))
    values, scale = fp8_matmul.quantize_rows(checking.random(rng, M, K), blocks=False)
    want = to_float64(values) * to_float64(scale) @ to_float64(w.dequantized()).T
    got = fp8_matmul_mosaic.product(
        values, scale, w.values, w.scale, jnp.float32, interpret=InterpretGPUParams()
    )
    yield checking.row("fp8_matmul", "mosaic", f"{M} x {N} x {K}", error(got, want))


# Attention and training last: their float64 references take a processor minutes.
PARTS = {
    "products": products,
    "routing": routers,
    "experts": mixtures,
    "topk": largest_logits,
    "writes": writes,
    "fusion": fusions,
    "norm_rotate": rotations,
    "joint": joint_products,
    "losses": losses,
    "attention": attentions,
    "training": trainings,
    "mosaic": mosaic_products,
}
