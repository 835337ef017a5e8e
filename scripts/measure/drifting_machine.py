"""How well `-k auto` chooses where the machine's speed drifts, by simulation.

    .venv/bin/python scripts/measure/drifting_machine.py [--record results/drifting_machine.jsonl]

The rule and its step times are the engine's own. Steps, which are not computed, take given seconds
times a factor: its logarithm wanders about 0 with a standard deviation (`drift`) and a memory in
seconds, as where other work comes and goes, and each call is slower by some 4 % at random. `alone`
is what a step took while it was measured, over what it takes later, when other engines decode, too.
Drafts are accepted with given chances. A row has the speed over that of the best fixed K, which has
the same machine: the mean over runs, and the least.
"""

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax.decode.adaptive_k import KChooser, candidates
from peagle_jax.decode.engine import MIN_TIMED_STEPS
from peagle_jax.decode.step_times import StepTimes
from peagle_jax.provenance import append_rows

K = 7
STEPS, ENGINES = 2000, 3  # of an engine; one after another, with what is kept on disk
NOISE = 0.05
# rows of the batch, seconds of a step by K, and the chance of each draft behind accepted ones. The
# seconds are about those of the packaged models on an Intel Xeon.
TEXTS = {
    "easy, one row": (1, {0: 2.0e-3, 1: 2.7e-3, 3: 3.5e-3, 5: 4.0e-3, 7: 4.4e-3}, [0.85] * 7),
    "easy, four rows": (
        4,
        {0: 3.3e-3, 1: 5.5e-3, 3: 9.0e-3, 5: 9.5e-3, 7: 10.1e-3},
        [0.8, 0.8, *[0.85] * 5],
    ),
    "hard, one row": (
        1,
        {0: 2.1e-3, 1: 3.05e-3, 3: 4.2e-3, 5: 5.2e-3, 7: 6.2e-3},
        [0.55, 0.66, 0.6, *[0.5] * 4],
    ),
    "not worth drafting, four rows": (
        4,
        {0: 3.3e-3, 1: 5.5e-3, 3: 9.0e-3, 5: 9.5e-3, 7: 10.1e-3},
        [0.36, 0.4, 0.45, *[0.5] * 4],
    ),
}
# drift, its memory in seconds, and how long measured steps took
MACHINES = ((0.0, 20, 1.0), (0.15, 20, 1.0), (0.15, 20, 0.8), (0.15, 5, 1.25), (0.25, 60, 1.0))


class Machine:
    """Whose speed drifts."""

    def __init__(self, drift: float, memory: float, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._drift, self._memory = drift, memory
        self._level = self.random.normal(0, drift)

    def slowness(self, seconds: float) -> float:
        """By how much the next call, which lasts about so long, is slower than usual."""
        kept = math.exp(-seconds / self._memory)
        change = math.sqrt(1 - kept**2) * self._drift
        self._level = kept * self._level + change * self.random.normal()
        return math.exp(self._level + abs(self.random.normal(0, NOISE)))


def simulate(text: str, drift: float, memory: float, alone: float, seed: int) -> float:
    """Tokens per second over those of the best fixed K, in one run.

    Args:
      text: a name in TEXTS.
      drift, memory, alone: as in MACHINES.
    """
    num_rows, usual, chances = TEXTS[text]
    machine = Machine(drift, memory, seed)

    def measure(k: int) -> float:
        return alone * usual[k] * machine.slowness(usual[k])

    num_tokens = seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ENGINES):
            times, chooser, left = StepTimes({"machine": "made"}, Path(folder)), KChooser(K), STEPS
            times.recall_drafts("greedy", chooser)
            while left > 0:
                known = times.get(candidates(K), num_rows, 256, "greedy", measure)
                k = chooser.choose(known)
                num_steps = max(1, chooser.steps_left)
                accepted = np.zeros(K, int)
                reached = num_steps * num_rows
                for place in range(k):
                    reached = machine.random.binomial(reached, chances[place])
                    accepted[place] = reached
                seconds += num_steps * usual[k]  # the fixed K's machine is as slow
                num_tokens += num_steps * num_rows + accepted.sum()
                chooser.observe(num_steps, num_steps * num_rows if k else 0, accepted)
                taken = usual[k] * machine.slowness(num_steps * usual[k])
                if num_steps >= MIN_TIMED_STEPS:
                    times.observe(k, num_rows, 256, "greedy", taken)
                left -= num_steps
            times.keep_drafts("greedy", chooser.survival)
    lengths = {k: 1 + np.cumprod(chances[:k]).sum() for k in usual}
    best = max(num_rows * lengths[k] / usual[k] for k in usual)
    return float(num_tokens / seconds / best)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    rows = []
    table = Table("text", "drift", "memory, s", "alone", "of the best fixed K", "least")
    for text in TEXTS:
        for drift, memory, alone in MACHINES:
            over = [simulate(text, drift, memory, alone, seed) for seed in range(args.runs)]
            rows.append(
                {
                    "name": "drifting_machine",
                    "text": text,
                    "drift": drift,
                    "memory_seconds": memory,
                    "alone": alone,
                    "over_best_fixed": float(np.mean(over)),
                    "least_over_best_fixed": min(over),
                    "runs": args.runs,
                }
            )
            numbers = f"{np.mean(over):.3f}", f"{min(over):.3f}"
            table.add_row(text, f"{drift:g}", f"{memory}", f"{alone:g}", *numbers)
    Console(width=100).print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/drifting_machine.py")


if __name__ == "__main__":
    main()
