"""Acceptance length of trees of drafts against their budget, beside chains.

    .venv/bin/python scripts/measure/trees.py [--budgets 4 8 16 32 64] [--temperatures 0 1] \\
        [--record results/trees.jsonl] [--picture docs/pictures/trees.png]

The packaged P-EAGLE head drafts for excerpts of held-out Python source: chains of K tokens, and
trees of N nodes made of the same K = 7 positions. Tokens per second are of all prompts at the given
batch size on this machine, and of single runs: the time of verifying is compared, not timed.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from peagle_jax import Engine, Request, acceptance_length, load_pair, text
from peagle_jax.decode.generate import make_drafter
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import provenance

DEPTH = 7  # tokens of a path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budgets", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--chains", nargs="+", type=int, default=[1, 3, 5, 7, 11])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    parser.add_argument("--picture", type=Path, help="draw the first temperature to this PNG")
    args = parser.parse_args()
    target, head = load_pair(ASSETS / "target", ASSETS / "peagle", dtype=jnp.dtype(args.dtype))
    prompts = standard_prompts(text.load_tokenizer(ASSETS / "target"), args.num_prompts)
    cases = [(k, None) for k in args.chains] + [(DEPTH, n) for n in args.budgets]
    rows = []
    with ProgressReport("trees", len(args.temperatures) * len(cases), unit="cases") as progress:
        for temperature in args.temperatures:
            for k, num_nodes in cases:
                engine = Engine(
                    target,
                    make_drafter(head, k),
                    head.params,
                    num_tree_nodes=num_nodes,
                    max_batch=args.batch_size,
                )
                requests = [
                    Request(
                        prompt=prompt,
                        max_new_tokens=args.max_new_tokens,
                        temperature=temperature,
                        seed=seed,
                        stop_ids=(),
                    )
                    for seed, prompt in enumerate(prompts)
                ]
                start = time.perf_counter()
                answers = [answer for _, answer in engine.run(requests)]
                rows.append(
                    {
                        "name": "trees",
                        "k": k,
                        "num_tree_nodes": num_nodes,
                        "temperature": temperature,
                        "dtype": args.dtype,
                        "batch_size": args.batch_size,
                        "num_prompts": len(prompts),
                        "max_new_tokens": args.max_new_tokens,
                        "acceptance_length": acceptance_length(answers),
                        "num_steps": engine.stats.num_steps,
                        "seconds_with_compilation": time.perf_counter() - start,
                    }
                )
                progress.update(len(rows), note=f"K = {k}, {num_nodes or 'a chain'}")
    Console(width=100).print(table_of(rows))
    if args.picture:
        draw(rows, args.picture)
    if args.record:
        origin = provenance(" ".join(["python scripts/measure/trees.py", *sys.argv[1:]]))
        with args.record.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(origin | row) + "\n" for row in rows)


def chain_of_depth(rows: list[dict], temperature: float) -> dict | None:
    """The chain as long as a tree's paths."""
    chains = [r for r in rows if r["num_tree_nodes"] is None and r["k"] == DEPTH]
    return next((r for r in chains if r["temperature"] == temperature), None)


def table_of(rows: list[dict]) -> Table:
    """Acceptance lengths; gains are over the chain of K = 7."""
    table = Table("temperature", "drafts", "acceptance length", "over the chain of 7")
    for row in rows:
        chain = chain_of_depth(rows, row["temperature"])
        nodes = row["num_tree_nodes"]
        gain = ""
        if chain and nodes:
            gain = f"{row['acceptance_length'] / chain['acceptance_length'] - 1:+.1%}"
        drafts = f"tree of {nodes}" if nodes else f"chain of {row['k']}"
        table.add_row(f"{row['temperature']:g}", drafts, f"{row['acceptance_length']:.2f}", gain)
    return table


def draw(rows: list[dict], path: Path) -> None:
    """Acceptance length against drafts verified in a step, for chains and trees."""
    import matplotlib.pyplot as plt

    temperature = rows[0]["temperature"]
    here = [row for row in rows if row["temperature"] == temperature]
    figure, axis = plt.subplots(figsize=(6, 3.6), constrained_layout=True)
    for label, color, chosen in (
        ("tree, K = 7", "#0b6e4f", [r for r in here if r["num_tree_nodes"]]),
        ("chain of K", "#8d99ae", [r for r in here if not r["num_tree_nodes"]]),
    ):
        drafts = [row["num_tree_nodes"] or row["k"] for row in chosen]
        lengths = [row["acceptance_length"] for row in chosen]
        axis.plot(drafts, lengths, "o-", color=color, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("drafts verified in one step")
    axis.set_ylabel("acceptance length")
    axis.set_title(f"packaged P-EAGLE head, temperature {temperature:g}", fontsize=10)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
