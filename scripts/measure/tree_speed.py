"""Tokens per second of trees of drafts beside chains and plain decoding, in turns.

    .venv/bin/python scripts/measure/tree_speed.py [--nodes 8 12 16 32] [--batch-sizes 1 8]
        [--dtypes bfloat16] [--rounds 5] [--record results/tree_speed.jsonl]

The packaged P-EAGLE head drafts K = 7 positions for excerpts of held-out Python source, which are
continued greedily: a chain of them is verified, or a tree of N nodes made of them. In every round
each decodes all prompts once, and speeds are compared within rounds. The first round compiles and
is not counted.
"""

import argparse
import statistics
import time
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from peagle_jax import Model, Request, acceptance_length, load_pair, make_engine, text
from peagle_jax.decode.generate import make_drafter
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

DEPTH = 7  # K, and tokens of a path
PLAIN, CHAIN = -1, 0  # in the place of a number of nodes


def decode(
    target: Model, head: Model, nodes: int, batch_size: int, prompts: list, max_new_tokens: int
) -> tuple[float, float | None]:
    """Seconds a token, and the acceptance length."""
    drafter = None if nodes == PLAIN else make_drafter(head, DEPTH)
    tree = nodes if nodes > 0 else None
    engine = make_engine(target, drafter, head.params, num_tree_nodes=tree, max_batch=batch_size)
    requests = [
        Request(prompt=prompt, max_new_tokens=max_new_tokens, stop_ids=()) for prompt in prompts
    ]
    began = time.perf_counter()
    answers = [answer for _, answer in engine.run(requests)]
    seconds = time.perf_counter() - began
    return seconds / sum(answer.num_tokens for answer in answers), acceptance_length(answers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 12, 16, 32])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    prompts = standard_prompts(text.load_tokenizer(ASSETS / "target"), args.num_prompts)
    kinds = [PLAIN, CHAIN, *args.nodes]
    rows = []
    total = len(args.dtypes) * len(args.batch_sizes) * len(kinds) * (1 + args.rounds)
    with ProgressReport("trees", total, unit="runs") as progress:
        for dtype in args.dtypes:
            models = load_pair(ASSETS / "target", ASSETS / "peagle", dtype=jnp.dtype(dtype))
            for batch_size in args.batch_sizes:
                seconds: dict[int, list[float]] = {nodes: [] for nodes in kinds}
                lengths: dict[int, float | None] = {}
                for number in range(1 + args.rounds):
                    for nodes in kinds:
                        case = *models, nodes, batch_size, prompts, args.max_new_tokens
                        per_token, lengths[nodes] = decode(*case)
                        if number:
                            seconds[nodes].append(per_token)
                        progress.update(progress.completed + 1)
                for nodes in kinds:
                    pairs = zip(seconds[PLAIN], seconds[nodes], strict=True)
                    of_chain = zip(seconds[CHAIN], seconds[nodes], strict=True)
                    rows.append(
                        {
                            "name": "tree_speed",
                            "dtype": dtype,
                            "batch_size": batch_size,
                            "k": 0 if nodes == PLAIN else DEPTH,
                            "num_tree_nodes": nodes if nodes > 0 else None,
                            "tokens_per_second": 1 / statistics.median(seconds[nodes]),
                            "over_plain": statistics.median(a / b for a, b in pairs),
                            "over_chain": statistics.median(a / b for a, b in of_chain),
                            "acceptance_length": lengths[nodes],
                        }
                    )
    table = Table("dtype", "batch", "K", "nodes", "tokens/s", "over plain", "over chain", "length")
    for row in rows:
        table.add_row(
            row["dtype"],
            str(row["batch_size"]),
            str(row["k"]),
            str(row["num_tree_nodes"] or ""),
            f"{row['tokens_per_second']:.0f}",
            f"{row['over_plain']:.2f}",
            f"{row['over_chain']:.2f}",
            "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
        )
    Console(width=100).print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/tree_speed.py")


if __name__ == "__main__":
    main()
