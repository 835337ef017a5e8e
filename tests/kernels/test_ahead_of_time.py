"""XLA compiles programs with their kernels for an H200 that is not here.

These are decoding loops, a training step and a product in Mosaic GPU. It needs an environment of
scripts/gpu/install_cuda.sh, which has the CUDA plugin.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_triton") is None,
    reason="needs an environment of scripts/gpu/install_cuda.sh",
)


MOSAIC = """
import jax
import jax.numpy as jnp
import size_table
from jax.sharding import SingleDeviceSharding
from peagle_jax.kernels import fp8_matmul
from peagle_jax.kernels.launch import H200, target_gpu

device = size_table.cuda_device()

def spec(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

@jax.jit
def product(x, values, scale):
    return fp8_matmul.matmul(x, fp8_matmul.Fp8Matrix(values, scale), "mosaic")

values, scale = spec(4096, 4096, dtype=jnp.float8_e4m3fn), spec(4096, dtype=jnp.float32)
for M in (8, 64):
    args = spec(M, 4096, dtype=jnp.bfloat16), values, scale
    with target_gpu(H200), jax.default_device(device):
        compiled = product.trace(*args).lower(lowering_platforms=("cuda",)).compile()
        print(compiled.as_text().count('custom_call_target="mosaic_gpu'))
"""


def test_mosaic_product():
    """To machine code: Mosaic GPU makes it while XLA compiles."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "scripts" / "generate")}
    done = subprocess.run(
        [sys.executable, "-c", MOSAIC],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.split() == ["1", "1"], done.stderr[-3000:]


def test_no_cache_is_copied():
    """In the loops of all methods, keys and values are written by kernels or updates in place."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT / "scripts" / "generate"))),
    }
    command = [sys.executable, ROOT / "tests" / "decode" / "cache_copies.py"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    loops = json.loads(done.stdout)
    assert len(loops) == 8
    for name, found in loops.items():
        assert found["made"] and not found["copies"], name


def test_training_step(tmp_path):
    """Attention, fusion and losses are Triton's; scores and logits take no memory."""
    out = tmp_path / "rows.jsonl"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "JAX_PLATFORMS": "cpu"
    }
    command = [
        sys.executable,
        ROOT / "scripts" / "gpu" / "compile_ahead.py",
        "--without",
        "--only",
        "training",
        "--out",
        out,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    with_kernels, without = (json.loads(line) for line in out.read_text().splitlines())
    assert with_kernels["kernels"] and not without["kernels"] and without["triton"] == 0
    assert with_kernels["triton"] >= 4 * 3 + 2 and with_kernels["loops"] == 0
    assert with_kernels["temporary_bytes"] < without["temporary_bytes"]
