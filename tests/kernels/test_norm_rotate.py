"""Norms and rotation of queries and keys: Triton and the reference against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from gpu.interpreter import interpret

from peagle_jax.kernels import norm_rotate, norm_rotate_triton


def exact(x, gain, positions, frequencies, eps, scale):
    x = np.asarray(x, np.float64)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * np.asarray(gain, np.float64)
    angle = np.asarray(positions)[:, None, None] * np.asarray(frequencies, np.float64)
    a, b = np.split(x, 2, axis=-1)
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@pytest.mark.parametrize("n, N, G, H", [(1, 4, 2, 16), (3, 6, 1, 64)])
@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("bfloat16", 0.01)])
def test_is_exact(n, N, G, H, dtype, limit):
    rng = np.random.default_rng(n)
    q, k = (jnp.asarray(3 * rng.standard_normal((n, heads, H)), dtype) for heads in (N, G))
    gains = [jnp.asarray(rng.uniform(0.5, 2, H), dtype) for _ in range(2)]
    positions = jnp.asarray(rng.integers(0, 50, n), jnp.int32)
    frequencies = jnp.asarray(100.0 ** -np.linspace(0, 1, H // 2), jnp.float32)
    rule = dict(eps=0.1, scale=1.3)
    args = q, k, *gains, positions, frequencies
    want = [exact(x, g, positions, frequencies, **rule) for x, g in zip((q, k), gains, strict=True)]
    for results in (
        norm_rotate.reference(*args, **rule),
        norm_rotate_triton.rotate(*args, **rule, start=interpret),
    ):
        for got, right in zip(results, want, strict=True):
            assert got.dtype == dtype
            got = np.asarray(got, np.float64)
            assert np.linalg.norm(got - right) / np.linalg.norm(right) < limit


def test_where_it_does_not_run():
    q, k, one = jnp.ones((1, 2, 16)), jnp.ones((1, 1, 16)), jnp.ones(16)
    args = q, k, one, one, jnp.zeros(1, jnp.int32), jnp.ones(8)
    assert norm_rotate.rotate(*args, eps=1e-6, scale=1.0) is None
