"""What the processor at hand can multiply, as Linux tells it."""

import functools
from pathlib import Path

from peagle_jax.kernels.launch import platform


def has_bfloat16_matrix_units() -> bool:
    """Whether programs run on a CPU with matrix units for bfloat16: AMX of Intel processors."""
    return platform() == "cpu" and "amx_bf16" in instructions()


def has_bfloat16_products() -> bool:
    """Whether a CPU multiplies bfloat16 faster than float32: by matrix units, or AVX-512."""
    return has_bfloat16_matrix_units() or (platform() == "cpu" and "avx512_bf16" in instructions())


@functools.cache
def instructions() -> str:
    """The sets of instructions that this machine's processors have, as Linux names them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((names for key, _, names in lines if key.strip() in ("flags", "Features")), "")
