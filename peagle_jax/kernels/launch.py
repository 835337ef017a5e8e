"""The launch of a Triton kernel, described once for three executors.

A `Launch` can be run by jax-triton on a GPU, by Triton's interpreter on a CPU, or handed to
Triton's compiler without any device. So tests run and compile the very launches that users run.

Shapes are constants of a kernel and never arguments: jax-triton tells Triton nothing about the
divisibility of integers that are passed at run time. The same kernel then needs 255 registers and
768 bytes of stack instead of 44 registers and none, and loses its asynchronous loads.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.interpreters import partial_eval

from peagle_jax import assembler

# (jax, jax-triton, triton) that every kernel was traced and compiled with: the newest, the former
# ones, and those of machines that come with a triton of their own (scripts/gpu/install_cuda.sh).
TRIED_VERSIONS = (
    ("0.12.0.1", "0.4.1", "3.9"),
    ("0.11.2", "0.4.1", "3.9"),
    ("0.11.2", "0.4.1", "3.6"),
)
# 10 * major + minor of the PTX that Triton writes. By default it writes the newest version that its
# own assembler reads, 9.4 for Triton 3.9, and XLA's may be older: every CUDA 13 reads 9.0.
PTX_VERSION = 90


@dataclasses.dataclass(frozen=True)
class Launch:
    """One grid of one kernel.

    The kernel's parameters are the inputs, then the `new_outputs`, then the constants by name.
    """

    kernel: Any  # a function decorated with `triton.jit`
    inputs: tuple[jax.Array, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    # index of an input -> index of the output that is the same memory: the kernel changes it in
    # place, and what it does not write keeps its value
    input_output_aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def new_outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The outputs that are no input changed in place."""
        changed = set(self.input_output_aliases.values())
        return tuple(x for i, x in enumerate(self.outputs) if i not in changed)


Launcher = Callable[[Launch], tuple[jax.Array, ...]]


def on_gpu(launch: Launch) -> tuple[jax.Array, ...]:
    """Launches through jax-triton, as part of the surrounding jitted function."""
    if interpreter := _interpreter.get():
        return interpreter(launch)
    return tuple(
        import_jax_triton().triton_call(
            *launch.inputs,
            kernel=launch.kernel,
            out_type=launch.outputs,
            grid=launch.grid,
            num_warps=launch.warps,
            num_stages=launch.stages,
            compute_capability=gpu().capability,
            backend_options={"ptx_version": PTX_VERSION, "enable_fp_fusion": True},
            input_output_aliases=dict(launch.input_output_aliases),
            **launch.constants,
        )
    )


def import_jax_triton() -> Any:
    """jax-triton, which is imported only where a kernel is launched.

    Raises:
      ImportError: it, or triton, is not installed.
    """
    from triton.backends.nvidia import driver

    if not hasattr(driver, "TMA_TF32"):
        # jax-triton 0.4 takes a triton without this name for one without NVIDIA's compiler. Triton
        # 3.6 lacks it, and nobody reads it but TMA descriptors in TF32, which no kernel here has.
        driver.TMA_TF32 = 0  # pyright: ignore[reportAttributeAccessIssue]
    import jax_triton  # pyright: ignore[reportMissingImports]
    from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

    call, rules = triton_lib.triton_kernel_call_p, partial_eval.dce_rules
    if call in rules:
        rules[call] = with_any_arguments(rules[call])
    return jax_triton


def with_any_arguments(rule: Callable) -> Callable:
    """A rule for dead code that jax 0.11 and jax 0.12 can call.

    Since 0.12 jax puts a third argument between a rule's two (`DCERule` of
    jax._src.interpreters.partial_eval). It says which operands are read later, so that writes to
    mutable arrays that nobody reads can be removed. jax-triton 0.4.1's rule lacks it. Leaving it
    out is safe: that rule removes no call and no operand, whatever its arguments.

    Args:
      rule: of jax-triton. One that does not take exactly two arguments is returned as it is.
    """
    if len(inspect.signature(rule).parameters) != 2:
        return rule

    def rule_of_two(*arguments: Any) -> Any:
        return rule(arguments[0], arguments[-1])

    return rule_of_two


