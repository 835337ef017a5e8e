"""The FP8 product of Mosaic GPU, in the interpreter that watches for races.

It needs jax 0.11, and so Python 3.12.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.kernels import fp8_matmul

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
    pytest.skip(
        f"Mosaic GPU's interpreter needs jax 0.11, this is {jax.__version__}: "
        "scripts/gpu/install_mosaic.sh",
        allow_module_level=True,
    )

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from peagle_jax.kernels import fp8_matmul_mosaic


@pytest.mark.parametrize("tiles", [{}, {"splits": 2}, {"stages": 2}, {"tile_n": 128}], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 128, 1024), (8, 256, 512), (21, 384, 512), (130, 128, 512), (200, 128, 512)],
    ids=str,
)
def test_is_the_product(shape, tiles):
    M, N, K = shape
    rng = np.random.default_rng(4)
    w = fp8_matmul.quantize(
        jnp.asarray(rng.standard_normal((N, K)) * rng.uniform(0.1, 10, (N, 1)), jnp.float32)
    )
    x, x_scale = fp8_matmul.quantize_rows(
        jnp.asarray(rng.standard_normal((M, K)) * rng.uniform(0.1, 10, (M, 1)), jnp.float32),
        blocks=False,
    )
    want = (np.asarray(x, np.float64) * np.asarray(x_scale)) @ (
        np.asarray(w.values, np.float64) * np.asarray(w.scale)[:, None]
    ).T
    got = fp8_matmul_mosaic.product(
        x,
        x_scale,
        w.values,
        w.scale,
        jnp.float32,
        interpret=InterpretGPUParams(detect_races=True),
        **tiles,
    )
    assert np.abs(np.asarray(got) - want).max() / np.abs(want).max() < 1e-6
    assert not interpret_pallas_call.get_races().races_found


def test_what_it_cannot_take():
    unsupported = fp8_matmul_mosaic.unsupported
    assert unsupported(8, 4096, 4096, True) is None
    assert "one scale a row" in unsupported(8, 4096, 4096, False)
    for M, N, K in ((300, 4096, 4096), (8, 100, 4096), (8, 128, 200)):
        assert f"{M} x {N} x {K}" in unsupported(M, N, K, True)
