"""Fusion: the reference against float64, Triton against it.

Matrices are plain and FP8, with every norm.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu.interpreter import interpret

from peagle_jax.draft.fusion import Fusion
from peagle_jax.kernels import fp8_matmul, fusion, fusion_triton
from peagle_jax.layers.fp8 import Fp8Linear


def case(M=5, E=128, D=70, layers=3, seed=0):
    rng = np.random.default_rng(seed)
    x = [jnp.asarray(rng.standard_normal((M, E)) * 2.0**i, jnp.float32) for i in range(layers)]
    return (
        x,
        jnp.asarray(rng.standard_normal((layers * E, D)) * 0.1, jnp.float32),
        jnp.asarray(rng.uniform(0.3, 2, layers * E), jnp.float32),
    )


def exact(aux_hidden_states, w, gain, norm, eps):
    x = np.stack([np.asarray(y, np.float64) for y in aux_hidden_states], 1)
    mean = (x**2).mean(axis=(1, 2) if norm == "whole" else 2, keepdims=True)
    x = x if norm == "none" else x / np.sqrt(mean + eps)
    gain = 1 if gain is None else np.asarray(gain, np.float64)
    return (x.reshape(len(x), -1) * gain) @ np.asarray(w, np.float64)


NORMS = ["none", "whole", "per_layer"]


@pytest.mark.parametrize(
    "shape",
    [
        dict(),
        dict(M=1, E=100, layers=2),
        dict(M=70, E=70, D=130, layers=4),
        dict(layers=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", NORMS)
def test_plain(norm, shape):
    aux_hidden_states, w, gain = case(**shape)
    gain = None if norm == "none" else gain
    want = exact(aux_hidden_states, w, gain, norm, 0.3)
    joint = jnp.stack(aux_hidden_states, axis=1)
    triton = [
        fusion_triton.fuse(joint, w, gain, norm, 0.3, start=interpret),
        fusion.reference(joint, w, gain, norm, 0.3),
    ]
    triton += [
        fusion_triton.fuse(
            aux_hidden_states, w, gain, norm, 0.3, start=interpret, splits=splits, be=32
        )
        for splits in (1, 2, 3)
    ]
    for got in (fusion.reference(aux_hidden_states, w, gain, norm, 0.3), *triton):
        assert np.abs(np.asarray(got) - want).max() / np.abs(want).max() < 1e-5


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_fp8(norm, blocks):
    """Triton against the reference, which quantizes alike; both are near the plain product."""
    aux_hidden_states, w, gain = case(E=256)
    gain = None if norm == "none" else gain
    matrix = fp8_matmul.quantize(w.T, blocks=blocks)
    want = fusion.reference(aux_hidden_states, matrix, gain, norm, 0.3)
    for splits in (1, 2):
        got = fusion_triton.fuse(
            aux_hidden_states, matrix, gain, norm, 0.3, start=interpret, splits=splits
        )
        assert jnp.abs(got - want).max() / jnp.abs(want).max() < 1e-5
    near = exact(aux_hidden_states, matrix.dequantized().T, gain, norm, 0.3)
    assert 1e-4 < np.linalg.norm(np.asarray(want) - near) / np.linalg.norm(near) < 0.05


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"before_fc": True},
        {"norm_per_layer": True},
        {"norm_per_layer": True, "before_fc": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("fp8", [False, True])
def test_the_module_takes_the_kernel(fp8, options, monkeypatch):
    """The kernel gives what the module's own products give, and so do gradients.

    With both norms there is no kernel.
    """
    aux_hidden_states, w, _ = case(E=128, D=40)
    fusion_layer = Fusion(
        3,
        128,
        40,
        0.3,
        **{"before_fc": False, "norm_per_layer": False} | options,
        dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    rng = np.random.default_rng(1)
    for norm in [fusion_layer.input_norm, *(fusion_layer.fc_norm or [])]:
        if norm is not None:
            norm.scale[...] = jnp.asarray(rng.uniform(0.3, 2, norm.scale.shape), jnp.float32)
    fusion_layer.fc.kernel[...] = w
    if fp8:
        matrix = fp8_matmul.quantize(w.T)
        fusion_layer.fc = Fp8Linear(fusion_layer.fc, blocks=False)
        fusion_layer.fc.values[...], fusion_layer.fc.scale[...] = matrix.values, matrix.scale
    x = jnp.concatenate(aux_hidden_states, axis=-1).reshape(5, 1, -1)

    def loss(x):
        return (fusion_layer(x) ** 2).sum()

    want, grad = fusion_layer(x), jax.grad(loss)(x)
    used = []
    monkeypatch.setattr(fusion, "choose", lambda *_: "triton")
    monkeypatch.setitem(
        fusion.FORMS,
        "triton",
        lambda *args: used.append(1) or fusion_triton.fuse(*args, start=interpret),
    )
    off = 0.05 if fp8 else 1e-5  # other groups of activations share a scale
    assert jnp.linalg.norm(fusion_layer(x) - want) / jnp.linalg.norm(want) < off
    assert jnp.linalg.norm(jax.grad(loss)(x) - grad) / jnp.linalg.norm(grad) < 2 * off
    assert bool(used) is (len(options) < 2)


def test_what_kernels_cannot_take():
    aux_hidden_states, w, gain = case(E=100)
    matrix = fp8_matmul.quantize(w.T)
    with pytest.raises(ValueError, match="they need a GPU"):
        fusion.fuse(aux_hidden_states, w, gain, "whole", 0.3, form="triton")
    np.testing.assert_array_equal(
        fusion.fuse(aux_hidden_states, w, gain, "whole", 0.3, form="auto"),
        fusion.reference(aux_hidden_states, w, gain, "whole", 0.3),
    )
    assert (
        fusion.unsupported(aux_hidden_states, matrix)
        == "in FP8 hidden states must be multiples of 128 wide, and these have 100"
    )
    assert (
        fusion.unsupported(aux_hidden_states, w)
        == "they multiply in 16 bits, and operands are float32"
    )
    aux_hidden_states, w = (
        [x.astype(jnp.bfloat16) for x in aux_hidden_states],
        w.astype(jnp.bfloat16),
    )
    assert (
        fusion.unsupported(aux_hidden_states * 2, w)
        == "they take 4 aux hidden state layers at most, and there are 6"
    )
    assert fusion.unsupported(aux_hidden_states, w) is None


def test_auto_leaves_many_rows_to_a_library(monkeypatch):
    from peagle_jax.kernels import choose

    monkeypatch.setattr(choose, "unavailable_reason", lambda form: None)
    w = jnp.zeros((256, 8), jnp.bfloat16)
    taken = [
        fusion.is_supported([jnp.zeros((rows, 128), jnp.bfloat16)] * 2, w)
        for rows in (fusion.MAX_AUTO_ROWS, fusion.MAX_AUTO_ROWS + 1)
    ]
    assert taken == [True, False]
