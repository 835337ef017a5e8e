"""Arrays in the shape in which XLA sums them fast on a CPU.

For [1, 796, 384] in float32 it needs 1.0 ms for the sum of each row along the last axis, and 1.6 ms
for those of the columns where the first axis stays; for [796, 384] a quarter and an eighth of that
(jax 0.10.2, Intel Xeon, two cores; LOG.md, 2026-11-26). Few tokens are left alone: for the sums of
a matrix it calls a library, which costs a decoding step more than it saves.
"""

import math

from jaxtyping import Array, Float

from peagle_jax.kernels.choose import multi_device_reason
from peagle_jax.kernels.launch import platform

MIN_TOKENS = 256


def with_one_axis_of_rows(x: Float[Array, "*rows D"]) -> Float[Array, "*merged D"]:
    """`x` [sequences, tokens, ..] as [rows, D] where a CPU then sums faster, otherwise as it is.

    On a mesh of devices all axes stay: one that is divided among them cannot be merged with others
    for free.
    """
    is_faster = platform() == "cpu" and math.prod(x.shape[:2]) >= MIN_TOKENS
    return x.reshape(-1, x.shape[-1]) if is_faster and multi_device_reason() is None else x
