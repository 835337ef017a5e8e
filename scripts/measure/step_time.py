"""Milliseconds of a decoding step against the text that is there, and the bytes that it reads.

    .venv/bin/python scripts/measure/step_time.py [--dtypes bfloat16] [--batch-sizes 1 8] \\
        [--contexts 48 256 1024 4096 16384] [--reserve 16384] [--record results/step_time.jsonl]

The packaged target decodes prompts of each length with every method, which take turns. There is one
engine, on all cores, with matrices in the layout that is the fastest. A number is the median over
rounds. `--reserve` lets answers have so many tokens, of which few are written: it must not change
the time. The floor is the time to read the weights and the keys and values of the text once, at the
speed at which this machine reads a large array.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import Model, Request, load_pair, make_engine
from peagle_jax.decode.generate import make_drafter
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.pipelines.tracing import parameter_bytes
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

STEPS = 24  # of one measurement
METHODS = ("plain", "eagle3", "peagle")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--contexts", nargs="+", type=int, default=[48], help="prompt tokens")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("-k", type=int, default=7, help="tokens drafted in a step")
    parser.add_argument("--reserve", type=int, help="limit of an answer (default: what is written)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    bandwidth = reading_speed(args.rounds)
    rows = []
    cases = [(b, c) for b in args.batch_sizes for c in args.contexts]
    with ProgressReport("step time", len(args.dtypes) * len(cases), unit="cases") as progress:
        for dtype in args.dtypes:
            decoders = load(dtype, args.methods, args.k)
            for batch_size, context in cases:
                new = measure(decoders, dtype, batch_size, context, bandwidth, args)
                rows += new
                if args.record:
                    append_rows(args.record, new, "scripts/measure/step_time.py")
                progress.update(progress.completed + 1, note=f"{dtype}, {batch_size} x {context}")
    columns = ("method", "dtype", "batch_size", "context", "reserved", "slots", "ms", "floor_ms")
    table = Table(*columns, title=f"a step; memory is read at {bandwidth / 1e9:.1f} GB/s")
    for row in rows:
        cells = (row[name] for name in columns)
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in cells))
    Console(width=110).print(table)


def load(dtype: str, methods: tuple[str, ...], k: int) -> dict[str, tuple]:
    """(target, drafter, head) of every method. The target may read any number of tokens."""
    decoders = {}
    for method in methods:
        folder = ASSETS / ("eagle3" if method == "eagle3" else "peagle")
        target, head = load_pair(ASSETS / "target", folder, dtype=jnp.dtype(dtype))
        config = dataclasses.replace(target.config, context=10**6)
        target = dataclasses.replace(target, config=config)
        drafter = None if method == "plain" else make_drafter(head, k)
        decoders[method] = target, drafter, head
    return decoders


def measure(
    decoders: dict[str, tuple],
    dtype: str,
    batch_size: int,
    context: int,
    bandwidth: float,
    args: argparse.Namespace,
) -> list[dict]:
    """A row for every method. The first round compiles, and does not count."""
    seconds: dict[str, list[float]] = {method: [] for method in decoders}
    slots = {}
    for number in range(args.rounds + 1):
        for method, (target, drafter, head) in decoders.items():
            new_tokens = STEPS * (1 + (args.k if drafter else 0)) + 1
            reserved = args.reserve or new_tokens
            options = {"max_batch": batch_size, "max_steps": STEPS, "num_threads": 1}
            engine = make_engine(target, drafter, head.params, **options)
            for row in range(batch_size):
                engine.add(request(target, row, context, max(reserved, new_tokens)))
            while not engine.stats.num_steps:
                engine.step()
            shapes = [program for program in engine.stats.programs if program[0] == "decode"]
            slots[method] = max(shape[2] for shape in shapes)
            if number:
                seconds[method].append(engine.stats.decode_seconds / engine.stats.num_steps)
    rows = []
    for method, (target, drafter, head) in decoders.items():
        models = (target, head) if drafter else (target,)
        weights = sum(parameter_bytes(model.params) for model in models)
        keys = batch_size * context * sum(map(token_bytes, models))
        rows.append(
            {
                "name": "step_time",
                "method": method,
                "k": args.k if drafter else 0,
                "dtype": dtype,
                "batch_size": batch_size,
                "context": context,
                "reserved": args.reserve,
                "slots": slots[method],
                "ms": 1e3 * statistics.median(seconds[method]),
                "seconds": seconds[method],
                "weight_bytes": weights,
                "key_value_bytes": keys,
                "floor_ms": 1e3 * (weights + keys) / bandwidth,
                "read_bytes_per_s": bandwidth,
            }
        )
    return rows


def request(target: Model, row: int, context: int, max_new_tokens: int) -> Request:
    """A request with random tokens as its prompt; each row has others."""
    prompt = np.random.default_rng(row).integers(0, target.config.vocab, context)
    return Request(prompt=prompt.tolist(), max_new_tokens=max_new_tokens, stop_ids=())


def token_bytes(model: Model) -> int:
    """Bytes of keys and values that a model's caches have of one token."""
    config = model.config
    size = jnp.dtype(config.kv_cache_dtype).itemsize
    return 2 * config.layers * config.kv_heads * config.head_dim * size


def reading_speed(rounds: int) -> float:
    """Bytes per second of summing an array of 512 MB."""
    array = jnp.ones(2**27, jnp.float32)
    total = jax.jit(jnp.sum)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        total(array).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return array.nbytes / statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
