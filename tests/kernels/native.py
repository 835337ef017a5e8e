"""C++ kernels, compiled for several sets of instructions."""

import ctypes
import functools
import platform
import tempfile
from pathlib import Path

import jax
import pytest

from peagle_jax.kernels import native_code, processor

# what this processor has; AVX-512 and AVX2, without products of bfloat16; SSE2
SETS = ["native", "x86-64-v4", "x86-64-v3", "x86-64"]
NEEDED = {"x86-64-v4": {"avx512vl", "avx512dq", "avx512bw"}, "x86-64-v3": {"avx2", "fma"}}


@functools.cache
def compiled_for(instructions: str) -> ctypes.CDLL:
    """The library for a set of instructions, whose functions have names of their own."""
    if native_code.load() is None:
        pytest.skip("there is no C++ compiler")
    if instructions == "native":
        return native_code.load()
    has = set(processor.instructions().split())
    if platform.machine() != "x86_64" or not NEEDED.get(instructions, set()) <= has:
        pytest.skip("this processor has not these instructions")
    flags = tuple(x.replace("=native", f"={instructions}") for x in native_code.FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.so"
        native_code.compile_library(file, flags)
        library = ctypes.CDLL(str(file))
    for name in native_code.FUNCTIONS:
        function = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(f"{name}_{instructions}", function, platform="cpu")
    return library


def use(instructions: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Lets programs call the library for a set of instructions; its vectors' lanes."""
    library, function = compiled_for(instructions), native_code.function
    if instructions != "native":
        monkeypatch.setattr(native_code, "load", lambda: library)
        monkeypatch.setattr(
            native_code,
            "function",
            lambda name, *rest, **options: function(f"{name}_{instructions}", *rest, **options),
        )
    return library.peagle_lanes()
