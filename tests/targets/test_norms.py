"""Norms in bfloat16 round where transformers rounds: of these numbers no bit may differ."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.kernels import row_sums
from peagle_jax.layers.basic import LateRMSNorm, RMSNorm

torch = pytest.importorskip("torch")

DIM, EPS = 64, 1e-5


@pytest.mark.parametrize("rows", [(50,), (3, 100)])
@pytest.mark.parametrize(
    "ours, module, name",
    [
        (RMSNorm, "llama.modeling_llama", "LlamaRMSNorm"),
        (RMSNorm, "qwen3.modeling_qwen3", "Qwen3RMSNorm"),
        (LateRMSNorm, "gpt_oss.modeling_gpt_oss", "GptOssRMSNorm"),
    ],
)
def test_every_bit_in_bfloat16(ours, module, name, rows):
    """Scaling before or after rounding gives other bits for a third of the numbers."""
    theirs = getattr(__import__(f"transformers.models.{module}", fromlist=[name]), name)(DIM, EPS)
    rng = np.random.default_rng(0)
    scale = jnp.asarray(rng.uniform(0.5, 1.5, DIM), jnp.bfloat16)
    x = jnp.asarray(rng.normal(0, 3, (*rows, DIM)), jnp.bfloat16)
    norm = ours(DIM, EPS, dtype=jnp.bfloat16)
    norm.scale[...] = scale

    def to_torch(array):
        return torch.tensor(np.asarray(array, np.float32)).to(torch.bfloat16)

    theirs.weight.data = to_torch(scale)
    with torch.no_grad():
        want = theirs(to_torch(x)).to(torch.float32).numpy()
    np.testing.assert_array_equal(np.asarray(norm(x), np.float32), want)
    other = {RMSNorm: LateRMSNorm, LateRMSNorm: RMSNorm}[ours](DIM, EPS, dtype=jnp.bfloat16)
    other.scale[...] = scale
    assert (np.asarray(other(x), np.float32) != want).mean() > 0.1  # the test can fail


@pytest.mark.parametrize("norm_class", [RMSNorm, LateRMSNorm])
def test_many_rows_are_summed_as_few_are(norm_class):
    """From MIN_TOKENS tokens on all axes but the last become one: 3 x 90 tokens of 2 heads here."""
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.normal(0, 3, (3, 90, 2, 16)), jnp.float32) for _ in range(2))
    norm = norm_class(16, EPS, dtype=jnp.float32)
    norm.scale[...] = jnp.asarray(rng.uniform(0.5, 1.5, 16), jnp.float32)
    graph, params = nnx.split(norm)

    def call(params, x):
        return nnx.merge(graph, params)(x)

    assert row_sums.with_one_axis_of_rows(x).shape == (540, 16)
    assert row_sums.with_one_axis_of_rows(x[:1]).shape == (1, 90, 2, 16)
    y, vjp = jax.vjp(call, params, x)
    dparams, dx = vjp(dy)
    parts = [jax.vjp(call, params, x[i : i + 1]) for i in range(3)]
    np.testing.assert_allclose(y, jnp.concatenate([part for part, _ in parts]), rtol=1e-6)
    grads = [vjp(dy[i : i + 1]) for i, (_, vjp) in enumerate(parts)]
    np.testing.assert_allclose(dx, jnp.concatenate([dx for _, dx in grads]), rtol=1e-4, atol=1e-6)
    want = sum(dparams["scale"][...] for dparams, _ in grads)
    backward = jax.make_jaxpr(lambda params, x, dy: jax.vjp(call, params, x)[1](dy))
    program = str(backward(params, x, dy))
    sums = re.findall(r"reduce_sum\[\s*axes=\((.*?)\)", program)
    assert sums and set(sums) <= {"0,", "1,"}, "of a matrix, never of more axes"
    np.testing.assert_allclose(dparams["scale"][...], want, rtol=1e-5, atol=1e-5)


def test_all_axes_stay_where_they_may_be_divided(monkeypatch):
    """One that is divided among devices cannot be merged with others for free."""
    x = jnp.zeros((3, 90, 2, 16))
    with monkeypatch.context() as patch:
        patch.setattr(row_sums, "platform", lambda: "gpu")
        assert row_sums.with_one_axis_of_rows(x).shape == x.shape
    monkeypatch.setattr(row_sums, "multi_device_reason", lambda: "two devices")
    assert row_sums.with_one_axis_of_rows(x).shape == x.shape
