"""Layers that call C++ kernels on a CPU, beside the same layers without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.kernels import attention, head_rotation, native_code
from peagle_jax.kernels.tiled_products import to_tiles
from peagle_jax.layers import (
    MLP,
    Attention,
    CachedAttention,
    LateRMSNorm,
    Linear,
    RMSNorm,
    Rope,
    gelu_tanh,
)
from peagle_jax.layers.basic import joint_tiled_products
from peagle_jax.types import CacheShape, KVCache


@pytest.fixture(autouse=True)
def compiler():
    if not native_code.is_available():
        pytest.skip("there is no C++ compiler")


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def fill(layer: nnx.Module, seed: int) -> None:
    """Random numbers for biases and gains, too, which layers begin with zeros and ones."""
    state = nnx.state(layer, nnx.Param)
    drawn = jax.tree.map(lambda x: x + 0.3 * random(*x.shape, seed=seed).astype(x.dtype), state)
    nnx.update(layer, drawn)


def in_tiles(*layers: Linear) -> None:
    for layer in layers:
        layer.kernel = nnx.Param(to_tiles(layer.kernel[...]))


class OneMore(RMSNorm):
    """A norm of another kind, which kernels do not know."""

    def __call__(self, x):
        return super().__call__(x) + x


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [jax.nn.silu, gelu_tanh, jnp.tanh])
@pytest.mark.parametrize("kind", [None, RMSNorm, LateRMSNorm, OneMore])
def test_mlps(bias, act, kind):
    mlp = MLP(32, 64, dtype=jnp.float32, rngs=nnx.Rngs(0), bias=bias, act=act)
    norm = None if kind is None else kind(32, 1e-2, dtype=jnp.float32)
    fill(mlp, 1)
    if norm is not None:
        fill(norm, 2)
    x = 3 * random(2, 5, 32, seed=3)
    want = mlp(x if norm is None else norm(x))
    np.testing.assert_array_equal(mlp(x, norm), want)
    in_tiles(mlp.gate, mlp.up, mlp.down)
    calls = "peagle_gated_products" in jax.jit(lambda x: mlp(x, norm)).lower(x).as_text()
    assert calls == (act is not jnp.tanh)
    np.testing.assert_allclose(mlp(x, norm), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_of_rows_in_each_dtype(dtype):
    """A kernel computes norms in float32 alone, and takes rows as they come."""
    layers = [Linear(32, n, dtype=jnp.float32, rngs=nnx.Rngs(n)) for n in (64, 32)]
    norm = RMSNorm(32, 1e-2, dtype=dtype)
    fill(norm, 2)
    in_tiles(*layers)
    x = (3 * random(2, 5, 32, seed=3)).astype(dtype)
    got = joint_tiled_products(x, layers, norm)
    for y, layer in zip(got, layers, strict=True):
        np.testing.assert_allclose(y, layer(norm(x)), rtol=1e-5, atol=1e-5)


def attend(layer, x, positions, **options):
    """The layer's output, and its cache, after a cache of random numbers."""
    cache = KVCache.empty((CacheShape((0,), 2, 64, None),), len(x), 40, jnp.float32)
    cache = jax.tree.map(lambda x: random(*x.shape) if x.ndim == 4 else x, cache)
    attention = CachedAttention(positions)
    return jax.jit(lambda x: layer(x, positions, 0, attention, cache, **options))(x)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 90])
def test_attention(qk_norm, has_rows, is_tiled, tokens, monkeypatch):
    """Norms, rotation, writing and attention; queries of some tokens, whose positions differ."""
    rope = Rope(tuple(10.0 ** (-np.arange(32) / 16)), 1.2)
    sizes = {"inputs": 48, "dim": 64, "heads": 6, "kv_heads": 2, "head_dim": 64, "rope": rope}
    about = {"bias": True, "qk_norm": qk_norm, "eps": 1e-2, "window": 30, "sinks": True}
    layer = Attention(**sizes, **about, dtype=jnp.float32, rngs=nnx.Rngs(0))
    norm = RMSNorm(48, 1e-2, dtype=jnp.float32)
    fill(layer, 1)
    fill(norm, 2)
    tokens = min(tokens, 30)
    x = random(3, tokens, 48, seed=3)
    positions = jnp.array([[0], [7], [9]]) + jnp.arange(tokens)[None]
    rows = None
    if has_rows:
        rows = jnp.array([[tokens - 1, 0], [0, tokens // 2], [tokens - 1, tokens - 1]])
    with monkeypatch.context() as without:
        without.setattr(head_rotation, "can_rotate", lambda x: False)
        without.setattr(attention, "is_native", lambda *args: False)
        y, cache = attend(layer, norm(x), positions, rows=rows)
    if is_tiled:
        in_tiles(layer.q, layer.k, layer.v, layer.o)
    got, written = attend(layer, x, positions, rows=rows, norm=norm)
    np.testing.assert_allclose(got, y, rtol=1e-4, atol=1e-4)
    for a, b in zip(jax.tree.leaves(written), jax.tree.leaves(cache), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_norm_that_kernels_do_not_know_is_a_layer_of_its_own():
    """Before heads are rotated by a kernel."""
    rope = Rope(tuple(10.0 ** (-np.arange(32) / 16)))
    sizes = {"inputs": 48, "dim": 64, "heads": 2, "kv_heads": 2, "head_dim": 64, "rope": rope}
    about = {"bias": False, "qk_norm": True, "eps": 1e-2, "window": None}
    layer = Attention(**sizes, **about, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = random(1, 3, 2, 64)
    positions = jnp.array([[4, 5, 6]])
    for kind in (RMSNorm, LateRMSNorm, OneMore):
        norm = kind(64, 1e-2, dtype=jnp.float32)
        fill(norm, 5)
        want = rope(norm(x), positions)
        np.testing.assert_allclose(
            layer._rotate_by_kernel(x, norm, positions), want, rtol=1e-5, atol=1e-5
        )
