"""Cost of one mixture-of-experts layer at its real size: every form of the same sum, beside the bytes that have to be read.

    .venv/bin/python scripts/measure/experts.py [--experts 128] [--chosen 8] [--record results/experts.jsonl]

One layer of Qwen3-Coder-30B-A3B (width 2048, experts of 768), float32, random weights and random (uncorrelated)
routing. For every number of tokens: milliseconds of each form in turns (medians), and of reading the chosen experts'
weights once at the speed of reading them all. A form that reads every expert costs E/k times that for one token.
Five GB of memory.
"""

import argparse
import json
import statistics
import sys
import time
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
from peagle_jax.provenance import provenance

DIM, WIDTH, TOKENS = 2048, 768, (1, 2, 8, 32, 128, 512)
MOST = {
    "gathered": 8,
    "grouped": 64,
    "reference": 32,
}  # tokens, for forms that are hopeless on a CPU with more


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    E, k, rng = args.experts, args.chosen, np.random.default_rng(0)
    graph, state = nnx.split(
        Experts(
            E,
            DIM,
            WIDTH,
            GLU(jax.nn.silu),
            bias=False,
            packed=False,
            dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
    )
    one = sum(x.nbytes for x in jax.tree.leaves(state)) // E
    bandwidth = reading_speed(state, args.rounds)

    def run(form):
        def go(state, x, chosen, weight):
            layer = nnx.merge(graph, state)
            return experts.FORMS[form](
                x, chosen, weight, ExpertWeights(layer.gate_up, layer.down, layer.act, E)
            )

        return jax.jit(go)

    forms = {name: run(name) for name in experts.FORMS}
    title = f"{E} experts, {k} a token, {bandwidth / 1e9:.1f} GB/s"
    table = Table(
        "tokens", "experts used", "floor, ms", *(f"{name}, ms" for name in forms), title=title
    )
    rows = []
    for n in TOKENS:
        x = jnp.asarray(rng.normal(size=(n, DIM)), jnp.float32)
        chosen = jnp.asarray(np.stack([rng.permutation(E)[:k] for _ in range(n)]))
        inputs = state, x, chosen, jnp.full((n, k), 1 / k)
        used = len(np.unique(chosen))
        tried = {name: form for name, form in forms.items() if n <= MOST.get(name, n)}
        seconds = {name: [] for name in tried}
        for round_ in range(args.rounds + 1):
            for name, form in tried.items():
                start = time.perf_counter()
                form(*inputs).block_until_ready()
                if round_:  # the first one compiles
                    seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(s) * 1e3 for name, s in seconds.items()}
        floor = used * one / bandwidth * 1e3
        table.add_row(
            str(n),
            str(used),
            f"{floor:.1f}",
            *(f"{medians[name]:.1f}" if name in medians else "" for name in forms),
        )
        rows.append({"tokens": n, "experts_used": used, "floor_ms": floor, "ms": medians})
    Console(width=120).print(table)
    if args.record:
        command = " ".join(["python scripts/measure/experts.py", *sys.argv[1:]])
        row = provenance(command) | {
            "name": "experts",
            "experts": E,
            "chosen": k,
            "dim": DIM,
            "expert_dim": WIDTH,
            "dtype": "float32",
            "bytes_an_expert": one,
            "read_bytes_per_s": bandwidth,
            "rows": rows,
        }
        with args.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def reading_speed(state, rounds: int) -> float:
    """Bytes a second of one pass over all weights: their sum."""
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
