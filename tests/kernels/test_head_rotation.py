"""Norms of heads and their rotation in C++, against the layers that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import native

from peagle_jax.kernels import head_rotation, native_code
from peagle_jax.layers import RMSNorm, Rope


@pytest.fixture(params=native.SETS, autouse=True)
def lanes(request, monkeypatch):
    return native.use(request.param, monkeypatch)


def heads(tokens: int, num: int, size: int) -> jax.Array:
    rng = np.random.default_rng(0)
    return 3 * jnp.asarray(rng.standard_normal((tokens, num, size)), jnp.float32)


@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize("size", [32, 64, 96, 256])
@pytest.mark.parametrize("tokens, num", [(1, 6), (7, 2), (300, 3)])
def test_norm_and_rotation(tokens, num, size, scale):
    """Few and many heads; of whole tokens at positions far apart; YaRN scales the tables."""
    x = heads(tokens, num, size)
    rope = Rope(tuple(1e4 ** (-np.arange(size // 2) / (size / 2))), scale)
    positions = 97 * jnp.arange(tokens)
    norm = RMSNorm(size, 1e-3, dtype=jnp.float32)
    norm.scale[...] = 1 + 0.2 * heads(1, 1, size)[0, 0]
    tables = rope.tables(positions)
    for gain, before in [(None, x), (norm.scale[...], norm(x))]:
        want = rope(before[None], positions[None])[0]
        got = head_rotation.rotate(x, gain, *tables, 1e-3)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(
            head_rotation.rotate(x[-1:, :1], gain, *(t[-1:] for t in tables), 1e-3)[0, 0],
            got[-1, 0],
        )


def test_which_heads(lanes, monkeypatch):
    assert head_rotation.can_rotate(jnp.zeros((1, 2, 2 * lanes)))
    assert not head_rotation.can_rotate(jnp.zeros((1, 2, lanes)))
    assert not head_rotation.can_rotate(jnp.zeros((1, 2, 2 * lanes), jnp.bfloat16))
    monkeypatch.setattr(native_code, "multi_device_reason", lambda: "a mesh")
    assert not head_rotation.can_rotate(jnp.zeros((1, 2, 2 * lanes)))
    monkeypatch.undo()
    monkeypatch.setattr(native_code, "load", lambda: None)
    assert not head_rotation.can_rotate(jnp.zeros((1, 2, 2 * lanes)))


@pytest.mark.parametrize("wrong", ["gain", "cos", "sin", "tokens"])
def test_arrays_that_do_not_fit_are_refused(wrong):
    gain = jnp.zeros(31 if wrong == "gain" else 32)
    tokens = 2 if wrong == "tokens" else 3
    cos = jnp.zeros((tokens, 15 if wrong == "cos" else 16))
    sin = jnp.zeros((tokens, 17 if wrong == "sin" else 16))
    x = jnp.zeros((3, 2, 32))
    call = native_code.function("peagle_rotate_heads", jax.ShapeDtypeStruct(x.shape, x.dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match="sizes do not fit"):
        call(x, gain, cos, sin, eps=np.float32(0))


def test_heads_that_are_no_whole_vectors_are_refused(lanes):
    tables = jnp.zeros((3, lanes // 2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no whole number of vectors"):
        head_rotation.rotate(jnp.zeros((3, 2, lanes)), None, tables, tables)
