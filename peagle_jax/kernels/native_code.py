"""Our own machine code for decoding on a CPU, as XLA's programs call it (native/*.h, native.cc).

It is compiled for the processor at hand when it is wanted first, by the C++ compiler that there is
($CXX, c++, g++ or clang++; some 5 s), and kept:

    ~/.cache/peagle_jax/native/4be1...so        may be deleted at any time

Without a compiler everything runs on XLA's own operations, more slowly.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform as machine
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from peagle_jax.kernels.launch import platform
from peagle_jax.kernels.processor import instructions
from peagle_jax.user_cache import user_cache

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 120
# of the library, and of what programs call
FUNCTIONS = ("peagle_tiled_products", "peagle_step_attention")


def is_available() -> bool:
    """Whether programs on this CPU can call our code. Compiles what is not compiled yet."""
    return load() is not None


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, whose functions programs can call from now on; None where there can be none."""
    library = _loaded() if platform() == "cpu" else None
    if library is None:
        return None
    for name in FUNCTIONS:
        function = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, function, platform="cpu")
    return library


def _loaded() -> ctypes.CDLL | None:
    """The library. A file that is damaged is made anew."""
    path = _library()
    for _ in range(2):
        try:
            return None if path is None else ctypes.CDLL(str(path))
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            path = _library()
    return None


def function(name: str, results: Any) -> Callable:
    """A function of ours for traced arrays.

    Args:
      name: of FUNCTIONS.
      results: shapes and dtypes of what it returns.

    Raises:
      RuntimeError: there is no machine code, and no compiler to make it.
    """
    if not is_available():
        raise RuntimeError(f"{name} needs a CPU and a C++ compiler")
    return jax.ffi.ffi_call(name, results, vmap_method="sequential")


def _library() -> Path | None:
    """The file of the machine code, compiled now or earlier; None where that cannot be."""
    compiler = find_compiler()
    if compiler is None:
        return None
    sources = b"\n".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    about = *compiler, *FLAGS, jaxlib.__version__, machine.machine(), instructions()
    digest = hashlib.sha256(sources + "\n".join(about).encode()).hexdigest()[:20]
    try:
        library = user_cache("native") / f"{digest}.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                compile_library(compiler, Path(folder) / library.name).replace(library)
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return library


def compile_library(compiler: Sequence[str], library: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """Writes the library, and returns its path.

    Args:
      compiler: its path, and what its command begins with.
      library: the file to write.
      flags: further words of the command.

    Raises:
      OSError, subprocess.SubprocessError: it cannot be compiled.
    """
    source = str(SOURCES / "native.cc")
    command = [*compiler, *flags, "-isystem", jax.ffi.include_dir(), source, "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
    return library


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
