"""Acceptance length against the length of the prompt, and along the answer.

    .venv/bin/python scripts/measure/acceptance_by_length.py [--prompt-tokens 64 256 1024 3072] \\
        [--temperatures 0 0.7] [--drafters peagle_jax/assets/peagle peagle_jax/assets/eagle3] \\
        [-k 7] [--record results/acceptance_by_length.jsonl] \\
        [--picture docs/pictures/acceptance_by_length.png]

Every prompt ends at the same place of a held-out file, whatever its length: the same text is
continued, with more or less of what stands before it. Files that are shorter than the longest
prompt are left out. The acceptance length is pooled over answers, and as the mean over them;
intervals resample files. Along the answer it is that of each quarter: every step writes one token
that is no draft, so that a quarter's tokens over those that are no drafts are its length.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import Generation, Request, acceptance_length, corpus, load_pair, make_engine, text
from peagle_jax.bench.answer_statistics import mean_acceptance_length, repeated_share
from peagle_jax.checkpoints.pair import load_drafter_for
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.requests import check_answered
from peagle_jax.pipelines.budgets import HELD_OUT
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

QUARTERS = 4
RESAMPLES = 2000
COLORS = ("#0b6e4f", "#c1440e", "#3d5a80", "#e0a458")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[64, 256, 1024, 3072])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    drafters = [ASSETS / "peagle", ASSETS / "eagle3"]
    parser.add_argument("--drafters", nargs="+", type=Path, default=drafters)
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--target", type=Path, default=ASSETS / "target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    parser.add_argument("--picture", type=Path, help="draw the rows to this PNG")
    args = parser.parse_args()
    target, head = load_pair(args.target, args.drafters[0], dtype=jnp.dtype(args.dtype))
    heads = [head, *(load_drafter_for(target, path) for path in args.drafters[1:])]
    places = beginnings(args.target, max(args.prompt_tokens))
    if not places:
        parser.error(f"--prompt-tokens: no held-out file has {max(args.prompt_tokens):,} tokens")
    cases = list(itertools.product(args.temperatures, heads, args.prompt_tokens))
    rows = []
    with ProgressReport("acceptance by length", len(cases), unit="cases") as progress:
        for temperature, head, num_tokens in cases:
            requests = [
                Request(
                    prompt=before[-num_tokens:],
                    max_new_tokens=args.max_new_tokens,
                    temperature=temperature,
                    seed=seed,
                    stop_ids=(),
                )
                for seed, before in enumerate(places)
            ]
            drafter = make_drafter(head, args.k)
            engine = make_engine(target, drafter, head.params, max_batch=args.batch_size)
            answers = dict(engine.run(requests))
            check_answered(list(answers.values()), f"--prompt-tokens {num_tokens}")
            rows.append(
                {
                    "name": "acceptance_by_length",
                    "method": head.config.method,
                    "k": args.k,
                    "temperature": temperature,
                    "prompt_tokens": num_tokens,
                    "dtype": args.dtype,
                    "max_new_tokens": args.max_new_tokens,
                    **measured([answers[i] for i in range(len(answers))]),
                }
            )
            progress.update(len(rows), note=f"{head.config.method}, {num_tokens} tokens")
    Console(width=110).print(table_of(rows))
    if args.picture:
        draw(rows, args.picture)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/acceptance_by_length.py")


def beginnings(target: Path, num_tokens: int) -> list[list[int]]:
    """What stands before one place of each held-out file that has so many tokens before it."""
    tokenizer = text.load_tokenizer(target)
    assert tokenizer is not None, "the packaged target has one"
    _, held_out = corpus.split(corpus.read_corpus(None), HELD_OUT)
    texts = [document.text for document in held_out if document.text]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    # not the end of a file, which many end alike
    return [ids[:num_tokens] for ids in encoded if len(ids) >= num_tokens + 256]


def measured(answers: Sequence[Generation]) -> dict:
    """Acceptance of answers: pooled, as the mean over them, and of each quarter of them."""
    steps = np.array([answer.num_drafts for answer in answers])
    accepted = np.array([answer.num_accepted_tokens for answer in answers])
    picks = np.random.default_rng(0).integers(0, len(answers), (RESAMPLES, len(answers)))
    lengths = 1 + accepted[picks].sum(1) / steps[picks].sum(1)
    low, high = np.quantile(lengths, [0.025, 0.975])
    is_draft = np.array([answer.is_draft for answer in answers])  # all are equally long
    quarters = np.array_split(is_draft, QUARTERS, axis=1)
    return {
        "num_prompts": len(answers),
        "acceptance_length": acceptance_length(answers),
        "interval": [float(low), float(high)],
        "mean_over_requests": mean_acceptance_length(answers),
        "along_the_answer": [quarter.size / int((~quarter).sum()) for quarter in quarters],
        "repeated_4grams": repeated_share([answer.output_token_ids for answer in answers]),
    }


def table_of(rows: Sequence[dict]) -> Table:
    columns = ("temperature", "method", "prompt", "length (95 %)", "mean over requests")
    table = Table(*columns, "in each quarter of the answer", "repeated")
    for row in rows:
        low, high = row["interval"]
        table.add_row(
            f"{row['temperature']:g}",
            row["method"],
            f"{row['prompt_tokens']:,}",
            f"{row['acceptance_length']:.2f} ({low:.2f} to {high:.2f})",
            f"{row['mean_over_requests']:.2f}",
            " ".join(f"{length:.2f}" for length in row["along_the_answer"]),
            f"{row['repeated_4grams']:.0%}",
        )
    return table


def draw(rows: Sequence[dict], path: Path) -> None:
    """Two panels: against the prompt's length, and along answers to the shortest prompts."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    cases = sorted({(row["method"], row["temperature"]) for row in rows})
    names = {"peagle": "P-EAGLE", "eagle3": "EAGLE-3", "eagle": "EAGLE-1"}
    for (method, temperature), color in zip(cases, itertools.cycle(COLORS), strict=False):
        here = [r for r in rows if (r["method"], r["temperature"]) == (method, temperature)]
        here.sort(key=lambda row: row["prompt_tokens"])
        x = [row["prompt_tokens"] for row in here]
        y = np.array([row["acceptance_length"] for row in here])
        label = f"{names[method]}, temperature {temperature:g}"
        bars = np.abs(np.array([row["interval"] for row in here]).T - y)
        left.errorbar(x, y, yerr=bars, fmt="o-", capsize=3, color=color, label=label)
        tokens = here[0]["max_new_tokens"]
        middles = (np.arange(QUARTERS) + 0.5) * tokens / QUARTERS
        right.plot(middles, here[0]["along_the_answer"], "o-", color=color, label=label)
    left.set_xscale("log", base=2)
    left.set_xticks(x, [f"{tokens:,}" for tokens in x])
    left.set_xlabel("tokens of the prompt")
    left.set_ylabel("acceptance length")
    right.set_xlabel(f"tokens of the answer, prompts of {here[0]['prompt_tokens']:,}")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
