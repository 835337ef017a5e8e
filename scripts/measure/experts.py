"""Cost of one mixture-of-experts layer at its real size, by every form of the same sum.

    .venv/bin/python scripts/measure/experts.py [--experts 128] \\
        [--experts-per-token 8] [--record results/experts.jsonl]

One layer of Qwen3-Coder-30B-A3B (width 2048, experts of 768), float32, random weights and random
(uncorrelated) routing. For every number of tokens: milliseconds of each form in turns (medians),
and of reading the chosen experts' weights once at the speed of reading them all. A form that reads
every expert costs E/k times that for one token. It takes five GB of memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from peagle_jax.kernels import experts
from peagle_jax.layers import Experts
from peagle_jax.layers.moe import GLU, ExpertWeights
from peagle_jax.provenance import append_rows

DIM, WIDTH, TOKENS = 2048, 768, (1, 2, 8, 32, 128, 512)
# tokens up to which forms are measured that are hopeless on a CPU with more
MAX_TOKENS = {"gathered": 8, "grouped": 64, "reference": 32}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=128)
    # `--chosen` is the former spelling
    parser.add_argument("--experts-per-token", "--chosen", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    count, k, rng = args.experts, args.experts_per_token, np.random.default_rng(0)
    options = dict(bias=False, packed=False, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, state = nnx.split(Experts(count, DIM, WIDTH, GLU(jax.nn.silu), **options))
    expert_bytes = sum(x.nbytes for x in jax.tree.leaves(state)) // count
    bandwidth = reading_speed(state, args.rounds)

    def mixture_by(form):
        def run(state, x, topk_ids, routing_weights):
            layer = nnx.merge(graph, state)
            weights = ExpertWeights(layer.gate_up, layer.down, layer.act, count)
            return experts.FORMS[form](x, topk_ids, routing_weights, weights)

        return jax.jit(run)

    # the kernels for GPUs are measured by scripts/gpu_suite.py
    forms = {name: mixture_by(name) for name in experts.FORMS if name != "triton"}
    headers = "tokens", "experts used", "floor, ms", *(f"{name}, ms" for name in forms)
    table = Table(*headers, title=f"{count} experts, {k} a token, {bandwidth / 1e9:.1f} GB/s")
    rows = []
    for n in TOKENS:
        x = jnp.asarray(rng.normal(size=(n, DIM)), jnp.float32)
        topk_ids = jnp.asarray(np.stack([rng.permutation(count)[:k] for _ in range(n)]))
        inputs = state, x, topk_ids, jnp.full((n, k), 1 / k)
        num_used = len(np.unique(topk_ids))
        measured = {name: form for name, form in forms.items() if n <= MAX_TOKENS.get(name, n)}
        medians = median_milliseconds(measured, inputs, args.rounds)
        floor = num_used * expert_bytes / bandwidth * 1e3
        cells = [f"{medians[name]:.1f}" if name in medians else "" for name in forms]
        table.add_row(str(n), str(num_used), f"{floor:.1f}", *cells)
        rows.append({"tokens": n, "experts_used": num_used, "floor_ms": floor, "ms": medians})
    Console(width=120).print(table)
    if args.record:
        row = {
            "name": "experts",
            "experts": count,
            "experts_per_token": k,
            "dim": DIM,
            "expert_dim": WIDTH,
            "dtype": "float32",
            "bytes_an_expert": expert_bytes,
            "read_bytes_per_s": bandwidth,
            "rows": rows,
        }
        append_rows(args.record, [row], "scripts/measure/experts.py")


def median_milliseconds(forms: dict[str, Callable], inputs: tuple, rounds: int) -> dict[str, float]:
    """Of one call of each form; the forms run in turns."""
    seconds = {name: [] for name in forms}
    for i in range(rounds + 1):
        for name, form in forms.items():
            start = time.perf_counter()
            form(*inputs).block_until_ready()
            if i > 0:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in seconds.items()}


def reading_speed(state, rounds: int) -> float:
    """Bytes a second of summing the largest array."""
    largest = max(jax.tree.leaves(state), key=lambda x: x.nbytes)
    product = jax.jit(jnp.sum)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        product(largest).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return largest.nbytes / statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
