"""XLA compiles a whole training step with its kernels for an H200 that is not here; where the CUDA plugin is installed (scripts/install_cuda.sh)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="needs an environment of scripts/install_cuda.sh")


def test_training_step(tmp_path):
    """Attention forward and backward of four layers, fusion, distances and slopes are Triton's; scores and logits take no memory."""
    out = tmp_path / "rows.jsonl"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, ROOT / "scripts" / "compile_ahead.py", "--without", "--only", "training", "--out", out]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    with_kernels, without = (json.loads(line) for line in out.read_text().splitlines())
    assert with_kernels["kernels"] and not without["kernels"] and without["triton"] == 0
    assert with_kernels["triton"] >= 4 * 3 + 2 and with_kernels["loops"] == 0
    assert with_kernels["temporary_bytes"] < without["temporary_bytes"]
