"""How well `-k auto` chooses on a machine that others use, too, by simulation.

    .venv/bin/python scripts/measure/drifting_machine.py [--record results/drifting_machine.jsonl]

The rule and its step times are the engine's own. Steps, which are not computed, take given seconds
times two factors. One is the machine's speed: its logarithm wanders about 0 with a standard
deviation (`drift`) and a memory in seconds, and each call is slower by some 4 % at random. The
other is 1 or `busy`, by turns of some seconds each, and concerns steps that draft alone: where two
threads share a core or a cache, products of several rows slow down, and those of one row, which
wait for memory, do not (LOG.md, 2026-11-30, noon). Each return to the host costs a millisecond, and
to begin and to end drafting costs 4. `alone` is what a step took while it was measured, over what
it takes later, when other engines decode, too.

A text has easy parts and hard ones, in which drafts are right with given chances, for every way of
drafting the same ones. Some engines decode one after another, with what is kept on
disk. A row has the speed over that of the best fixed K, and over that of plain decoding, on the
same machine at the same times: the mean over runs, and the least.
"""

import argparse
import bisect
import math
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax.decode.adaptive_k import KChooser, candidates
from peagle_jax.decode.batch import MOST_TIMED_STEPS, TIMED_SECONDS
from peagle_jax.decode.step_times import StepTimes
from peagle_jax.provenance import append_rows

K = 7
TOKENS, ENGINES = 2000, 6  # of a row of an engine; one after another, with what is kept on disk
NOISE = 0.05
OF_A_RETURN, OF_A_CHANGE = 1e-3, 4e-3  # seconds
RETURN_STEPS = 256  # between two returns where K is fixed
# Seconds of a step by K: about those of the packaged models on an Intel Xeon with one row and with
# four, and on an AMD EPYC with one.
INTEL = {0: 2.0e-3, 1: 2.8e-3, 3: 3.7e-3, 5: 4.3e-3, 7: 4.9e-3}
INTEL_FOUR = {0: 3.3e-3, 1: 5.5e-3, 3: 9.0e-3, 5: 9.5e-3, 7: 10.1e-3}
AMD = {0: 0.65e-3, 1: 1.16e-3, 3: 1.37e-3, 5: 1.63e-3, 7: 1.97e-3}
# rows of the batch, seconds, and the chance that a first draft is right in easy parts of the text
# and in hard ones. Tokens of a part, on average, and what a draft's chance is of the one before.
TEXTS = {
    "easy, one row": (1, INTEL, (0.97, 0.7)),
    "easy, four rows": (4, INTEL_FOUR, (0.97, 0.75)),
    "hard, one row": (1, INTEL, (0.8, 0.4)),
    "hopeless, four rows": (4, INTEL_FOUR, (0.5, 0.3)),
    "easy, short steps": (1, AMD, (0.97, 0.7)),
    "even, short steps": (1, AMD, (0.85, 0.45)),
    "hopeless, short steps": (1, AMD, (0.5, 0.3)),
}
OF_A_PART, OF_THE_NEXT = 12, 0.98
# drift, its memory in seconds, how long measured steps took, and by how much steps that draft are
# slower at times
MACHINES = (
    (0.0, 20, 1.0, 1.0),
    (0.15, 20, 1.0, 1.0),
    (0.15, 20, 0.8, 1.0),
    (0.15, 5, 1.25, 1.0),
    (0.25, 60, 1.0, 1.0),
    (0.05, 20, 1.0, 1.4),
)
BUSY_SECONDS = 3.0  # of a turn, on average


class Machine:
    """Whose speed drifts, and which others keep busy at times.

    Args:
      drift, memory, busy: as in MACHINES.
    """

    def __init__(self, drift: float, memory: float, busy: float, seed: int) -> None:
        self._states = np.random.default_rng(seed)
        self._noise = np.random.default_rng(seed + 1000)
        self._drift, self._memory, self._busy = drift, memory, busy
        self._levels = [self._states.normal(0, drift)]  # second by second
        self._turns = [self._states.exponential(BUSY_SECONDS)]  # ends of turns
        self._first_is_busy = self._states.random() < 0.5

    def slowness(self, k: int, now: float) -> float:
        """By how much a call of steps with `k` drafts is slower than usual after `now` seconds."""
        kept = math.exp(-1 / self._memory)
        while len(self._levels) <= now:
            change = math.sqrt(1 - kept**2) * self._drift
            self._levels.append(kept * self._levels[-1] + change * self._states.normal())
            while self._turns[-1] < len(self._levels):
                self._turns.append(self._turns[-1] + self._states.exponential(BUSY_SECONDS))
        is_busy = self._first_is_busy ^ (bisect.bisect(self._turns, now) % 2 == 1)
        slowness = math.exp(self._levels[int(now)] + abs(self._noise.normal(0, NOISE)))
        return slowness * (self._busy if k and is_busy else 1.0)


