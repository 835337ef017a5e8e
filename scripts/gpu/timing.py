"""Times on a GPU without its host: many calls in one program, on operands that no cache holds, both sides in turns."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

L2 = 60e6  # bytes, more than an H200 has
ROUNDS = 7


def bytes_of(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def rotation(make: Callable[[jax.Array], tuple], key: jax.Array, *, least: int = 4, most: int = 24) -> list[tuple]:
    """So many sets of operands that one pass over them all leaves nothing in the cache for the next."""
    first = make(key)
    count = min(most, max(least, int(4 * L2 / max(bytes_of(first), 1)) + 1))
    return [first, *(make(jax.random.fold_in(key, i)) for i in range(1, count))]


def compare(forms: Mapping[str, Callable], sets: Sequence[tuple], rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of one call of each form: every form is one program that calls it once a set of operands; they run in turns.

    A form that fails (for want of memory, mostly) has no number.
    """
    programs = {name: jax.jit(lambda sets, form=form: [form(*one) for one in sets]) for name, form in forms.items()}
    for name, program in list(programs.items()):
        try:
            jax.block_until_ready(program(list(sets)))
        except jax.errors.JaxRuntimeError as error:
            print(f"{name} failed: {str(error).splitlines()[0][:300]}", file=sys.stderr)
            del programs[name]
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(list(sets)))
            seconds[name].append((time.perf_counter() - start) / len(sets))
    return {name: statistics.median(s) for name, s in seconds.items()}


def once(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median seconds of a call that is long enough by itself."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def ceilings(size: float) -> dict[str, float]:
    """Bytes a second of a copy (read and written), FLOP a second of square products in bfloat16 and float8.

    Args:
      size: 1 for a GPU; smaller for a dry run.
    """
    key = jax.random.key(0)
    words = int(512e6 * size)
    x = jax.random.normal(key, (words,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    n = max(256, int(8192 * size**0.5) // 128 * 128)
    a, b = (jax.random.normal(k, (n, n), jnp.bfloat16) for k in jax.random.split(key))
    product = jax.jit(lambda a, b: jnp.matmul(a, b))
    fp8 = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(jnp.bfloat16))
    low = [y.astype(jnp.float8_e4m3fn) for y in (a, b)]
    return {
        "copy_bytes_per_s": 8 * words / once(lambda: copy(x)),
        "bf16_flop_per_s": 2 * n**3 / once(lambda: product(a, b)),
        "fp8_flop_per_s": 2 * n**3 / once(lambda: fp8(*low)),
    }
