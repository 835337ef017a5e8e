"""NVIDIA's assembler `ptxas`, without which nothing can be compiled for a GPU that JAX sees.

A driver is enough for `jax.devices()`. XLA and jax-triton write PTX, of which `ptxas` makes machine
code; it comes with the wheels of `jax[cuda13]`, or with a CUDA toolkit.
"""

import functools
import os
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from peagle_jax.types import InputError

# XLA's words for having no assembler (xla/stream_executor/cuda/assemble_compilation_provider.cc)
NO_ASSEMBLER = "No PTX compilation provider is available"
USUAL_ROOTS = "/usr/local/cuda", "/opt/cuda"
INSTALL = "pip install 'jax[cuda13]'"


def find_ptxas() -> str | None:
    """The path of a `ptxas` that XLA would find; None where there is none.

    The places are those that XLA of jaxlib 0.11.2 logs (TF_CPP_VMODULE=subprocess_compilation=2),
    and toolkits that an environment variable names.
    """
    folders = [os.path.join(root, "bin") for root in _cuda_roots()]
    return shutil.which("ptxas", path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def _cuda_roots() -> list[str]:
    """Folders of CUDA: named by the user, of wheels, of conda, and the usual ones."""
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
    if device.platform == "gpu":
        _compile_something()


@functools.cache
def _compile_something() -> None:
    """Compiles the smallest of programs: whether it can be assembled is for XLA to say."""
    try:
        jax.jit(jnp.negative).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()
    except jax.errors.JaxRuntimeError as error:
        if NO_ASSEMBLER not in str(error):
            raise
        raise InputError(
            "CUDA",
            rule="XLA must find ptxas, which makes machine code for an NVIDIA GPU",
            got="none in PATH, beside JAX or in /usr/local/cuda",
            next_step=f"install it ({INSTALL}), or put the bin folder of CUDA 13 into PATH",
        ) from None
