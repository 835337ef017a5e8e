"""C++ kernels for a CPU, which XLA's programs call (native/).

They are compiled for the processor at hand when a program first wants them, by the C++ compiler
that there is ($CXX, c++, g++ or clang++; some 9 s), and kept:

    ~/.cache/peagle_jax/native/4be1...so        may be deleted at any time

Without a compiler everything runs on XLA's own operations, more slowly.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform as machine
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from peagle_jax.kernels.choose import multi_device_reason
from peagle_jax.kernels.launch import platform
from peagle_jax.kernels.processor import instructions
from peagle_jax.user_cache import user_cache

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 120
LOG = logging.getLogger(__name__)
# of the library, and of what programs call
FUNCTIONS = ("peagle_tiled_products", "peagle_gated_products", "peagle_tiled_product_of")
FUNCTIONS += ("peagle_embedding_rows", "peagle_rotate_heads")
FUNCTIONS += ("peagle_step_attention", "peagle_write_and_attend")
FUNCTIONS += ("peagle_packed_attention", "peagle_packed_attention_gradient")
_lock = threading.Lock()


def is_available() -> bool:
    """Whether programs on this CPU can call our code. Compiles what is not compiled yet."""
    return load() is not None


def is_callable_here() -> bool:
    """Whether the program that is traced now can call our code: on one CPU."""
    return multi_device_reason() is None and is_available()


def fills_vectors(size: int) -> bool:
    """Whether there is code of ours, and so many numbers fill whole vectors of it."""
    library = load()
    return library is not None and size % library.peagle_lanes() == 0


def load() -> ctypes.CDLL | None:
    """The library, whose functions programs can call from now on; None where there can be none."""
    if platform() != "cpu":
        return None
    with _lock:  # engines in several threads may want it first
        return _registered()


def function(name: str, results: Any, **options: Any) -> Callable[..., Any]:
    """A function of ours for traced arrays. It has no gradient, and jax.export refuses it.

    Args:
      name: of FUNCTIONS.
      results: shapes and dtypes of what it returns.
      options: of `jax.ffi.ffi_call`.

    Raises:
      RuntimeError: there is no machine code, and no compiler to make it.
    """
    if not is_available():
        raise RuntimeError(f"{name} needs a CPU and a C++ compiler")
    return jax.ffi.ffi_call(name, results, vmap_method="sequential", **options)


@functools.cache
def _registered() -> ctypes.CDLL | None:
    library = _library()
    if library is not None:
        for name in FUNCTIONS:
            function = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, function, platform="cpu")
    return library


def _library() -> ctypes.CDLL | None:
    """The machine code, of an earlier process or compiled now; None where that cannot be."""
    try:
        path = _path()
        if path is None:
            LOG.warning("no C++ compiler: programs on this CPU are slower; install g++, or set CXX")
            return None
        with contextlib.suppress(OSError):  # there is none, or it is damaged
            return ctypes.CDLL(str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            compile_library(made)
            made.replace(path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        line = next((x for x in error.stderr.splitlines() if "error" in x), error)
        LOG.warning("no C++ kernels: programs on this CPU are slower: %s", line)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        LOG.warning("no C++ kernels: programs on this CPU are slower: %s", error)
    return None


def _path() -> Path | None:
    """The file of the machine code; None where no compiler can write it."""
    compiler = find_compiler()
    if compiler is None:
        return None
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.*")))
    about = *compiler, *FLAGS, version("jaxlib"), machine.machine(), instructions()
    digest = hashlib.sha256(sources + "\n".join(about).encode()).hexdigest()[:20]
    return user_cache("native") / f"{digest}.so"


def compile_library(library: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Writes the library with the compiler that there is.

    Args:
      library: the file to write.
      flags: further words of the compiler's command.

    Raises:
      OSError, subprocess.SubprocessError: it cannot be compiled.
    """
    command = [*(find_compiler() or COMPILERS[:1]), *flags, "-isystem", jax.ffi.include_dir()]
    command += [str(SOURCES / "native.cc"), "-o", str(library)]
    options: Any = {"check": True, "capture_output": True, "text": True}
    subprocess.run(command, timeout=COMPILE_SECONDS, **options)


def find_compiler() -> list[str] | None:
    """The C++ compiler to use: its path, and what its command begins with."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation mark too many
        return None
    for command in [named] if named else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    return None
