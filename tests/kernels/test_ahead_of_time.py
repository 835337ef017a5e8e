"""XLA compiles programs with their kernels for an H200 that is not here.

These are decoding steps and loops, a training step and a product in Mosaic GPU. It needs an
environment of `scripts/gpu/install_cuda.sh ENV compiling`, which has the CUDA plugin. `.ci/run`
makes one, and runs what is not slow.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
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
for M in (8, 64, 192, 200, 256):
    args = spec(M, 4096, dtype=jnp.bfloat16), values, scale
    with target_gpu(H200), jax.default_device(device):
        compiled = product.trace(*args).lower(lowering_platforms=("cuda",)).compile()
        print(compiled.as_text().count('custom_call_target="mosaic_gpu'))
"""


def test_mosaic_product():
    """To machine code, without spilling: Mosaic GPU makes it while XLA compiles."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "PYTHONPATH": str(ROOT / "scripts" / "generate"),
    }
    done = subprocess.run(
        [sys.executable, "-c", MOSAIC],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines.count("1") == 5, done.stdout[-3000:]
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout)
    assert spilled == 5 * [("0", "0")]


STEP = """
import collections, json
import jax.numpy as jnp
import size_table
import thunks
import tiny
from peagle_jax.kernels.launch import H200, target_gpu
from peagle_jax.layers.rope import Rope
from peagle_jax.pipelines import tracing

# the kernels want keys of 16 numbers
changes = {"head_dim": 16, "rope": Rope.from_hf({"rope_theta": 777.0}, 16, "")}
changes["dtype"] = jnp.dtype("bfloat16")
models = tiny.target(layers=2, aux_hidden_state_layers=(0, 1), **changes), tiny.head(
    aux_hidden_state_layers=(0, 1), **changes
)
with target_gpu(H200):
    programs = tracing.lower(
        *models, 7, prompt=16, cache_size=64, device=size_table.cuda_device()
    )
for program in programs:
    compiled, listed = thunks.compile_program(program)
    calls = compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"')
    kinds = collections.Counter(thunk.kind for thunk in listed)
    print(json.dumps([calls, kinds["CustomCall"], [thunk.graph for thunk in listed]]))
"""


def test_prefill_and_a_step_are_one_graph_each():
    """Every Triton call too, so that the host launches a step at once."""
    programs = [json.loads(line) for line in run_script(STEP).splitlines()]
    assert len(programs) == 2
    for calls, custom_calls, graphs in programs:
        # attention, its merge or not, and cache writing of two layers and the head's; argmaxes
        assert calls >= 7 and custom_calls >= calls
        assert len(graphs) > 50 and set(graphs) == {0}


LOOP = """
import json
import cache_copies
import size_table
import thunks
from peagle_jax.kernels.graphs import OPTIONS

program, _ = cache_copies.lowered_loop("peagle", 1, "bfloat16", size_table.cuda_device())
for options in ({}, OPTIONS):
    _, listed = thunks.compile_program(program, options)
    print(json.dumps([[thunk.kind, thunk.graph] for thunk in listed]))
"""


def test_one_graph_holds_the_decoding_loop():
    """With the options of graphs.py; by default it holds the loop's body, a step."""
    by_default, with_options = (
        [tuple(thunk) for thunk in json.loads(line)]
        for line in run_script(LOOP, "tests/decode").splitlines()
    )
    outside = [kind for kind, graph in by_default if graph is None]
    assert outside == ["Copy", "While", "CustomKernel"] and len(by_default) > 100
    assert ("While", 0) in with_options and {graph for _, graph in with_options} == {0}
    assert len(with_options) == len(by_default)


LAYER = """
import layer_launches
from gpu import steps

print(sum(layer_launches.layer_thunks(steps.QWEN, 3, 1).values()))
"""


def test_a_layer_has_at_most_15_launches():
    """A plain step of Qwen3-Coder at its published size; docs/kernels.md says which they are."""
    assert 8 < int(run_script(LAYER)) <= 15


def run_script(text: str, *folders: str) -> str:
    """What a script prints, in a process whose kernels are not interpreted."""
    path = ("tests", "scripts/generate", "scripts/gpu", *folders)
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in path),
    }
    done = subprocess.run(
        [sys.executable, "-c", text], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


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
    assert len(loops) == 14
    for name, found in loops.items():
        assert found["made"] and not found["copies"], name


def test_training_step(tmp_path):
    """Attention is Triton's, and its scores take no memory; losses are a loop over chunks."""
    out = tmp_path / "rows.jsonl"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "JAX_PLATFORMS": "cpu"
    }
    command = [
        sys.executable,
        ROOT / "scripts" / "gpu" / "compile_ahead.py",
        "--only",
        "training",
        "--without",
        "training",
        "--out",
        out,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    with_kernels, without = (json.loads(line) for line in out.read_text().splitlines())
    assert with_kernels["kernels"] and not without["kernels"] and without["triton"] == 0
    assert with_kernels["triton"] >= 4 * 3 and with_kernels["loops"] == 1
    assert with_kernels["temporary_bytes"] < without["temporary_bytes"]


def link_or_copy(source: str, target: str) -> None:
    """The plugin has 400 MB; links to files end at a file system's border."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


WITHOUT_ASSEMBLER = """
import sys
import jax
import size_table
from peagle_jax import assembler
from peagle_jax.cli import main

device = size_table.cuda_device()
jax.config.update("jax_default_device", device)
jax.local_devices = lambda: [device]
print(assembler.find_ptxas())
sys.exit(main(["generate", "--target", "peagle_jax/assets/target", "--prompt", "x"]))
"""


def test_without_ptxas_there_is_one_line(tmp_path):
    """XLA itself says that it has none: on a machine that has JAX's plugin and no CUDA.

    The plugin is a copy, beside which no wheel with `ptxas` lies; other packages are links.
    """
    site, nothing = tmp_path / "site", tmp_path / "nothing"
    site.mkdir()
    nothing.mkdir()
    for package in Path(jax.__file__).parents[1].iterdir():
        if package.name == "jax_plugins":
            shutil.copytree(package, site / package.name, copy_function=link_or_copy)
        elif not package.name.startswith("nvidia"):
            (site / package.name).symlink_to(package)
    command = [os.path.realpath(sys.executable), "-S", "-c", WITHOUT_ASSEMBLER]
    if Path("/usr/local/cuda").exists():  # there XLA looks, whatever PATH is
        shell = ["/usr/bin/unshare", "--map-root-user", "--mount", "/bin/sh", "-c"]
        hide = shlex.join(["mount", "--bind", str(nothing), "/usr/local/cuda"])
        if subprocess.run([*shell, hide], capture_output=True).returncode:
            pytest.skip("CUDA is in /usr/local/cuda, and this user cannot hide it")
        command = [*shell, f"{hide} && exec {shlex.join(command)}"]
    hidden = ("TRITON_INTERPRET", "CUDA_ROOT", "CUDA_HOME")
    env = {key: value for key, value in os.environ.items() if key not in hidden} | {
        "JAX_PLATFORMS": "cpu",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT / "scripts" / "generate"))),
    }
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stdout.split() == ["None"], done.stderr[-3000:]
    ours = [line for line in done.stderr.splitlines() if line.startswith("peagle:")]
    assert len(ours) == 1 and ours[0].startswith("peagle: CUDA: XLA must find ptxas, which")
    assert "Traceback" not in done.stderr
