"""Every kernel as jax-triton lowers it for a GPU.

It needs jax-triton and JAX's CUDA plugin: an environment of `scripts/gpu/install_cuda.sh ENV
compiling`. `.ci/run` makes one.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_triton") is None,
    reason="needs an environment of scripts/gpu/install_cuda.sh",
)
# beginning of a case's name -> what it launches, in order
LAUNCHES = {
    "attention 1 token": ["attention_kernel", "merge_kernel"],
    "attention 8 tokens": ["attention_kernel", "merge_kernel"],
    "attention 512 tokens": ["attention_kernel"],
    "attention over a ring": ["attention_kernel"],
    "argmax": ["topk_kernel"],
    "cache writing": ["write_kernel"],
    "experts, 1 token of 8, float8": ["expert_gemv_kernel"],
    "experts, 1 token of 4": ["expert_kernel"],
    "gemv 1x2048": ["gemv_kernel"],
    "gemv 1x(": ["joint_gemv_kernel"],
    "experts, 8 tokens of 8, float8": ["expert_gemv_kernel"],
    "experts, 8 tokens of 8, bfloat16": ["sort_kernel", "expert_kernel"],
    "experts, 8 tokens of 4": ["sort_kernel", "expert_kernel"],
    "fp8_matmul": ["fp8_kernel"],
    "fusion": ["fusion_kernel"],
    "joint fp8_matmul": ["joint_kernel"],
    "packed attention": ["forward_kernel", "query_kernel", "key_kernel"],
    "quantizing": ["quantize_kernel"],
    "rotating": ["rotate_kernel"],
    "routing": ["product_kernel", "choice_kernel"],
}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Where jax-triton leaves what it compiles."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def calls(dumped):
    """Calls of every case, by its name (lower_kernels.py)."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_TRITON_DUMP_DIR": str(dumped),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "scripts" / "gpu"))),
    }
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "kernels" / "lower_kernels.py"],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_launch_is_a_call(calls):
    for beginning, functions in LAUNCHES.items():
        selected = [found for name, found in calls.items() if name.startswith(beginning)]
        assert selected, beginning
        for found in selected:
            assert [call["function"] for call in found] == functions, beginning


def test_caches_are_changed_in_place(calls):
    """An output without its alias would be new memory, and lose what the cache held."""
    in_place = {
        name: call["aliases"] for name, found in calls.items() for call in found if call["aliases"]
    }
    assert in_place == {
        "cache writing, 8 tokens, float8": [[3, 0], [4, 1], [5, 2], [6, 3]],
        "cache writing, 8 tokens, 16 heads of 256": [[3, 0], [4, 1]],
    }


def test_every_assembler_of_cuda_13_reads_it(calls, dumped):
    """PTX 9.0: an assembler of CUDA 13.0 may come first in PATH, and refuses what is newer."""
    versions = {
        re.search(r"^\.version ([\d.]+)", path.read_text(), re.M)[1]
        for path in dumped.rglob("*.ptx")
    }
    assert versions == {"9.0"}
