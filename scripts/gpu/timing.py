"""Times on a GPU without its host: many calls in one program, on operands that no cache holds, both sides in turns."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

L2 = 60e6  # bytes, more than an H200 has
ROUNDS = 5
PASSES = 50  # over all operands in one program: its launch and its waiting are then a few percent


def bytes_of(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def rotation(
    make: Callable[[jax.Array], tuple], key: jax.Array, *, least: int = 4, most: int = 32
) -> list[tuple]:
    """So many sets of operands that one pass over what any form reads of them, a third at least, leaves nothing in the cache."""
    first = make(key)
    count = min(most, max(least, int(12 * L2 / max(bytes_of(first), 1)) + 1))
    return [first, *(make(jax.random.fold_in(key, i)) for i in range(1, count))]


def repeated(form: Callable, passes: int) -> Callable:
    """A program: `form` on every set, `passes` times over; no pass can be dropped, moved out of the loop or put before another."""

    def program(sets):
        def once(sets):
            return [form(*one) for one in sets]

        def again(_, results):
            fresh, _ = jax.lax.optimization_barrier((sets, results))
            return once(fresh)

        return jax.lax.fori_loop(1, passes, again, once(sets)) if passes > 1 else once(sets)

    return jax.jit(program)


def compare(
    forms: Mapping[str, Callable],
    *settings: Sequence[tuple],
    rounds: int = ROUNDS,
    passes: int = PASSES,
) -> list[dict[str, float]]:
    """Median seconds of one call of each form, for each list of operand sets (all of the same shapes); forms run in turns.

    A form that fails has no number.
    """
    passes = passes if jax.default_backend() == "gpu" else 2
    programs = {name: repeated(form, passes) for name, form in forms.items()}
    for name, program in list(programs.items()):
        try:
            jax.block_until_ready(program(list(settings[0])))
        except Exception as error:  # one form must not take the others' numbers
            print(
                f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0][:300]}",
                file=sys.stderr,
            )
            del programs[name]
    found = []
    for sets in settings:
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(rounds):
            for name, program in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program(list(sets)))
                seconds[name].append((time.perf_counter() - start) / len(sets) / passes)
        found.append({name: statistics.median(s) for name, s in seconds.items()})
    return found


def ceilings(size: float) -> dict[str, float]:
    """Bytes a second of a copy (read and written), FLOP a second of square products in bfloat16 and float8.

    Args:
      size: 1 for a GPU; smaller for a dry run.
    """
    key = jax.random.key(0)
    words = int(512e6 * size)
    x = jax.random.normal(key, (words,), jnp.float32)
    n = max(256, int(8192 * size**0.5) // 128 * 128)
    a, b = (jax.random.normal(k, (n, n), jnp.bfloat16) for k in jax.random.split(key))
    low = [y.astype(jnp.float8_e4m3fn) for y in (a, b)]
    out = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32

    def fp8(a, b):
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out)

    measured = [
        compare({"": form}, [operands], passes=20)[0][""]
        for form, operands in (
            (lambda x: x + 1, (x,)),
            (lambda a, b: a @ b, (a, b)),
            (fp8, tuple(low)),
        )
    ]
    names = "copy_bytes_per_s", "bf16_flop_per_s", "fp8_flop_per_s"
    return {
        name: work / s
        for name, work, s in zip(names, (8 * words, 2 * n**3, 2 * n**3), measured, strict=True)
    }
