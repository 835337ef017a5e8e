"""A kernel that does next to nothing: what remains of its time is the launch."""

import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr):
    """Adds 1 to one number."""
    tl.store(out_ptr, tl.load(x_ptr) + 1)
