"""Times on a GPU without its host: many calls in one program, and all forms in turns.

Operands change from call to call, so that no cache holds them.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

L2 = 60e6  # bytes, more than an H200 has
ROUNDS = 5
# over all operands in one program: its launch and its waiting are then a few percent
PASSES = 50
# without a GPU times mean nothing, and kernels that are interpreted take seconds
IS_DRY_RUN = jax.default_backend() != "gpu"


def bytes_of(tree) -> int:
    """Bytes of all arrays of a tree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def rotation(
    make: Callable[[jax.Array], tuple], key: jax.Array, *, least: int = 4, most: int = 32
) -> list[tuple]:
    """So many sets of operands that one pass over them leaves nothing in the cache.

    A form reads a third of a set at least.
    """
    first = make(key)
    count = min(most, max(least, int(12 * L2 / max(bytes_of(first), 1)) + 1))
    if IS_DRY_RUN:
        count = 1
    return [first, *(make(jax.random.fold_in(key, i)) for i in range(1, count))]


def repeated(form: Callable, passes: int) -> Callable:
    """A program that runs `form` on every set, `passes` times over.

    No pass can be dropped, moved out of the loop or put before another.
    """

    def program(sets):
        def one_pass(sets):
            return [form(*operands) for operands in sets]

        def next_pass(_, results):
            fresh_sets, _ = jax.lax.optimization_barrier((sets, results))
            return one_pass(fresh_sets)

        results = one_pass(sets)
        return jax.lax.fori_loop(1, passes, next_pass, results) if passes > 1 else results

    return jax.jit(program)


def compare(
    forms: Mapping[str, Callable],
    *settings: Sequence[tuple],
    rounds: int = ROUNDS,
    passes: int = PASSES,
) -> list[dict[str, float]]:
    """Median seconds of one call of each form, for each list of operand sets.

    All sets have the same shapes. Forms run in turns. A form that fails has no number.
    """
    if IS_DRY_RUN:
        rounds, passes = 1, 2
    programs = {name: repeated(form, passes) for name, form in forms.items()}
    for name, program in list(programs.items()):
        try:
            jax.block_until_ready(program(list(settings[0])))
        except Exception as error:  # the others' numbers are still wanted
            reason = str(error).splitlines()[0][:300]
            print(f"{name} failed: {type(error).__name__}: {reason}", file=sys.stderr)
            del programs[name]
    medians = []
    for sets in settings:
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(rounds):
            for name, program in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program(list(sets)))
                seconds[name].append((time.perf_counter() - start) / len(sets) / passes)
        medians.append({name: statistics.median(s) for name, s in seconds.items()})
    return medians


def ceilings(size: float) -> dict[str, float]:
    """Bytes a second of a copy, FLOP a second of square products in bfloat16 and float8.

    A copy's bytes are counted as read and written.

    Args:
      size: 1 for a GPU; smaller for a dry run.
    """
    key = jax.random.key(0)
    numbers = int(512e6 * size)
    x = jax.random.normal(key, (numbers,), jnp.float32)
    n = max(256, int(8192 * size**0.5) // 128 * 128)
    a, b = (jax.random.normal(k, (n, n), jnp.bfloat16) for k in jax.random.split(key))
    a8, b8 = a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)
    out = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32

    def copy(x):
        return x + 1

    def bf16_product(a, b):
        return a @ b

    def fp8_product(a, b):
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out)

    def seconds(form, *operands):
        return compare({"": form}, [operands], passes=20)[0][""]

    return {
        "copy_bytes_per_s": 8 * numbers / seconds(copy, x),
        "bf16_flop_per_s": 2 * n**3 / seconds(bf16_product, a, b),
        "fp8_flop_per_s": 2 * n**3 / seconds(fp8_product, a8, b8),
    }
