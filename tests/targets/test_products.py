"""Activations and products on a CPU: float32 around 16-bit operands, in rows that fill a tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from peagle_jax.decode.generate import generate
from peagle_jax.kernels import launch, native_code, processor
from peagle_jax.layers import (
    Embedding,
    activation_dtype,
    default_cache_dtype,
    float32_product,
    product,
    products,
)
from peagle_jax.layers.rope import Rope


def test_activations_are_float32_on_a_cpu_and_16_bit_on_a_gpu(monkeypatch):
    assert activation_dtype(jnp.bfloat16) == jnp.float32
    assert activation_dtype(jnp.float16) == jnp.float32
    monkeypatch.setattr(products, "platform", lambda: "gpu")
    assert activation_dtype(jnp.bfloat16) == jnp.bfloat16
    assert activation_dtype(jnp.float32) == jnp.float32
    table = Embedding(5, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert table(jnp.array([[1, 2]])).dtype == jnp.bfloat16


def test_caches_are_bfloat16_where_a_kernel_reads_them(monkeypatch):
    assert default_cache_dtype(jnp.float16, [32]) == jnp.float32
    assert default_cache_dtype(jnp.float32, [32]) == jnp.float32
    assert default_cache_dtype(jnp.bfloat16, [32, 18]) == jnp.float32  # no whole vectors
    monkeypatch.setattr(processor, "instructions", lambda: "avx512_bf16")
    has_kernel = native_code.is_available()
    for head_dims in ([32], [64, 512]):
        wanted = jnp.bfloat16 if has_kernel else jnp.float32
        assert default_cache_dtype(jnp.bfloat16, head_dims) == wanted
    monkeypatch.setattr(native_code, "multi_device_reason", lambda: "a mesh")
    assert default_cache_dtype(jnp.bfloat16, [32]) == jnp.float32
    monkeypatch.undo()
    monkeypatch.setattr(processor, "instructions", lambda: "avx512_bf16 amx_bf16")
    assert default_cache_dtype(jnp.bfloat16, [32]) == jnp.float32
    monkeypatch.undo()
    monkeypatch.setattr(native_code, "load", lambda: None)
    assert default_cache_dtype(jnp.bfloat16, [32]) == jnp.float32
    monkeypatch.setattr(products, "platform", lambda: "gpu")
    assert default_cache_dtype(jnp.bfloat16, [18]) == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_an_embedding(dtype):
    """Those of the table, with their gradient; on a CPU the table is not converted for them."""
    module = Embedding(64, 24, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    tokens = jnp.array([[3, 63, 3], [0, 17, 5]])
    graph, params = nnx.split(module)

    def rows(params, tokens):
        return nnx.merge(graph, params)(tokens)

    table = np.asarray(module.table[...], np.float32)
    np.testing.assert_array_equal(np.asarray(rows(params, tokens), np.float32), table[tokens])
    weights = np.random.default_rng(0).normal(size=(2, 3, 24)).astype(np.float32)
    gradient = jax.grad(lambda p: (rows(p, tokens).astype(jnp.float32) * weights).sum())(params)
    expected = np.zeros((64, 24))
    np.add.at(expected, np.asarray(tokens), weights)
    tolerance = 0.02 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(
        np.asarray(gradient["table"][...], np.float32), expected, atol=tolerance
    )
    compiled = jax.jit(rows).lower(params, tokens).compile().as_text()
    assert ("f32[64,24]" in compiled) == (dtype == "float32")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_operands_are_rounded_and_sums_are_not(platform, rows, experts, monkeypatch):
    monkeypatch.setattr(products, "platform", lambda: platform)
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(*experts, rows, 70)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(*experts, 70, 11)), jnp.bfloat16)
    rounded = np.asarray(x.astype(jnp.bfloat16), np.float64)
    got = product(x, w)
    assert got.dtype == jnp.float32 and got.shape == (*experts, rows, 11)
    np.testing.assert_allclose(got, rounded @ np.asarray(w, np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "x, w, want",
    [("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float32", "float32")]
    + [("float32", "float32", "float32"), ("float32", "float16", "float32")],
)
def test_the_result_has_the_wider_dtype(x, w, want):
    assert product(jnp.ones((2, 3), x), jnp.ones((3, 4), w)).dtype == jnp.dtype(want)


@pytest.mark.parametrize("x", ["bfloat16", "float16", "float32"])
def test_logits_are_float32_whatever_is_multiplied(x):
    """Sums of 16-bit operands are not rounded; gradients have the dtypes of the operands."""
    rng = np.random.default_rng(1)
    a, w = (jnp.asarray(rng.normal(size=shape), x) for shape in ((5, 70), (70, 11)))
    want = np.asarray(a, np.float64) @ np.asarray(w, np.float64)
    got, vjp = jax.vjp(float32_product, a, w)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    dy = rng.normal(size=got.shape)
    exact = dy @ np.asarray(w, np.float64).T, np.asarray(a, np.float64).T @ dy
    for grad, right in zip(vjp(jnp.asarray(dy, jnp.float32)), exact, strict=True):
        assert grad.dtype == jnp.dtype(x)
        off = np.linalg.norm(np.asarray(grad, np.float64) - right) / np.linalg.norm(right)
        assert off < (1e-6 if x == "float32" else 0.005)


def test_gradients_reach_operands_of_different_dtypes():
    x, w = jnp.ones((2, 3)), jnp.full((3, 4), 2, jnp.bfloat16)
    dx, dw = jax.grad(lambda x, w: product(x, w).sum(), argnums=(0, 1))(x, w)
    assert dx.dtype == jnp.float32 and dw.dtype == jnp.bfloat16
    assert np.array_equal(dx, np.full((2, 3), 8.0)) and np.array_equal(dw, np.full((3, 4), 2.0))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_loop_holds_no_copy_of_its_weights(rows):
    """XLA converts the weights of one-row products to float32, all of them before the loop."""
    w = jnp.ones((256, 256), jnp.bfloat16)

    def repeat(w, x):
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(product(x, w)), x)

    program = jax.jit(repeat).lower(w, jnp.ones((rows, 256))).compile()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < w.nbytes / 4


@pytest.mark.parametrize("has_matrix_units", [True, False])
def test_gradients_are_products_of_rounded_operands(has_matrix_units, monkeypatch):
    """Where bfloat16 is faster, the gradient of the output is rounded before it is multiplied."""
    monkeypatch.setattr(products, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(products, "has_bfloat16_matrix_units", lambda: has_matrix_units)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(9, 70)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(70, 11)), jnp.bfloat16)
    dy = jnp.asarray(rng.normal(size=(9, 11)), jnp.float32)
    y, pull = jax.vjp(product, x, w)
    dx, dw = pull(dy)
    rounded = np.asarray(dy.astype(jnp.bfloat16), np.float64)
    assert y.dtype == dx.dtype == jnp.float32 and dw.dtype == jnp.bfloat16
    np.testing.assert_allclose(dx, rounded @ np.asarray(w, np.float64).T, rtol=1e-5, atol=1e-5)
    want = np.asarray(x.astype(jnp.bfloat16), np.float64).T @ rounded
    # the gradient has the parameter's 8 bits
    np.testing.assert_allclose(np.asarray(dw, np.float64), want, rtol=2**-8, atol=1e-5)


needs_matrix_units = pytest.mark.skipif(
    not products.has_bfloat16_matrix_units(), reason="needs a CPU with matrix units for bfloat16"
)


@needs_matrix_units
def test_rows_do_not_depend_on_their_number():
    """What makes decoding of bfloat16 models repeatable, where matrix units compute it."""
    assert launch.platform() == "cpu"
    rng = np.random.default_rng(1)
    w = jnp.asarray(rng.normal(size=(384, 200)), jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(64, 384)), jnp.float32)
    multiply = jax.jit(product)
    whole = multiply(x, w)
    for rows in (1, 2, 3, 4, 7, 30):
        assert np.array_equal(multiply(x[:rows], w), whole[:rows]), rows


@needs_matrix_units
def test_a_bfloat16_model_decodes_alike_with_and_without_drafts():
    target, head = tiny.target(dtype=jnp.bfloat16), tiny.head(dtype=jnp.bfloat16)
    prompts = [[3, 14, 15], [9, 2, 6, 5, 35]]
    plain = generate(target, None, prompts, max_new_tokens=20)
    drafted = generate(target, head, prompts, k=4, max_new_tokens=20)
    assert [a.output_token_ids for a in plain] == [a.output_token_ids for a in drafted]


def test_cosines_are_computed_once_for_all_heads_and_layers():
    """XLA would fuse them with what is rotated, and compute them for each head of each layer."""
    rope = Rope(tuple(0.5**i for i in range(4)))

    def rotate_all(layers, positions):
        return [rope(x, positions).swapaxes(1, 2) for x in layers]

    layers = [jnp.full((2, 5, 6, 8), i + 0.5) for i in range(3)]
    positions = jnp.arange(10).reshape(2, 5) + 3
    program = jax.jit(rotate_all).lower(layers, positions).compile().as_text()
    assert program.count(" cosine(") == 1 and program.count(" sine(") == 1
