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
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Launch:
    """One grid of one kernel.

    The kernel's parameters are the inputs, then the outputs, then the constants by name.
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


Launcher = Callable[[Launch], tuple[jax.Array, ...]]


def on_gpu(launch: Launch) -> tuple[jax.Array, ...]:
    """Launches through jax-triton, as part of the surrounding jitted function."""
    if interpreter := _interpreter.get():
        return interpreter(launch)
    # cannot be imported on a machine without CUDA
    import jax_triton  # pyright: ignore[reportMissingImports]

    return tuple(
        jax_triton.triton_call(
            *launch.inputs,
            kernel=launch.kernel,
            out_shape=launch.outputs,
            grid=launch.grid,
            num_warps=launch.warps,
            num_stages=launch.stages,
            compute_capability=gpu().capability,
            input_output_aliases=dict(launch.input_output_aliases),
            **launch.constants,
        )
    )


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
    try:
        # it wants triton, and a CUDA plugin that fits
        import jax_triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return f"{str(error).splitlines()[0]} (pip install 'peagle-jax[kernels]')"
    return None


def platform() -> str:
    """The platform of the default device ("cpu", "gpu"), also of one that is only compiled for."""
    if _interpreter.get():
        return "gpu"
    default_device = getattr(jax.config, "jax_default_device", None)
    device_platform = getattr(default_device, "platform", None)
    return device_platform or jax.default_backend()
