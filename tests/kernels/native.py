"""Our machine code for a CPU, compiled for several sets of instructions."""

import ctypes
import functools
import platform
import tempfile
from pathlib import Path

import jax
import pytest

from peagle_jax.kernels import native_code

# what this processor has; AVX2 and 16-bit numbers by shifts; SSE2
SETS = ["native", "x86-64-v3", "x86-64"]


@functools.cache
def compiled_for(instructions: str) -> ctypes.CDLL:
    """The library for a set of instructions, whose functions have names of their own."""
    if native_code.load() is None:
        pytest.skip("there is no C++ compiler")
    if instructions == "native":
        return native_code.load()
    if platform.machine() != "x86_64":
        pytest.skip("these instructions are another processor's")
    flags = tuple(x.replace("=native", f"={instructions}") for x in native_code.FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        file = native_code.compile_library(
            native_code.find_compiler(), Path(folder) / "x.so", flags
        )
        library = ctypes.CDLL(str(file))
    for name in native_code.FUNCTIONS:
        function = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(f"{name}_{instructions}", function, platform="cpu")
    return library


def use(instructions: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Lets programs call the library for a set of instructions; returns its numbers of a vector."""
    library, function = compiled_for(instructions), native_code.function
    if instructions != "native":
        monkeypatch.setattr(native_code, "load", lambda: library)
        monkeypatch.setattr(
            native_code, "function", lambda name, *rest: function(f"{name}_{instructions}", *rest)
        )
    return library.peagle_lanes()
