"""The start of a Triton kernel, described once for three executors: a GPU, Triton's interpreter and the offline compiler.

So tests run and compile the very launches that users run. Shapes are constants of a kernel, never arguments: jax-triton tells
Triton nothing about the divisibility of runtime integers, which costs spills and the asynchronous loads (255 registers and 768
bytes of stack against 44 and none, same kernel).
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
    """One grid of one kernel, whose parameters are the inputs, the outputs and then the constants by name."""

    kernel: Any  # triton.jit
    inputs: tuple[jax.Array, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    updates: Mapping[int, int] = dataclasses.field(
        default_factory=dict
    )  # input -> the output that is it, changed where the kernel writes


Launcher = Callable[[Launch], tuple[jax.Array, ...]]


def on_gpu(launch: Launch) -> tuple[jax.Array, ...]:
    """By jax-triton, as part of the surrounding jitted function."""
    if start := _instead.get():
        return start(launch)
    import jax_triton  # cannot be imported on a machine without CUDA

    return tuple(
        jax_triton.triton_call(
            *launch.inputs,
            kernel=launch.kernel,
            out_shape=launch.outputs,
            grid=launch.grid,
            num_warps=launch.warps,
            num_stages=launch.stages,
            compute_capability=gpu().capability,
            input_output_aliases=dict(launch.updates),
            **launch.constants,
        )
    )


@dataclasses.dataclass(frozen=True)
class Gpu:
    capability: int  # 10 * major + minor, 90 for an H200
    cores: int  # streaming multiprocessors

    @property
    def shared(self) -> int:
        """Bytes of shared memory that one block can have (CUDA C++ Programming Guide, technical specifications per compute capability)."""
        return 101_376 if self.capability >= 120 else 232_448


H200, B200, RTX_PRO_6000 = Gpu(90, 132), Gpu(100, 148), Gpu(120, 188)
_assumed: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("assumed", default=None)
_instead: contextvars.ContextVar[Launcher | None] = contextvars.ContextVar("instead", default=None)
_withheld: contextvars.ContextVar[bool] = contextvars.ContextVar("withheld", default=False)


@contextlib.contextmanager
def target_gpu(gpu: Gpu) -> Iterator[None]:
    """Launches within are made for this GPU, whatever is here: for compiling ahead.

    What `jax.jit` traced outside is not traced again: trace new functions.
    """
    token = _assumed.set(gpu)
    try:
        yield
    finally:
        _assumed.reset(token)


@contextlib.contextmanager
def disable_kernels() -> Iterator[None]:
    """What is traced within has no kernels, whatever is here: to measure what they bring."""
    token = _withheld.set(True)
    try:
        yield
    finally:
        _withheld.reset(token)


@contextlib.contextmanager
def interpret_kernels(start: Launcher) -> Iterator[None]:
    """What is traced within is made as for a GPU, and its Triton kernels are started by `start`: whole models in an interpreter."""
    token = _instead.set(start)
    try:
        yield
    finally:
        _instead.reset(token)


def gpu() -> Gpu:
    """What launches are made for: the first GPU, or an H200 where there is none (interpreters)."""
    return _assumed.get() or _first() or H200


@functools.cache
def _first() -> Gpu | None:
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return None
    major, _, minor = device.compute_capability.partition(".")
    return Gpu(int(major) * 10 + int(minor), device.core_count)


def unavailable_reason(form: str) -> str | None:
    """Why kernels of this form, "triton" or "mosaic", cannot run here, or be compiled for what is assumed; None when they can."""
    if _withheld.get():
        return "they are withheld"
    return (
        None if form == "triton" and _instead.get() else _missing(form, platform(), _assumed.get())
    )


@functools.cache
def _missing(form: str, platform: str, assumed: Gpu | None) -> str | None:
    if platform != "gpu":
        return f"they need a GPU, and JAX runs on {platform}"
    here = assumed or _first()
    if here is None:
        return "they need a GPU, and this machine only compiles for one"
    if assumed is None and "cuda" not in jax.devices("gpu")[0].client.platform_version.lower():
        return "they are written for NVIDIA GPUs"
    if here.capability < 90:
        return f"they need compute capability 9.0 or more (Hopper), and this GPU has {here.capability / 10}"
    if form == "mosaic":
        return None
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set"
    try:
        import jax_triton  # noqa: F401  it wants triton, and a CUDA plugin that fits
    except ImportError as error:
        return f"{str(error).splitlines()[0]} (pip install 'peagle-jax[kernels]')"
    return None


def platform() -> str:
    """Where this will run: on the default device, also one that is only compiled for."""
    return (
        "gpu"
        if _instead.get()
        else getattr(jax.config.jax_default_device, "platform", None) or jax.default_backend()
    )
