"""What the GPU suite compares with libraries: both compute the same, and what fails is said."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def libraries(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    from gpu import libraries

    return libraries


@pytest.mark.parametrize("T", [1, 3])
def test_attention_of_a_library_is_ours(libraries, T):
    """By JAX's own form, which takes the arguments that cuDNN's takes."""
    B, N, G, S, H = 2, 4, 2, 40, 16
    rng = np.random.default_rng(T)
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, T, N, H), (B, G, S, H), (B, G, S, H))
    )
    positions = jnp.asarray([[7], [30]], jnp.int32) + jnp.arange(T)[None]
    operands = q, positions, k, v, k.swapaxes(1, 2), v.swapaxes(1, 2)
    want = libraries.cached_by("reference", *operands)
    np.testing.assert_allclose(libraries.library_attention("xla", *operands), want, atol=1e-5)


def test_training_attention_of_a_library_is_ours(libraries):
    from gpu.numerics_attention import chains

    from peagle_jax.kernels import packed_attention

    rng = np.random.default_rng(0)
    n, P, N, G, H = 20, 50, 4, 2, 16
    intervals = chains(rng, n, P)
    q, k, v = (jnp.asarray(rng.normal(size=(1, P, heads, H)), jnp.float32) for heads in (N, G, G))
    want, _ = packed_attention.attend(q, k, v, intervals, H**-0.5, form="reference")
    got = libraries.masked_attention("xla", intervals, n, q, k, v)
    sees = (intervals.last >= intervals.first) | (intervals.chain_len > 0)
    assert 40 < sees.sum() <= P
    np.testing.assert_allclose(got[sees], want[sees], atol=1e-5)


def test_mxfp8_is_as_precise_as_its_numbers_are(libraries):
    """Values of 3 bits of mantissa: a 16th of each at most, unless it is tiny beside its block."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 256)) * 10.0 ** rng.integers(-3, 4, (5, 1)), jnp.float32)
    values, scale = libraries.mx_quantized(x)
    assert values.dtype == jnp.float8_e4m3fn and scale.dtype == jnp.float8_e8m0fnu
    assert values.shape == (5, 256) and scale.shape == (5, 8)
    got = np.asarray(values, np.float64) * np.repeat(np.asarray(scale, np.float64), 32, axis=1)
    want = np.asarray(x, np.float64)
    largest = np.abs(want).reshape(5, 8, 32).max(axis=2).repeat(32, axis=1)
    off = np.abs(got - want)
    # the largest number of a block may be cut off at 448, by an eighth
    assert (
        off <= np.where(np.abs(want) > 0.8 * largest, 1 / 8, 1 / 16) * np.abs(want) + 1e-4 * largest
    ).all()


def test_a_form_that_fails_has_its_reason(libraries):
    def fails(x):
        raise NotImplementedError("no cuDNN\non this machine")

    runs, reasons = libraries.runnable({"a": jnp.sin, "b": fails}, (jnp.ones(3),))
    assert runs == {"a": jnp.sin} and reasons == {"b": "NotImplementedError: no cuDNN"}


def test_chunks_of_any_size_have_the_same_gradients(libraries):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((9, 6), (6, 11)) * 2]
    whole, small = (jax.jit(libraries.grads_in_chunks, static_argnums=0)(n, *args) for n in (9, 2))
    for a, b in zip(whole, small, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert all(np.abs(np.asarray(x)).max() > 0.1 for x in whole)