def untried_versions() -> str | None:
    """Which versions of jax, jax-triton and triton are here, if no test has seen them together.

    Returns:
      A clause with these versions and those that were; None where they were tried.
    """
    names = ("jax", "jax-triton", "triton")
    try:
        found = [importlib.metadata.version(name) for name in names]
    except importlib.metadata.PackageNotFoundError:
        return None  # kernels are interpreted
    if any(
        all(
            f"{version}.".startswith(f"{series}.")
            for version, series in zip(found, tried, strict=True)
        )
        for tried in TRIED_VERSIONS
    ):
        return None

    def listed(versions):
        return ", ".join(map(" ".join, zip(names, versions, strict=True)))

    tried = " or ".join(map(listed, TRIED_VERSIONS))
    return f"{listed(found)} were not tried together; use {tried}"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a launch has to know of the GPU that it is made for."""

    capability: int  # 10 * major + minor of the compute capability: 90 for an H200
    num_sms: int  # streaming multiprocessors

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one block can have.

        From the CUDA C++ Programming Guide, technical specifications per compute capability.
        """
        return 101_376 if self.capability >= 120 else 232_448


H200, B200, RTX_PRO_6000 = Gpu(90, 132), Gpu(100, 148), Gpu(120, 188)

_target_gpu: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("target_gpu", default=None)
_interpreter: contextvars.ContextVar[Launcher | None] = contextvars.ContextVar(
    "interpreter", default=None
)
_disabled: contextvars.ContextVar[bool] = contextvars.ContextVar("disabled", default=False)


@contextlib.contextmanager
def target_gpu(gpu: Gpu) -> Iterator[None]:
    """Within this context launches are made for `gpu`, whatever is here: for compiling ahead.

    A function that `jax.jit` has traced outside is not traced again: trace new functions.
    """
    token = _target_gpu.set(gpu)
    try:
        yield
    finally:
        _target_gpu.reset(token)


@contextlib.contextmanager
def disable_kernels() -> Iterator[None]:
    """What is traced within this context has no kernels: to measure what kernels bring."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


@contextlib.contextmanager
def interpret_kernels(start: Launcher) -> Iterator[None]:
    """What is traced within this context is made as for a GPU, and `start` runs its kernels.

    With an interpreter as `start`, whole models run on a CPU as they would on a GPU.
    """
    token = _interpreter.set(start)
    try:
        yield
    finally:
        _interpreter.reset(token)


def gpu() -> Gpu:
    """The GPU that launches are made for: the first one, or an H200 where there is none."""
    return _target_gpu.get() or _local_gpu() or H200


@functools.cache
def _local_gpu() -> Gpu | None:
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return None
    major, _, minor = device.compute_capability.partition(".")
    return Gpu(int(major) * 10 + int(minor), device.core_count)


def unavailable_reason(form: str) -> str | None:
    """Why kernels of a form cannot run here, or cannot be compiled for the `target_gpu`.

    Args:
      form: "triton" or "mosaic".

    Returns:
      A clause whose subject "they" is the kernels; None when they can run.
    """
    if _disabled.get():
        return "they are disabled"
    if form == "triton" and _interpreter.get():
        return None
    return _unavailable_reason(form, platform(), _target_gpu.get())


@functools.cache
def _unavailable_reason(form: str, platform: str, target: Gpu | None) -> str | None:
    if platform != "gpu":
        return f"they need a GPU, and JAX runs on {platform}"
    gpu = target or _local_gpu()
    if gpu is None:
        return "they need a GPU, and this machine only compiles for one"
    if target is None and "cuda" not in jax.devices("gpu")[0].client.platform_version.lower():
        return "they are written for NVIDIA GPUs"
    if gpu.capability < 90:
        capability = gpu.capability / 10
        return (
            "they need compute capability 9.0 or more (Hopper), "
            f"and this GPU has compute capability {capability}"
        )
    if form == "mosaic":
        return None
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set"
    if sys.version_info < (3, 12):
        return "they need jax-triton 0.4, and so Python 3.12"
    try:
        if reason := too_old(importlib.metadata.version("jax-triton")):
            return reason
        import_jax_triton()
    except ImportError as error:  # PackageNotFoundError is one
        return f"{str(error).splitlines()[0]} (pip install 'peagle-jax[kernels]')"
    if target is None and assembler.find_ptxas() is None:
        return f"they need ptxas, and neither PATH nor JAX's wheels have one ({assembler.INSTALL})"
    return None


def too_old(version: str) -> str | None:
    """Why kernels cannot be traced with this version of jax-triton; None where they can."""
    if tuple(map(int, version.split(".")[:2])) >= (0, 4):
        return None
    # it gives outputs that are changed inputs parameters of their own
    return f"they need jax-triton 0.4, and this is {version}"


def platform() -> str:
    """The platform of the default device ("cpu", "gpu"), also of one that is only compiled for."""
    if _interpreter.get():
        return "gpu"
    default_device = getattr(jax.config, "jax_default_device", None)
    device_platform = getattr(default_device, "platform", None)
    return device_platform or jax.default_backend()
