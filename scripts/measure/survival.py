"""Calibration of what `-k auto` expects of drafts: the chances that it estimates, against shares.

    .venv/bin/python scripts/measure/survival.py [--method peagle] [-k 7] [--batch-sizes 1 8]
        [--record results/survival.jsonl]

The packaged models decode held-out text and always draft K tokens. Between two choices of K the
engine's estimator (decode/adaptive_k.py) says how likely a step accepts its first 1, 2, ..., K
drafts; the share that did is compared with it. The expected calibration error is the mean distance
over ten bins of estimated chance, weighed by steps. It cannot reach 0: shares of finitely many
steps scatter. `of_chance` is what it would be on average if every estimate were exact.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from adaptive_k import calibration_error, prompts_and_temperatures
from rich.console import Console
from rich.table import Table

from peagle_jax import Engine, Model, Request, load_pair
from peagle_jax.decode.adaptive_k import KChooser, Survival
from peagle_jax.decode.generate import make_drafter
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

STEPS = 16  # between two looks at the estimates
SIMULATIONS = 100
# steps, drafts of all rows, and in how many of these each position was accepted
Seen = tuple[int, int, np.ndarray]


class Watched(KChooser):
    """Always drafts as many tokens as it can, and keeps what it saw."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.k, self.seen = self.k_max, list[Seen]()

    def choose(self, seconds) -> int:
        self.steps_left = STEPS
        return self.k

    def observe(self, num_steps, num_drafts, num_accepted_per_pos, num_expected_per_pos=None):
        self.seen.append((num_steps, num_drafts, np.array(num_accepted_per_pos)))


def decode(
    models: tuple[Model, Model],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    k: int,
    batch_size: int,
    max_new_tokens: int,
    step_times: Path,
) -> list[Seen]:
    """What an engine's choice of K would have seen."""
    target, head = models
    engine = Engine(
        target,
        make_drafter(head, k),
        head.params,
        adaptive_k=True,
        step_times=step_times,
        max_batch=batch_size,
    )
    chooser = engine.chooser = Watched(k)
    requests = [
        Request(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            stop_ids=(),
        )
        for seed, prompt in enumerate(prompts)
    ]
    for _ in engine.run(requests):
        pass
    return chooser.seen


def judge(seen: Sequence[Seen], k: int) -> tuple[float, float]:
    """(the expected calibration error, what it would be if every estimate were exact)."""
    survival, rng = Survival(k), np.random.default_rng(0)
    chances, shares, steps = [], [], []
    for num_steps, num_drafts, accepted in seen:
        if num_drafts:
            chances.append(survival.chances(k))
            shares.append(accepted[:k] / num_drafts)
            steps.append(num_drafts)
        survival.observe(k, num_steps, num_drafts, accepted)
    weights = np.repeat(steps, k)
    found = calibration_error(np.ravel(chances), np.ravel(shares), weights)
    conditional = np.divide(chances, np.hstack([np.ones((len(chances), 1)), chances])[:, :k])
    by_chance = []
    for _ in range(SIMULATIONS):
        left, drawn = np.array(steps), []
        for position in range(k):
            left = rng.binomial(left, conditional[:, position])
            drawn.append(left / steps)
        by_chance.append(calibration_error(np.ravel(chances), np.transpose(drawn).ravel(), weights))
    return found, float(np.mean(by_chance))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=("peagle", "eagle3"), default="peagle")
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    models = load_pair(ASSETS / "target", ASSETS / args.method, dtype=jnp.dtype("bfloat16"))
    texts, rows = prompts_and_temperatures(models[0], args.num_prompts), []
    with (
        ProgressReport("survival", len(texts) * len(args.batch_sizes), unit="texts") as progress,
        tempfile.TemporaryDirectory() as folder,
    ):
        for name, (prompts, temperature) in texts.items():
            for batch_size in args.batch_sizes:
                progress.update(progress.completed, note=f"{name}, batch {batch_size}")
                options = args.k, batch_size, args.max_new_tokens, Path(folder)
                seen = decode(models, prompts, temperature, *options)
                error, of_chance = judge(seen, args.k)
                rows.append(
                    {
                        "name": "survival",
                        "text": name,
                        "method": args.method,
                        "k": args.k,
                        "batch_size": batch_size,
                        "num_prompts": len(prompts),
                        "max_new_tokens": args.max_new_tokens,
                        "steps_between_looks": STEPS,
                        "num_drafts": sum(drafts for _, drafts, _ in seen),
                        "calibration_error": error,
                        "of_chance": of_chance,
                    }
                )
                if args.record:
                    append_rows(args.record, rows[-1:], "scripts/measure/survival.py")
                progress.update(progress.completed + 1)
    table = Table("text", "batch", "drafts", "calibration error", "of chance")
    for row in rows:
        errors = (f"{row[key]:.1%}" for key in ("calibration_error", "of_chance"))
        table.add_row(row["text"], str(row["batch_size"]), f"{row['num_drafts']:,}", *errors)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
