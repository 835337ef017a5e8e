"""Memory of decoding beside what it must hold: weights, keys and values.

    .venv/bin/python scripts/measure/decode_memory.py [--dtypes float32 bfloat16] \\
        [--batch-sizes 1 8] [--context 900] [--record results/decode_memory.jsonl]

The packaged models decode a prompt of each row with every method. `needed` is the weights of target
and head, and their caches with the slots that the batch has. `temporary` is what the compiled
program of the steps takes beside its arguments, by XLA's own account; `other` the rest of its
arguments: texts and counters of the rows. What C++ kernels keep for themselves, at most 8 MB a
thread for each of their two kinds of scratch, is in neither.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from step_time import METHODS, load, request

from peagle_jax import make_engine
from peagle_jax.decode import loop
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=900, help="prompt tokens of a row")
    parser.add_argument("-k", type=int, default=7, help="tokens drafted in a step")
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    rows = []
    total = len(args.dtypes) * len(args.batch_sizes) * len(METHODS)
    with ProgressReport("memory", total, unit="programs") as progress:
        for dtype in args.dtypes:
            for method, decoder in load(dtype, METHODS, args.k).items():
                for batch_size in args.batch_sizes:
                    sizes = measure(decoder, batch_size, args.context)
                    facts = {"method": method, "dtype": dtype, "batch_size": batch_size}
                    rows.append({"name": "decode_memory", "k": args.k, **facts, **sizes})
                    progress.update(progress.completed + 1, note=f"{method}, batch {batch_size}")
    columns = ("method", "dtype", "batch_size", "slots", "weights", "caches", "temporary", "other")
    table = Table(*columns, "over needed", title="bytes in MB")
    for row in rows:
        cells = [f"{x / 1e6:.1f}" if i > 3 else str(x) for i, x in enumerate(map(row.get, columns))]
        table.add_row(*cells, f"{row['over_needed']:.1%}")
    Console(width=110).print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/decode_memory.py")


def measure(decoder: tuple, batch_size: int, context: int) -> dict:
    """Bytes of the program that decodes `batch_size` prompts of `context` tokens."""
    target, drafter, head = decoder
    params = head.params if drafter else None
    options = {"max_batch": batch_size, "max_steps": 1, "num_threads": 1}
    engine = make_engine(target, drafter, params, **options)
    for row in range(batch_size):
        engine.add(request(target, row, context, 64))
    while not engine.stats.num_steps:
        engine.step()
    batch = engine._batch
    limits = np.int32(1), np.int32(1)
    arguments = (*batch.params, batch._options, *limits, batch.state)
    memory = loop.decode.lower(batch.spec, *arguments).compile().memory_analysis()
    caches = [batch.state.cache.groups]
    if batch.state.draft.cache is not None:
        caches.append(batch.state.draft.cache.groups)
    weights, held = num_bytes(batch.params), num_bytes(caches)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes  # not in place
    temporary = memory.temp_size_in_bytes + results
    other = memory.argument_size_in_bytes - weights - held
    return {
        "slots": batch.slots,
        "weights": weights,
        "caches": held,
        "temporary": temporary,
        "other": other,
        "over_needed": (temporary + other) / (weights + held),
    }


def num_bytes(tree) -> int:
    """Of all arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


if __name__ == "__main__":
    main()
