"""How sure an acceptance length is, and whether two variants differ: intervals over seeds and prompts, paired comparisons.

What varies when an experiment is run again? The seed of the training, and the prompts. A variant's acceptance length is pooled as vLLM
counts it, 1 + accepted/drafts over all its seeds and prompts. Two 95 % intervals are made of it, and the WIDER one is reported:

- a two-level bootstrap: seeds with replacement, then prompts with replacement, the same prompts for all seeds (and, in a comparison, for
  both variants, because they answered the same prompts). Alone it is far too narrow where seeds matter: three values drawn from three
  have 2/3 of the seeds' variance, and percentiles know nothing of how badly three values tell a variance;
- Student's t over the seeds' values (in a comparison: their paired differences), which knows that: 4.3 standard errors on either side for
  3 seeds (2 degrees of freedom), 12.7 for 2. Alone it is blind to the prompts: they are the same for all seeds, so prompts that happen
  to suit one variant move all its seeds together.

In simulated comparisons with 3 seeds and 72 prompts (tests/experiments/test_statistics.py has a smaller version) the wider one covers the
true difference in 94 to 96 % of the cases, whether seeds, prompts or both matter; the bootstrap alone in 80 % when seeds matter most, t
alone in 59 % when prompts do. Prompts are drawn from all kinds of text together: a little too wide for a fixed mixture of kinds, and
still right with one prompt a kind. Everything is deterministic: one fixed generator.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from experiments.texts import KINDS

DRAWS, LEVEL = 2000, (2.5, 97.5)
# 97.5 % quantiles of Student's t for 1, 2, .. degrees of freedom; from 11 on the series of Abramowitz and Stegun 26.7.5 does
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Row = Mapping  # one finished run, as its JSON line says


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a variant's runs counted: R runs (one a seed), P prompts, K positions."""

    seeds: tuple[int, ...]
    kinds: tuple[str, ...]  # of the prompts, in their order
    drafts: Int[np.ndarray, "R P"]
    accepted: Int[np.ndarray, "R P K"]


@dataclasses.dataclass(frozen=True)
class Interval:
    value: float  # pooled acceptance length
    low: float  # 95 %; with one seed over prompts only
    high: float
    by_seed: dict[int, float]

    @property
    def deviation(self) -> float | None:
        """Standard deviation between seeds, of a sample; None with one seed."""
        return float(np.std(list(self.by_seed.values()), ddof=1)) if len(self.by_seed) > 1 else None

    @property
    def range(self) -> tuple[float, float]:
        return min(self.by_seed.values()), max(self.by_seed.values())


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The first variant minus the second."""

    difference: float
    low: float
    high: float
    word: str  # better, worse, within noise (0 lies in the interval), one seed only (no claim)
    by_seed: dict[int, float]


def counts(rows: Sequence[Row], *, measurement: int = 0, kinds: Sequence[str] = KINDS) -> Counts:
    """The counts of one variant's runs, in the order of their seeds.

    Args:
      measurement: which of `row["measured"]`.
      kinds: of prompts to read; all others are left out.

    Raises:
      ValueError: no run, two of one seed, other prompts in one run than in another, another K, or no drafts at all.
    """
    if not rows:
        raise ValueError("a variant needs one finished run or more; got none; run it first")
    rows = sorted(rows, key=lambda row: row["seed"])
    seeds = tuple(row["seed"] for row in rows)
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"one variant's runs must have a seed each; got {list(seeds)}; leave out what a later run replaced"
        )
    runs = [row["measured"][measurement] for row in rows]
    for run in runs[1:]:
        _same_prompts([p["kind"] for p in runs[0]["prompts"]], [p["kind"] for p in run["prompts"]])
        if run.get("prompts_stage") != runs[0].get("prompts_stage"):
            raise ValueError(
                "runs are compared on the same prompts; got two sets of them; run all with one cache"
            )
    if len({run["k"] for run in runs}) > 1:
        raise ValueError(
            f"one variant's runs must be measured with one K; got {[run['k'] for run in runs]}; run the variant again"
        )
    prompts = [[p for p in run["prompts"] if p["kind"] in kinds] for run in runs]
    drafts = np.array([[p["drafts"] for p in run] for run in prompts], int)
    if (drafts.sum(1) == 0).any():
        raise ValueError(
            f"an acceptance length needs drafts; got none on {', '.join(kinds)} in one run or more; measure longer texts"
        )
    accepted = np.array([[p["accepted"] for p in run] for run in prompts], int)
    return Counts(seeds, tuple(p["kind"] for p in prompts[0]), drafts, accepted)


def pooled(rows: Sequence[Row], *, measurement: int = 0, kinds: Sequence[str] = KINDS) -> float:
    """Acceptance length as vLLM counts it, over all runs and prompts: 1 + accepted/drafts."""
    c = counts(rows, measurement=measurement, kinds=kinds)
    return float(1 + c.accepted.sum() / c.drafts.sum())


def per_position(
    rows: Sequence[Row], *, measurement: int = 0, kinds: Sequence[str] = KINDS
) -> list[float]:
    """Share of all drafts accepted at each position, 0..1."""
    c = counts(rows, measurement=measurement, kinds=kinds)
    return (c.accepted.sum((0, 1)) / c.drafts.sum()).tolist()


def interval(
    rows: Sequence[Row], *, measurement: int = 0, kinds: Sequence[str] = KINDS, draws: int = DRAWS
) -> Interval:
    """A variant's pooled acceptance length with its 95 % interval (see the top of this file)."""
    c = counts(rows, measurement=measurement, kinds=kinds)
    seeds, prompts = _draws(len(c.seeds), len(c.kinds), draws)
    low, high = _wider(_pooled(c), _by_seed(c), _pooled(c, seeds, prompts))
    return Interval(
        _pooled(c).item(), low, high, dict(zip(c.seeds, _by_seed(c).tolist(), strict=True))
    )


