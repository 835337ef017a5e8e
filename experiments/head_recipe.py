"""What lets a small draft head learn in minutes: steps or tokens, which start, all depths at once or one by one, whose text?

    python -m experiments.head_recipe [--only NAME ...] [--out results/head_recipe.jsonl]

The two variants on own answers read runs/assets/{greedy,sampled,prompts}.jsonl, made by

    peagle regenerate --target peagle_jax/assets/target --temperature 0 --answers 2048 --out runs/assets/greedy.jsonl      (sampled: 1)
    python scripts/make_prompts.py peagle_jax/assets/target runs/assets/prompts.jsonl 16

Every variant is a P-EAGLE head of 2 layers on the packaged target, about 150,000 tokens of its corpus and one seed, measured by
greedy decoding of 16 held-out excerpts. They differ from `borrowed` in what their line below says.
Expects: about a minute each on 2 cores; `borrowed` some 50 to 60 % of first drafts accepted, `rows4` and `random` 30 to 40 %,
`all-depths` under 30 %.
Result:  `two-depths-sampled` and `two-depths-greedy` 38 8 % and 41 9 % (results/head_recipe.jsonl, 2026-11-21). The others were not run as
this command yet; what it expects was measured by a scratch script (LOG.md, 2026-11-20, "what lets a head learn in minutes").
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from peagle_jax.origin import provenance
from peagle_jax.pipelines.budgets import HELD_OUT
from peagle_jax.pipelines.train_head import train_head
from peagle_jax.train.cod import Cod
from peagle_jax.train.config import PeagleRun, load_run

ROOT = Path(__file__).parent.parent
STEPS = 600


def base() -> PeagleRun:
    run = load_run(ROOT / "configs" / "train" / "demo_peagle.yaml")
    return dataclasses.replace(
        run, target=str(ROOT / run.target), grow=(), cod=Cod(depths=1, ratio=0.8, floor=0.2, anchors=None),
        head=dataclasses.replace(run.head, layers=2, mlp_dim=None),
        data=dataclasses.replace(run.data, source=None, max_chars=20_000_000, held_out=HELD_OUT),
        optimizer=dataclasses.replace(run.optimizer, steps=STEPS, warmup=STEPS // 20, peak_lr=2e-3),
        measure=dataclasses.replace(run.measure, every=None, prompts=None), log_every=20,
    )  # fmt: skip


def rows(run: PeagleRun, number: int) -> PeagleRun:
    """The same tokens in fewer steps."""
    steps = STEPS // number
    how = dataclasses.replace(run.optimizer, steps=steps, warmup=max(1, steps // 20))
    return dataclasses.replace(run, data=dataclasses.replace(run.data, batch=number), optimizer=how)


def rate(run: PeagleRun, peak: float) -> PeagleRun:
    return dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, peak_lr=peak))


def head(run: PeagleRun, **changes) -> PeagleRun:
    return dataclasses.replace(run, head=dataclasses.replace(run.head, **changes))


def two_depths() -> PeagleRun:
    return dataclasses.replace(base(), cod=Cod(depths=2, ratio=0.8, floor=0.2, anchors=None))


def answers(run: PeagleRun, kind: str) -> PeagleRun:
    """The target's own answers instead of the corpus; the prompts that measure it stay the same."""
    data = dataclasses.replace(run.data, source=str(ROOT / "runs" / "assets" / f"{kind}.jsonl"), max_chars=None, held_out=0.0)
    measure = dataclasses.replace(run.measure, prompts=str(ROOT / "runs" / "assets" / "prompts.jsonl"))
    return dataclasses.replace(run, data=data, measure=measure)


VARIANTS = {
    "borrowed": base,
    "rows4": lambda: rows(base(), 4),
    "random": lambda: dataclasses.replace(base(), start="random"),
    "random-rows4": lambda: rows(dataclasses.replace(base(), start="random"), 4),
    "rate4e-3": lambda: rate(base(), 4e-3),
    "rate1e-3": lambda: rate(base(), 1e-3),
    "output-trained": lambda: dataclasses.replace(base(), train_lm_head=True),
    "embedding-frozen": lambda: dataclasses.replace(base(), train_embedding=False),
    "norm-before-residual": lambda: head(base(), norm_before_residual=True),
    "usual-taps": lambda: head(base(), taps=(2, 4, 5)),
    "two-depths": lambda: two_depths(),
    "two-depths-sampled": lambda: answers(two_depths(), "sampled"),
    "two-depths-greedy": lambda: answers(two_depths(), "greedy"),
    "all-depths": lambda: dataclasses.replace(base(), cod=Cod(depths=8, ratio=0.8, floor=0.2, anchors=None)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--work", type=Path, default=Path("runs/head_recipe"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = Table("variant", "acceptance length", "accepted per position, %", "depth-0 argmax right, %", "minutes")
    for name in args.only:
        shutil.rmtree(args.work / name, ignore_errors=True)
        run = dataclasses.replace(VARIANTS[name](), out=str(args.work / name))
        result = train_head(run, lambda line: None)
        seen = [json.loads(line) for line in (args.work / name / "metrics.jsonl").read_text().splitlines()][-5:]
        right = sum(row["accuracy"][0] for row in seen) / len(seen)  # of the last five logged batches
        record = provenance(f"python -m experiments.head_recipe --only {name}") | {
            "name": "head_recipe", "variant": name, "seed": run.seed, "steps": run.optimizer.steps, "rows": run.data.batch,
            "acceptance_length": result.acceptance_length, "accepted_per_position": result.accepted_per_position,
            "repeated_4grams": result.repeated_4grams, "depth0_right": right, "minutes": result.minutes,
        }  # fmt: skip
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        positions = " ".join(f"{100 * a:.0f}" for a in result.accepted_per_position)
        table.add_row(name, f"{result.acceptance_length:.2f}", positions, f"{100 * right:.0f}", f"{result.minutes:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