def right_drafts(chances: tuple[float, float], seed: int) -> np.ndarray:
    """How many drafts that begin at each token of a row are right, one after another."""
    random = np.random.default_rng(seed)
    length = ENGINES * TOKENS + 64 * (K + 1)
    part = (random.random(length) < 1 / OF_A_PART).cumsum() % 2
    chance, drawn = np.array(chances)[part], random.random(length)
    right, all_before = np.zeros(length, int), np.ones(length, bool)
    for depth in range(K):
        all_before &= np.roll(drawn < chance * OF_THE_NEXT**depth, -depth)
        right += all_before
    return right


def decode(text: str, machine: tuple, seed: int, always: int | None = None) -> float:
    """Tokens per second of all engines, without what the first measuring takes.

    The machine's state depends on how many tokens there are, so that it is the same for every way
    of drafting. The first measuring meets other states; every program is compiled.

    Args:
      text: a name in TEXTS.
      machine: of MACHINES.
      always: K; None where it is chosen.
    """
    num_rows, usual, chances = TEXTS[text]
    texts = [right_drafts(chances, seed + 100 * row) for row in range(num_rows)]
    places = [0] * num_rows
    drift, memory, alone, busy = machine
    here, elsewhere = (Machine(drift, memory, busy, s) for s in (seed, seed + 500))
    num_tokens = seconds = measuring = 0.0
    shape = num_rows, 256, "greedy"

    def measure(k: int) -> float:
        nonlocal measuring, seconds
        machine, now = (
            (here, num_tokens / num_rows * usual[0]) if num_tokens else (elsewhere, measuring)
        )
        taken = usual[k] * machine.slowness(k, now)
        lasts = 2 * OF_A_RETURN + max(taken, min(TIMED_SECONDS, MOST_TIMED_STEPS * taken))
        if num_tokens:
            seconds += lasts
        else:
            measuring += lasts
        return alone * taken

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("time.monotonic", lambda: 1e9 + measuring + seconds),
    ):
        for engine in range(1, ENGINES + 1):
            times = StepTimes({"machine": "made"}, Path(folder))
            chooser = KChooser(K)
            times.recall_drafts("greedy", "head", chooser)
            before = 0
            while num_tokens < engine * TOKENS * num_rows:
                if always is None:
                    k = chooser.choose(times.get(candidates(K), *shape, measure, lambda k: True))
                    num_steps = max(1, chooser.steps_left)
                else:
                    k, num_steps = always, RETURN_STEPS
                accepted = np.zeros(K, int)
                for row in range(num_rows):
                    for _ in range(num_steps):
                        count = min(k, texts[row][places[row]])
                        accepted[:count] += 1
                        places[row] = (places[row] + count + 1) % (ENGINES * TOKENS)
                now = num_tokens / num_rows * usual[0]
                taken = usual[k] * here.slowness(k, now)
                seconds += num_steps * taken + OF_A_RETURN
                if always is None and bool(k) != bool(before):
                    seconds += OF_A_CHANGE / 2
                before = k
                num_tokens += num_steps * num_rows + accepted.sum()
                if always is None:
                    times.count(*shape, num_steps, num_steps * taken)
                    chooser.observe(num_steps, num_steps * num_rows if k else 0, accepted)
            if always is None:
                times.keep_drafts("greedy", "head", chooser)
    return num_tokens / seconds


def simulate(text: str, machine: tuple, seed: int) -> tuple[float, float]:
    """Tokens per second over those of the best fixed K, and of plain decoding, in one run."""
    fixed = {k: decode(text, machine, seed, k) for k in TEXTS[text][1]}
    chosen = decode(text, machine, seed)
    return chosen / max(fixed.values()), chosen / fixed[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    rows = []
    columns = "text", "drift", "memory, s", "alone", "busy", "of the best K", "least", "of plain"
    table = Table(*columns)
    for text in TEXTS:
        for drift, memory, alone, busy in MACHINES:
            machine = drift, memory, alone, busy
            runs = [simulate(text, machine, seed) for seed in range(args.runs)]
            over, over_plain = zip(*runs, strict=True)
            rows.append(
                {
                    "name": "drifting_machine",
                    "text": text,
                    "drift": drift,
                    "memory_seconds": memory,
                    "alone": alone,
                    "busy": busy,
                    "over_best_fixed": float(np.mean(over)),
                    "least_over_best_fixed": min(over),
                    "over_plain": float(np.mean(over_plain)),
                    "least_over_plain": min(over_plain),
                    "runs": args.runs,
                }
            )
            numbers = np.mean(over), min(over), np.mean(over_plain)
            table.add_row(text, *(f"{x:g}" for x in machine), *(f"{x:.3f}" for x in numbers))
    Console(width=100).print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/drifting_machine.py")


if __name__ == "__main__":
    main()
