"""Acceptance length of trees of drafts against their budget, beside chains.

    .venv/bin/python scripts/measure/trees.py [--budgets 4 8 16 32 64] [--temperatures 0 1] \\
        [--depth 7] [--chains 1 3 5 7 11] \\
        [--drafters peagle_jax/assets/peagle runs/assets/markov/head] [--names base markov] \\
        [--target peagle_jax/assets/target] [--prompts PROMPTS.jsonl] \\
        [--record results/trees.jsonl] [--picture docs/pictures/trees.png]

A P-EAGLE head, the packaged one if none is named, drafts for excerpts of held-out Python source,
or after the `prompt_token_ids` of a file's rows: chains of K tokens, and trees of N nodes made of
the same `--depth` positions. The trees of a head with a Markov head are conditioned on parents;
those of others are made of the positions' marginals. All drafters decode the same prompts, and
gains are over the first drafter's chain of that depth, with 95 % intervals: modules of the library
(or prompts, where a file does not name them) are drawn anew 2,000 times, the same for both. Seconds
are of single runs and include compilation: what a step verifies is compared, and no speed.

Above temperature 0 nodes are drawn, as drafts of a chain are. `--greedy-drafts` measures trees of
the likeliest paths, and chains of argmaxes.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import Request, acceptance_length, load_pair, make_engine, text
from peagle_jax.checkpoints.pair import load_drafter_for
from peagle_jax.decode.generate import make_drafter
from peagle_jax.json_files import read_jsonl
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

DRAWS = 2000  # of modules, for an interval
COLORS = ("#0b6e4f", "#8d99ae", "#c1440e", "#e0a458", "#3d5a80", "#98c1d9")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budgets", nargs="*", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--chains", nargs="*", type=int, default=[1, 3, 5, 7, 11])
    parser.add_argument("--depth", type=int, default=7, help="tokens of a path of a tree (7)")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--drafters", nargs="+", type=Path, default=[ASSETS / "peagle"])
    parser.add_argument("--names", nargs="+", help="of the drafters in rows (their folders')")
    parser.add_argument("--target", type=Path, default=ASSETS / "target")
    parser.add_argument("--prompts", type=Path, help="rows with prompt_token_ids (source code)")
    parser.add_argument("--greedy-drafts", action="store_true", help="draw no drafts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    parser.add_argument("--picture", type=Path, help="draw the first temperature to this PNG")
    args = parser.parse_args()
    names = args.names or [short_name(path) for path in args.drafters]
    if len(names) != len(args.drafters) or len(set(names)) < len(names):
        parser.error(f"--names: every drafter needs a name of its own; got {', '.join(names)}")
    target, head = load_pair(args.target, args.drafters[0], dtype=jnp.dtype(args.dtype))
    others = [load_drafter_for(target, path) for path in args.drafters[1:]]
    heads = dict(zip(names, [head, *others], strict=True))
    prompts, modules = read_prompts(args.prompts, args.target, args.num_prompts)
    cases = [(k, None) for k in args.chains] + [(args.depth, n) for n in args.budgets]
    rows = []
    steps: dict[int, np.ndarray] = {}  # by row: accepted drafts and steps of each prompt
    total = len(args.temperatures) * len(heads) * len(cases)
    with ProgressReport("trees", total, unit="cases") as progress:
        for temperature, (name, head) in itertools.product(args.temperatures, heads.items()):
            for k, num_nodes in cases:
                engine = make_engine(
                    target,
                    make_drafter(head, k),
                    head.params,
                    num_tree_nodes=num_nodes,
                    max_batch=args.batch_size,
                    sample_drafts=not args.greedy_drafts,
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
                by_place = dict(engine.run(requests))
                answers = [by_place[place] for place in range(len(requests))]
                steps[len(rows)] = np.array(
                    [(a.num_accepted_tokens, a.num_drafts) for a in answers]
                )
                rows.append(
                    {
                        "name": "trees",
                        "drafter": name,
                        "markov_rank": head.config.markov_rank,
                        "k": k,
                        "num_tree_nodes": num_nodes,
                        "temperature": temperature,
                        "drawn": temperature > 0 and not args.greedy_drafts,
                        "dtype": args.dtype,
                        "batch_size": args.batch_size,
                        "num_prompts": len(prompts),
                        "max_new_tokens": args.max_new_tokens,
                        "acceptance_length": acceptance_length(answers),
                        "num_steps": engine.stats.num_steps,
                        "seconds_with_compilation": time.perf_counter() - start,
                    }
                )
                progress.update(len(rows), note=f"{name}, K = {k}, {num_nodes or 'a chain'}")
    for place, row in enumerate(rows):
        chain = chain_of_depth(rows, args.depth, row["temperature"])
        if chain is not None and row is not chain:
            pair = steps[place], steps[rows.index(chain)]
            row["gain_low"], row["gain_high"] = interval_of_gain(*pair, modules)
    Console(width=100).print(table_of(rows, args.depth))
    if args.picture:
        draw(rows, args.depth, args.picture)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/trees.py")


def read_prompts(
    path: Path | None, target: Path, count: int
) -> tuple[list[list[int]], list[str | int]]:
    """So many prompts, spread over the rows of a file; without one, of held-out source.

    Returns:
      The prompts, and what of them belongs together: their modules, or numbers.
    """
    if path is None:
        prompts = standard_prompts(text.load_tokenizer(target), count)
        return prompts, list(range(len(prompts)))
    rows = [row for _, row in read_jsonl(path)]
    count = min(count, len(rows))
    rows = [rows[i * len(rows) // count] for i in range(count)]
    modules = [row.get("module", number) for number, row in enumerate(rows)]
    return [row["prompt_token_ids"] for row in rows], modules


def interval_of_gain(
    own: np.ndarray, base: np.ndarray, modules: Sequence[str | int]
) -> tuple[float, float]:
    """Between what 95 % of draws lie: acceptance length over that of `base`, minus 1.

    Args:
      own, base: accepted drafts and steps of each prompt.
      modules: of the prompts; all prompts of one are drawn together.
    """
    _, of_prompt = np.unique(np.array(modules, dtype=str), return_inverse=True)
    num_modules = int(of_prompt.max()) + 1
    sums = np.zeros((2, num_modules, 2))
    for side, counts in enumerate((own, base)):
        np.add.at(sums[side], of_prompt, counts)
    drawn = np.random.default_rng(0).integers(0, num_modules, (DRAWS, num_modules))
    totals = sums[:, drawn].sum(axis=2)
    lengths = 1 + totals[..., 0] / totals[..., 1]
    low, high = np.quantile(lengths[0] / lengths[1] - 1, [0.025, 0.975])
    return float(low), float(high)


def short_name(path: Path) -> str:
    """What a drafter is called in rows: the last folder that says something."""
    return path.parent.name if path.name == "head" else path.name


def chain_of_depth(rows: list[dict], depth: int, temperature: float) -> dict | None:
    """The first drafter's chain as long as a tree's paths."""
    chains = [r for r in rows if r["num_tree_nodes"] is None and r["k"] == depth]
    return next((r for r in chains if r["temperature"] == temperature), None)


def table_of(rows: list[dict], depth: int) -> Table:
    """Acceptance lengths; gains are over the first drafter's chain of `depth`."""
    columns = ("temperature", "drafter", "drafts", "acceptance length")
    table = Table(*columns, f"over the chain of {depth}")
    for row in rows:
        chain = chain_of_depth(rows, depth, row["temperature"])
        nodes = row["num_tree_nodes"]
        gain = ""
        if chain and row is not chain:
            gain = f"{row['acceptance_length'] / chain['acceptance_length'] - 1:+.1%}"
            gain += f" ({row['gain_low']:+.1%} to {row['gain_high']:+.1%})"
        drafts = f"tree of {nodes}" if nodes else f"chain of {row['k']}"
        length = f"{row['acceptance_length']:.2f}"
        table.add_row(f"{row['temperature']:g}", row["drafter"], drafts, length, gain)
    return table


def draw(rows: list[dict], depth: int, path: Path) -> None:
    """Acceptance length against drafts verified in a step, for chains and trees."""
    import matplotlib.pyplot as plt

    temperature = rows[0]["temperature"]
    here = [row for row in rows if row["temperature"] == temperature]
    figure, axis = plt.subplots(figsize=(6, 3.6), constrained_layout=True)
    names = list(dict.fromkeys(row["drafter"] for row in here))
    kinds = itertools.product(names, (True, False))
    for (name, is_tree), color in zip(kinds, itertools.cycle(COLORS), strict=False):
        chosen = [r for r in here if r["drafter"] == name and bool(r["num_tree_nodes"]) == is_tree]
        label = f"{name}: {f'tree, K = {depth}' if is_tree else 'chain of K'}"
        drafts = [row["num_tree_nodes"] or row["k"] for row in chosen]
        lengths = [row["acceptance_length"] for row in chosen]
        axis.plot(drafts, lengths, "o-", color=color, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("drafts verified in one step")
    axis.set_ylabel("acceptance length")
    axis.set_title(f"P-EAGLE, temperature {temperature:g}", fontsize=10)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
