"""What checks of kernels share: operands, memory full of NaN, relative errors, rows of results."""

import os
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.kernels.launch import unavailable_reason

# kernels, interpreted ones too, multiply 16 bits
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPE = jnp.bfloat16 if IS_INTERPRETED or jax.default_backend() == "gpu" else jnp.float32
LIMIT = 0.01  # relative error; with bfloat16 operands it lies between 0.001 and 0.01


def poison(gigabytes: float) -> None:
    """Fills free memory with NaN, in pieces of every size.

    So what a kernel does not write shows in its result.
    """
    large = [int(gigabytes * 2**30 / 2**i) for i in range(1, 8)]
    small = [2**i for i in range(8, 26)] * 8
    jax.block_until_ready([jnp.full(size // 4, jnp.nan, jnp.float32) for size in (*large, *small)])


def error(got, want) -> float:
    """The relative error of the whole array, by its norm."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def random(rng: np.random.Generator, *shape: int, dtype=None, scale: float = 1.0) -> jax.Array:
    """Normal numbers; in DTYPE where no other is asked for."""
    return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, dtype or DTYPE)


def forms(*names: str) -> list[str]:
    """Those of the forms that run here, after the reference."""
    return ["reference", *(name for name in names if unavailable_reason(name) is None)]


def operands(form: str, *arrays):
    """Arrays for a form: CPUs lack some products in bfloat16, and references get float32 there.

    The numbers are the same.
    """
    if form != "reference" or jax.default_backend() != "cpu":
        return arrays
    return tuple(None if x is None else x.astype(jnp.float32) for x in arrays)


def run(call: Callable, *args):
    """The result of `call`, compiled; NaN in its place where it fails."""
    try:
        program = jax.jit(call).lower(*args).compile()
        poison(0.01 if jax.default_backend() == "cpu" else 8)
        return jax.block_until_ready(program(*args))
    except Exception as problem:
        print(f"failed: {type(problem).__name__}: {str(problem)[:500]}", file=sys.stderr)

        def no_result(x):
            return np.full(x.shape, np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0)

        return jax.tree.map(no_result, jax.eval_shape(call, *args))


def row(kernel: str, form: str, shape: str, *errors: float) -> dict:
    """A row of results, of the largest of the errors."""
    return {
        "part": "numerics",
        "kernel": kernel,
        "form": form,
        "shape": shape,
        "error": float(np.max(errors)),
        "right": all(e < LIMIT for e in errors),  # and so not NaN
    }
