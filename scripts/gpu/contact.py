"""What a GPU is asked first: what is installed there, what a launch costs, whether graphs pay.

Kernels of a step run for microseconds, and a step of a mixture launches over a thousand of them. So
the cost of a launch that does nothing decides how fast a step can be at all.
"""

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from gpu.timing import ROUNDS
from peagle_jax.bench.timing import median_seconds
from peagle_jax.kernels.graphs import ENABLED, OPTIONS
from peagle_jax.kernels.launch import Launch, gpu, on_gpu, unavailable_reason, untried_versions
from peagle_jax.provenance import without_folders

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-triton",
    "triton",
    "torch",
    "numpy",
    "flax",
    "optax",
    "orbax-checkpoint",
    "rich",
    "transformers",
)
LAUNCHES = 256  # of an empty kernel, in one program
ROUND = 4  # of these, so many are a round of a loop
# ways to launch -> options of XLA's compiler: none of them uses graphs, graphs of what stands
# outside of loops, and graphs with loops in them
GRAPHS = {"no graphs": {ENABLED: ""}, "graphs": {}, "graphs with loops": OPTIONS}


def environment(tiny: bool) -> Iterator[dict]:
    """One row: versions, the device, assemblers, and why Triton kernels do not run."""
    device = jax.devices()[0]
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    memory = (device.memory_stats() or {}).get("bytes_limit")
    yield {
        "part": "environment",
        "versions": versions,
        "untried": untried_versions(),
        "triton_kernels": unavailable_reason("triton") or "they run",
        "platform_version": device.client.platform_version.splitlines()[0],
        "capability": gpu().capability,
        "multiprocessors": gpu().num_sms,
        "memory_bytes": memory,
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "ptxas": assemblers(),
        "xla_flags": without_folders(os.environ.get("XLA_FLAGS", "")),
    }


def assemblers() -> dict[str, str]:
    """Versions of the `ptxas` that comes first in PATH, and of those that Triton brings.

    By "PATH" or "triton", and the name of the file: folders of one machine do not belong into rows.
    """
    paths = {}
    if first := shutil.which("ptxas"):
        paths["PATH: ptxas"] = first
    try:
        import triton
    except ImportError:
        pass
    else:
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        paths |= {f"triton: {path.name}": str(path) for path in sorted(tools.glob("ptxas*"))}
    found = {}
    for name, path in paths.items():
        text = first_line(path, "--version", last=True)
        version = re.search(r"cuda_(\d+(?:\.\d+)*)", text)
        found[name] = version[1] if version else text
    return found


def first_line(*command: str, last: bool = False) -> str:
    """The first line that a command prints, or the last; empty where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines() or [""]
    return lines[-1 if last else 0]


def launches(tiny: bool) -> Iterator[dict]:
    """Microseconds a launch of an empty kernel: from the host, in graphs, and in loops in graphs.

    Launches depend on each other, so that they follow each other. A row whose form could not be
    compiled or run has its error in the place of its time.
    """
    reason = unavailable_reason("triton")
    if reason:
        yield {"part": "launches", "shape": "empty kernel", "not_run": reason}
        return
    count = 2 * ROUND if tiny else LAUNCHES
    x = jnp.zeros(1, jnp.float32)
    for name, program in {"a chain": chain, "rounds of a loop": rounds}.items():
        us, errors = {}, {}
        for graphs, options in GRAPHS.items():
            try:
                seconds = seconds_of(functools.partial(program, count), x, options)
            except Exception as error:  # a driver may mind one of them
                errors[graphs] = f"{type(error).__name__}: {error}"[:500]
            else:
                us[graphs] = 1e6 * seconds / count
        yield {
            "part": "launches",
            "shape": f"empty kernel, {name} of {count}",
            "us": us,
            "errors": errors,
        }
    yield {
        "part": "launches",
        "shape": "empty kernel, a call of a jitted function",
        "us": {"one call": 1e6 * seconds_of_calls(jax.jit(empty), x, 20 if tiny else 1000)},
        "errors": {},
    }


def empty(x: jax.Array) -> jax.Array:
    """x + 1, of one number: a launch that does next to nothing."""
    from gpu import empty_kernel

    output = jax.ShapeDtypeStruct(x.shape, x.dtype)
    launch = Launch(
        kernel=empty_kernel.kernel,
        inputs=(x,),
        outputs=(output,),
        grid=(1,),
        constants={},
        warps=1,
    )
    return on_gpu(launch)[0]


def chain(count: int, x: jax.Array) -> jax.Array:
    """`count` launches one after another."""
    for _ in range(count):
        x = empty(x)
    return x


def rounds(count: int, x: jax.Array) -> jax.Array:
    """As `chain`, as rounds of a loop that asks each time whether it goes on, as decoding does."""
    return jax.lax.while_loop(lambda y: y[0] < count, functools.partial(chain, ROUND), x)


def seconds_of(program: Callable, x: jax.Array, options: dict[str, str]) -> float:
    """Median seconds of a program; its result must be the number of launches."""
    on_device = jax.default_backend() == "gpu"
    run = jax.jit(program, compiler_options=options if on_device else None)
    assert run(x)[0] == program.args[0], "an empty kernel did not add 1"  # pyright: ignore
    return median_seconds(functools.partial(run, x), ROUNDS)


def seconds_of_calls(run: Callable, x: jax.Array, count: int) -> float:
    """Seconds of one of `count` calls, which the host makes without waiting for their results."""
    jax.block_until_ready(run(x))
    start = time.perf_counter()
    for _ in range(count):
        x = run(x)
    jax.block_until_ready(x)
    return (time.perf_counter() - start) / count
