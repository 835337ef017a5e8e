"""Programs whose loops are in CUDA graphs, too.

A program that XLA compiles for a GPU launches its kernels one after another, unless a CUDA graph
holds them. By default that is what stands outside of loops, and the body of each loop: a graph a
round, and the host waits for every loop's condition. With the options below one graph holds the
loop itself, and the GPU decides when it ends.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

ENABLED = "xla_gpu_enable_command_buffer"
# XLA's default kinds and WHILE. A list replaces the default: XLA_FLAGS knows "+WHILE", and options
# do not. A program that is a copy and a loop is smaller than the least graph by default, 5.
OPTIONS = {
    ENABLED: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}


def jit_with_loops(function: Callable, **jit_options: Any) -> Any:
    """As `jax.jit(function, **jit_options)`, `lower` included, and on NVIDIA GPUs with OPTIONS.

    An environment variable XLA_FLAGS that says what graphs hold is left to say so.
    """
    by_option = {
        False: jax.jit(function, **jit_options),
        True: jax.jit(function, **jit_options, compiler_options=OPTIONS),
    }

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return by_option[holds_loops()](*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        return by_option[holds_loops()].lower(*args, **kwargs)

    run.lower = lower  # pyright: ignore[reportAttributeAccessIssue]
    return run


def holds_loops() -> bool:
    """Whether programs that are compiled now get OPTIONS."""
    return _is_nvidia() and ENABLED not in os.environ.get("XLA_FLAGS", "")


@functools.cache
def _is_nvidia() -> bool:
    if jax.default_backend() != "gpu":
        return False
    return "cuda" in jax.devices()[0].client.platform_version.lower()
