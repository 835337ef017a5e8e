"""Arrays in the shape in which XLA sums them fast on a CPU.

For [1, 796, 384] in float32 it needs 1.0 ms for the sum of each row along the last axis, and 1.6 ms
for those of the columns where the first axis stays; for [796, 384] a quarter and an eighth of that
(jax 0.10.2, Intel Xeon, two cores; LOG.md, 2026-11-26). Few rows are left alone: it calls a library
for the sums of a matrix, which costs a decoding step more than it saves.
"""

from jaxtyping import Array, Float

from peagle_jax.kernels.launch import platform

MIN_ROWS = 256


def with_one_axis_of_rows(x: Float[Array, "*rows D"]) -> Float[Array, "*merged D"]:
    """`x` as [rows, D] where a CPU then sums faster, and otherwise as it is.

    Other devices keep all axes: one that is divided among them cannot be merged with others for
    free.
    """
    is_faster = platform() == "cpu" and x.size >= MIN_ROWS * x.shape[-1]
    return x.reshape(-1, x.shape[-1]) if is_faster else x