def compare(
    rows_a: Sequence[Row],
    rows_b: Sequence[Row],
    *,
    measurement: int = 0,
    kinds: Sequence[str] = KINDS,
    positions: slice = slice(None),
    draws: int = DRAWS,
) -> Comparison:
    """The pooled acceptance length of A minus that of B, on the seeds that both have; prompts are paired by their place.

    Args:
      positions: of the draft, whose accepted tokens count; of one position the difference is in its share of accepted drafts.

    Raises:
      ValueError: no common seed, or A and B were not measured on the same prompts.
    """
    common = {row["seed"] for row in rows_a} & {row["seed"] for row in rows_b}
    if not common:
        got = sorted(row["seed"] for row in rows_a), sorted(row["seed"] for row in rows_b)
        raise ValueError(
            f"variants are compared on the seeds that both have; got {got[0]} and {got[1]}; run the missing seeds"
        )
    a, b = ([row for row in rows if row["seed"] in common] for rows in (rows_a, rows_b))
    a, b = (counts(rows, measurement=measurement, kinds=kinds) for rows in (a, b))
    _same_prompts(a.kinds, b.kinds)
    a, b = (dataclasses.replace(c, accepted=c.accepted[:, :, positions]) for c in (a, b))
    if len({row["measured"][measurement].get("prompts_stage") for row in (*rows_a, *rows_b)}) > 1:
        raise ValueError(
            "variants are compared on the same prompts; got two sets of them; run all with one cache"
        )
    seeds, prompts = _draws(len(a.seeds), len(a.kinds), draws)

    def minus(*drawn):
        return _pooled(a, *drawn) - _pooled(b, *drawn)

    by_seed = _by_seed(a) - _by_seed(b)
    low, high = _wider(minus(), by_seed, minus(seeds, prompts))
    word = "better" if low > 0 else "worse" if high < 0 else "within noise"
    by_name = dict(zip(a.seeds, by_seed.tolist(), strict=True))
    return Comparison(
        minus().item(), low, high, word if len(common) > 1 else "one seed only", by_name
    )


def student(freedom: int) -> float:
    """97.5 % quantile of Student's t distribution. SciPy is no dependency of this project."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z, n = 1.959964, freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def _same_prompts(a: Sequence[str], b: Sequence[str]) -> None:
    if len(a) != len(b):
        raise ValueError(
            f"runs are compared on the same prompts; got {len(a)} and {len(b)} of them; run both with one budget"
        )
    wrong = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if wrong:
        i = wrong[0]
        raise ValueError(
            f"runs are compared on the same prompts; got {a[i]} and {b[i]} as prompt {i}; run both on one set of prompts"
        )


@functools.lru_cache(maxsize=32)
def _draws(
    seeds: int, prompts: int, draws: int
) -> tuple[Int[np.ndarray, "draws R"], Int[np.ndarray, "draws P"]]:
    """How often each seed and each prompt is drawn. Kept: all variants of an experiment then share their draws."""
    generator = np.random.default_rng(20260201)
    return tuple(generator.multinomial(n, np.full(n, 1 / n), draws) for n in (seeds, prompts))


def _pooled(c: Counts, seeds=None, prompts=None) -> np.ndarray:
    """Pooled acceptance length, of the data or of each draw."""
    accepted, drafts = (
        c.accepted.sum(2).astype(float),
        c.drafts.astype(float),
    )  # floats: matrix products of integers are slow
    if seeds is None:
        return 1 + accepted.sum() / drafts.sum()
    sums = [np.einsum("ds,ds->d", seeds, prompts @ x.T) for x in (accepted, drafts)]
    return 1 + sums[0] / np.maximum(
        sums[1], 1
    )  # a draw can hold nothing but prompts that ended before the first draft


def _by_seed(c: Counts) -> np.ndarray:
    return 1 + c.accepted.sum((1, 2)) / c.drafts.sum(1)


def _wider(value, by_seed, drawn) -> tuple[float, float]:
    """The wider of the two intervals that the top of this file describes."""
    low, high = np.percentile(drawn, LEVEL)
    n = len(by_seed)
    half = student(n - 1) * np.std(by_seed, ddof=1) / n**0.5 if n > 1 else 0.0
    return (
        (float(value - half), float(value + half))
        if 2 * half > high - low
        else (float(low), float(high))
    )
