"""What the processor at hand can multiply, as Linux tells it."""

import functools
from pathlib import Path

from peagle_jax.kernels.launch import platform


def has_bfloat16_matrix_units() -> bool:
    """Whether programs run on a CPU with matrix units for bfloat16: AMX of Intel processors."""
    return platform() == "cpu" and "amx_bf16" in _processor()


def has_bfloat16_products() -> bool:
    """Whether a CPU multiplies bfloat16 faster than float32: by matrix units, or AVX-512."""
    return has_bfloat16_matrix_units() or (platform() == "cpu" and "avx512_bf16" in _processor())


@functools.cache
def _processor() -> str:
    """What Linux says of this machine's processors."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
