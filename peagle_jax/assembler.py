"""NVIDIA's assembler, without which nothing can be compiled for a GPU that JAX already sees.

A driver is enough for `jax.devices()`. Programs need more: XLA writes PTX and has it assembled by
nvJitLink or `ptxas`; the kernels of jax-triton are assembled by `ptxas` alone, when they are first
run. The wheels of `jax[cuda13]` have both.
"""

import functools
import os
import re
import shutil
import sys
from pathlib import Path

import jax

from peagle_jax.types import InputError

# XLA's words for having neither (xla/stream_executor/cuda/assemble_compilation_provider.cc)
NO_ASSEMBLER = "No PTX compilation provider is available"
USUAL_ROOTS = "/usr/local/cuda", "/opt/cuda"
INSTALL = "pip install 'jax[cuda13]'"


def find_ptxas() -> str | None:
    """The path of a `ptxas` that XLA would find; None where there is none.

    The places are those of xla/stream_executor/cuda/subprocess_compilation.cc and
    tsl/platform/cuda_root_path.cc, of which the folders of a build are left out.
    """
    folders = [os.path.join(root, "bin") for root in _cuda_roots()]
    return shutil.which("ptxas", path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def _cuda_roots() -> list[str]:
    """Folders of CUDA toolkits: named by the user, of wheels, of conda, and the usual ones."""
    named = [os.environ[name] for name in ("CUDA_ROOT", "CUDA_HOME") if name in os.environ]
    named += re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
    packages = Path(jax.__file__).parents[1]
    wheels = [str(packages / "nvidia" / name) for name in ("cu13", "cuda_nvcc")]
    return [*named, *wheels, sys.prefix, *USUAL_ROOTS]


def check_assembler() -> None:
    """Checks that XLA can compile for the device that it runs on, before anything is read.

    Raises:
      InputError: the device is an NVIDIA GPU, and there is no assembler.
    """
    device = jax.local_devices()[0]
    if device.platform == "gpu" and "cuda" in device.client.platform_version.lower():
        _compile_something()


@functools.cache
def _compile_something() -> None:
    """Compiles the smallest of programs; XLA looks for its assembler when it does."""
    try:
        jax.jit(jax.numpy.negative).lower(jax.ShapeDtypeStruct((), jax.numpy.float32)).compile()
    except jax.errors.JaxRuntimeError as error:
        if NO_ASSEMBLER not in str(error):
            raise
        raise InputError(
            "CUDA",
            rule="XLA must find ptxas or nvJitLink, which make machine code for an NVIDIA GPU",
            got="neither",
            next_step=f"install both ({INSTALL}), or put the bin folder of CUDA 13 into PATH",
        ) from None
