"""Products with matrices in tiles on a CPU, by our own machine code (tiled_products.cc).

XLA packs a matrix anew in every product, which takes longer than to multiply a few rows by it. Our
code reads one that is stored as registers want it. It is compiled for the processor at hand when it
is wanted first, by the C++ compiler that there is ($CXX, c++, g++ or clang++; 5 s), and kept:

    ~/.cache/peagle_jax/tiled_products/4be1...so        may be deleted at any time

Without a compiler XLA multiplies, as before.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
from jaxtyping import Array, Float

from peagle_jax.kernels.launch import platform
from peagle_jax.kernels.processor import instructions
from peagle_jax.user_cache import user_cache

# Columns of a tile; `kColumns` of tiled_products.cc.
COLUMNS = 32
SOURCE = Path(__file__).with_suffix(".cc")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 120
NAME = "peagle_tiled_products"  # of the function in XLA's programs


def to_tiles(w: Float[Array, "K N"]) -> Float[Array, "N/32 K/P 32 P"]:
    """The same matrix in tiles; P is 2 in bfloat16 and 1 in float32. `can_be_tiled` says which."""
    part = numbers_of_part(w)
    inputs, outputs = w.shape
    return w.reshape(inputs // part, part, outputs // COLUMNS, COLUMNS).transpose(2, 0, 3, 1)


def from_tiles(w: Float[Array, "N/32 K/P 32 P"]) -> Float[Array, "K N"]:
    """The matrix as `Linear` has it."""
    return w.transpose(1, 3, 0, 2).reshape(w.shape[1] * w.shape[3], -1)


def can_be_tiled(w: Float[Array, "K N"]) -> bool:
    """Whether there are tiles for such a matrix."""
    is_known = w.dtype in (jnp.bfloat16, jnp.float32)
    return is_known and w.shape[0] % numbers_of_part(w) == 0 and w.shape[1] % COLUMNS == 0


def numbers_of_part(w: Array) -> int:
    """Numbers of a column that lie beside each other: as many as have 32 bits."""
    return 4 // w.dtype.itemsize


def tiled_products(
    x: Float[Array, "R K"], matrices: Sequence[Float[Array, "N/32 K/P 32 P"]]
) -> list[Float[Array, "R N"]]:
    """`x @ w` of each matrix in tiles, in float32, with operands in the dtype of the matrices.

    Args:
      x: float32.
      matrices: all of one dtype.

    Raises:
      RuntimeError: there is no machine code; `is_available` tells.
    """
    if not is_available():
        raise RuntimeError("matrices in tiles need a C++ compiler")
    results = [jax.ShapeDtypeStruct((len(x), len(w) * COLUMNS), jnp.float32) for w in matrices]
    call = jax.ffi.ffi_call(NAME, results, vmap_method="sequential")
    return call(x, *matrices)


@functools.cache
def is_available() -> bool:
    """Whether programs on this CPU can have such products. Compiles what is not compiled yet."""
    if platform() != "cpu":
        return False
    library = _library()
    if library is None:
        return False
    function = jax.ffi.pycapsule(ctypes.cdll.LoadLibrary(str(library)).PeagleTiledProducts)
    jax.ffi.register_ffi_target(NAME, function, platform="cpu")
    return True


def _library() -> Path | None:
    """The machine code, compiled now or earlier; None where that cannot be."""
    compiler = _compiler()
    if compiler is None:
        return None
    source = SOURCE.read_bytes()
    about = compiler, *FLAGS, jaxlib.__version__, instructions(), os.uname().machine
    digest = hashlib.sha256(source + "\n".join(about).encode()).hexdigest()[:20]
    try:
        folder = user_cache("tiled_products")
        library = folder / f"{digest}.so"
        if library.exists():
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / library.name
            command = [compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            made.replace(library)
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return library


def _compiler() -> str | None:
    """The path of the C++ compiler to use."""
    named = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([named] if named else COMPILERS))
    return next((path for path in found if path), None)
