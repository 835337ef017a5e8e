"""Norms in bfloat16 round where transformers rounds: of these numbers no bit may differ."""

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.layers.basic import LateRMSNorm, RMSNorm

torch = pytest.importorskip("torch")

DIM, EPS = 64, 1e-5


@pytest.mark.parametrize(
    "ours, module, name",
    [
        (RMSNorm, "llama.modeling_llama", "LlamaRMSNorm"),
        (RMSNorm, "qwen3.modeling_qwen3", "Qwen3RMSNorm"),
        (LateRMSNorm, "gpt_oss.modeling_gpt_oss", "GptOssRMSNorm"),
    ],
)
def test_every_bit_in_bfloat16(ours, module, name):
    """Scaling before or after rounding gives other bits for a third of the numbers."""
    theirs = getattr(__import__(f"transformers.models.{module}", fromlist=[name]), name)(DIM, EPS)
    rng = np.random.default_rng(0)
    scale = jnp.asarray(rng.uniform(0.5, 1.5, DIM), jnp.bfloat16)
    x = jnp.asarray(rng.normal(0, 3, (50, DIM)), jnp.bfloat16)
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
