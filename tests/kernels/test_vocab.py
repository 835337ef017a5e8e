"""Output matrices without logits: references against float64 and autodiff, Triton against them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu.interpreter import interpret

from peagle_jax.kernels import vocab, vocab_triton
from peagle_jax.kernels.fp8_matmul import quantize
from peagle_jax.layers import Linear, RMSNorm
from peagle_jax.layers.decoder import Decoder
from peagle_jax.layers.fp8 import Fp8Linear

SHAPES = [(1, 64, 130), (5, 70, 300), (37, 64, 256)]


def rows(M, K, V, seed=2):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((M, K)) * 0.7, rng.standard_normal((K, V))
    w[:, V // 2] = w[:, 3]  # equals: the lower id counts
    x[-1] = w[:, 3] * 2  # and they are the largest of the last row
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_topk(shape):
    x, w = rows(*shape)
    logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for top in (vocab.reference(x, w, 5), vocab_triton.topk(x, w, 5, start=interpret)):
        order = np.argsort(-logits, axis=1, kind="stable")[:, :5]
        np.testing.assert_array_equal(top.ids, order)
        np.testing.assert_allclose(
            top.values, np.take_along_axis(logits, order, 1), rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(top.lse, np.log(np.exp(logits).sum(1)), rtol=1e-5)
    assert top.ids[-1, 0] == 3 and top.ids[-1, 1] == shape[2] // 2


def test_topk_in_float8():
    x, w = rows(5, 70, 300)
    matrix = quantize(w.T)
    logits = np.asarray(x, np.float64) @ np.asarray(matrix.dequantized(), np.float64).T
    args = x, matrix.values, 2, matrix.scale
    for top in (
        vocab.reference(*args, vocab_first=True),
        vocab_triton.topk(*args, vocab_first=True, start=interpret),
    ):
        np.testing.assert_array_equal(top.ids, np.argsort(-logits, axis=1, kind="stable")[:, :2])
        np.testing.assert_allclose(top.lse, np.log(np.exp(logits).sum(1)), rtol=1e-5)


def test_modules_ask_for_the_argmax(monkeypatch):
    """A linear layer, one in FP8, a decoder with an output matrix, and one with tied embeddings."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((2, 3, 70)), jnp.float32)
    linear = Linear(70, 300, dtype=jnp.float32, rngs=nnx.Rngs(1))
    fp8_linear = Fp8Linear(linear, blocks=False)
    matrix = quantize(linear.kernel[...].T)
    fp8_linear.values[...], fp8_linear.scale[...] = matrix.values, matrix.scale
    norm = RMSNorm(70, 1e-5, dtype=jnp.float32)
    decoders = [
        Decoder(
            300,
            70,
            0,
            lambda i: None,
            norm,
            aux_hidden_state_layers=(),
            tied=tied,
            dtype=jnp.float32,
            rngs=nnx.Rngs(2),
            logit_cap=cap,
        )
        for tied, cap in ((False, None), (True, 5.0))
    ]
    modules = [linear, fp8_linear, *decoders]
    plain = [module.argmax_logits(x) for module in modules]
    assert [ids.tolist() for ids in plain[2:]] == [
        jnp.argmax(d.compute_logits(x), axis=-1).tolist() for d in decoders
    ]
    asked = []
    kernel = functools.partial(vocab_triton.topk, start=interpret)
    monkeypatch.setattr(vocab, "choose", lambda *_: "triton")
    monkeypatch.setitem(
        vocab.FORMS,
        "triton",
        lambda *args, **options: asked.append(options) or kernel(*args, **options),
    )
    for module, want in zip(modules, plain, strict=True):
        np.testing.assert_array_equal(module.argmax_logits(x), want)
    assert [options["vocab_first"] for options in asked] == [False, True, False, True]


@pytest.mark.parametrize("shape", [(3, 4, 512), (5, 192), (2, 64), (4, 100)])
def test_argmax_is_the_first_of_the_largest(shape):
    """numpy's: also with ties in one block and in several, and with infinities."""
    rng = np.random.default_rng(7)
    logits = rng.integers(-90, 90, (*shape[:-2], shape[-2] + 20, shape[-1])).astype(np.float32)
    flat = logits.reshape(-1, shape[-1])
    flat[0], flat[1, -1] = -np.inf, np.inf
    np.testing.assert_array_equal(jax.jit(vocab.argmax)(logits), logits.argmax(axis=-1))


def test_a_cpu_searches_long_rows_by_blocks():
    """Without an argmax of XLA over the whole row, which looks at one number after the other."""
    logits = jax.ShapeDtypeStruct((2, 512), jnp.float32)
    lowered = jax.jit(vocab.argmax).lower(logits).as_text()
    assert "tensor<2x8x64xf32>" in lowered and "tensor<2x512xi32>" not in lowered
