"""How sure an acceptance length is, and whether two variants differ.

What varies when an experiment is run again? The seed of the training, and the prompts. A variant's
acceptance length is pooled as vLLM counts it, 1 + accepted / drafts over all its seeds and prompts.
Two 95 % intervals are made of it, and the WIDER one is reported:

- A two-level bootstrap: seeds with replacement, then documents with replacement, each with all of
  its prompts, the same ones for all seeds (and, in a comparison, for both variants, because they
  answered the same prompts). A document is a module of the library: its texts, of several kinds,
  resemble each other. In rows that do not name modules each prompt is one. Alone
  it is far too narrow where seeds matter: three values drawn from three have 2/3 of the seeds'
  variance, and percentiles know nothing of how badly three values tell a variance.
- Student's t over the seeds' values (in a comparison: their paired differences), which knows that:
  4.3 standard errors on either side for 3 seeds (2 degrees of freedom), 12.7 for 2. Alone it is
  blind to the prompts. They are the same for all seeds, so prompts that happen to suit one variant
  move all its seeds together.

In simulated comparisons with 3 seeds and 72 prompts (tests/experiments/test_statistics.py has a
smaller version) the wider one covers the true difference in 94 to 96 % of the cases, whether seeds,
prompts or both matter. The bootstrap alone covers it in 80 % when seeds matter most, and t alone in
59 % when prompts do. Prompts are drawn from all kinds of text together, which is a little too wide
for a fixed mixture of kinds, and still right with one prompt of each kind. Everything is
deterministic: there is one generator with a fixed seed.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from experiments.texts import KINDS

DRAWS, PERCENTILES = 2000, (2.5, 97.5)
LEVEL = 0.05  # of p-values, above which a difference may be noise
# 97.5 % quantiles of Student's t for 1, 2, .. 10 degrees of freedom; for more, the series of
# Abramowitz and Stegun 26.7.5 is exact enough.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Row = Mapping  # one finished run, as experiments/rows.py gives it


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a variant's runs counted: R runs (one per seed), P prompts, K positions.

    Expected numbers, of measurements on text, are no integers.

    Attributes:
      seeds: of the runs.
      kinds: of the prompts, in their order.
      documents: which one each prompt is of: numbers from 0.
    """

    seeds: tuple[int, ...]
    kinds: tuple[str, ...]
    documents: tuple[int, ...]
    num_drafts: Float[np.ndarray, "R P"]
    num_accepted: Float[np.ndarray, "R P K"]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A pooled acceptance length with its 95 % interval; with one seed, over prompts only."""

    value: float
    low: float
    high: float
    by_seed: dict[int, float]

    @property
    def deviation(self) -> float | None:
        """Standard deviation between seeds, of a sample; None with one seed."""
        if len(self.by_seed) < 2:
            return None
        return float(np.std(list(self.by_seed.values()), ddof=1))

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest of the seeds' values."""
        return min(self.by_seed.values()), max(self.by_seed.values())


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The first variant's acceptance length minus the second's, with its 95 % interval.

    Attributes:
      verdict: "better" or "worse"; "within noise" where 0 lies in the interval, or where p_holm is
        above 0.05; "one seed only" where no claim is made.
      p: how often a difference as large would be found where there is none: the larger of Student's
        and the bootstrap's; None with one seed.
      p_holm: `p` after Holm's correction for the comparisons of an experiment; None where it is not
        one of several.
    """

    difference: float
    low: float
    high: float
    verdict: str
    by_seed: dict[int, float]
    p: float | None = None
    p_holm: float | None = None


def counts(
    rows: Sequence[Row],
    *,
    measurement: int = 0,
    kinds: Sequence[str] = KINDS,
    chances: bool = False,
) -> Counts:
    """The counts of one variant's runs, in the order of their seeds.

    Args:
      measurement: which of `row["measurements"]`.
      kinds: of prompts to read; all others are left out.
      chances: count one draft for each text, accepted with its `chance_per_pos`, and not the drafts
        of decoding's steps.

    Raises:
      ValueError: there is no run, two of one seed, other prompts in one run than in another,
        another K, or no draft at all.
    """
    if not rows:
        raise ValueError("a variant needs one finished run or more; got none; run it first")
    rows = sorted(rows, key=lambda row: row["seed"])
    seeds = tuple(row["seed"] for row in rows)
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"one variant's runs must have a seed each; got {list(seeds)}; leave out what a later "
            "run replaced"
        )
    runs = [row["measurements"][measurement] for row in rows]
    _check_measured_alike(runs)
    prompts = [[prompt for prompt in run["prompts"] if prompt["kind"] in kinds] for run in runs]
    key = "chance_per_pos" if chances else "num_accepted_per_pos"
    if not all(key in prompt for run in prompts for prompt in run):
        raise ValueError(f"{key} is of measurements on text; got others; run them again")
    num_drafts = np.array(
        [[1 if chances else prompt["num_drafts"] for prompt in run] for run in prompts], float
    )
    if (num_drafts.sum(1) == 0).any():
        raise ValueError(
            f"an acceptance length needs drafts; got none on {', '.join(kinds)} in one run or "
            "more; measure longer texts"
        )
    num_accepted = [[prompt[key] for prompt in run] for run in prompts]
    kinds_read = tuple(prompt["kind"] for prompt in prompts[0])
    documents = _documents(prompts[0])
    return Counts(seeds, kinds_read, documents, num_drafts, np.array(num_accepted, float))


def _documents(prompts: Sequence[Mapping]) -> tuple[int, ...]:
    """Which document each prompt is of, in the order in which documents come."""
    names = [prompt.get("module", number) for number, prompt in enumerate(prompts)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def _check_measured_alike(runs: Sequence[Mapping]) -> None:
    """Raises ValueError where one variant's measurements have different prompts or different K."""
    first = runs[0]
    for run in runs[1:]:
        _check_same_kinds(_kinds(first), _kinds(run))
        if _source(run) != _source(first):
            raise ValueError(
                "runs are compared on the same prompts; got two sets of them; run all with one "
                "cache"
            )
    ks = [run["k"] for run in runs]
    if len(set(ks)) > 1:
        raise ValueError(
            f"one variant's runs must be measured with one K; got {ks}; run the variant again"
        )


def _source(run: Mapping) -> str | None:
    """What the prompts of a measurement are: by their contents, or in older rows by their stage."""
    return run.get("prompts_digest") or run.get("prompts_stage")


def _kinds(run: Mapping) -> list[str]:
    return [prompt["kind"] for prompt in run["prompts"]]


def pooled(rows: Sequence[Row], *, measurement: int = 0, kinds: Sequence[str] = KINDS) -> float:
    """Acceptance length as vLLM counts it, over all runs and prompts: 1 + accepted / drafts."""
    total = counts(rows, measurement=measurement, kinds=kinds)
    return float(1 + total.num_accepted.sum() / total.num_drafts.sum())


def mean_over_prompts(rows: Sequence[Row]) -> float:
    """The mean of the prompts' own acceptance lengths, where the pooled one weighs their steps."""
    total = counts(rows)
    drafted = total.num_drafts > 0
    return float(1 + (total.num_accepted.sum(2)[drafted] / total.num_drafts[drafted]).mean())


def per_position(
    rows: Sequence[Row],
    *,
    measurement: int = 0,
    kinds: Sequence[str] = KINDS,
    chances: bool = False,
) -> list[float]:
    """Share of all drafts that was accepted at each position, 0..1; `chances` as of `counts`."""
    total = counts(rows, measurement=measurement, kinds=kinds, chances=chances)
    return (total.num_accepted.sum((0, 1)) / total.num_drafts.sum()).tolist()


def interval(
    rows: Sequence[Row], *, measurement: int = 0, kinds: Sequence[str] = KINDS, draws: int = DRAWS
) -> Interval:
    """A variant's pooled acceptance length with its 95 % interval (see the top of this file)."""
    total = counts(rows, measurement=measurement, kinds=kinds)
    seeds, prompts = _draws(len(total.seeds), total.documents, draws)
    value, by_seed = _pooled(total), _by_seed(total)
    low, high = _wider(value, by_seed, _pooled(total, seeds, prompts))
    return Interval(value.item(), low, high, dict(zip(total.seeds, by_seed.tolist(), strict=True)))


def compare(
    rows_a: Sequence[Row],
    rows_b: Sequence[Row],
    *,
    measurement: int = 0,
    kinds: Sequence[str] = KINDS,
    positions: slice = slice(None),
    chances: bool = False,
    draws: int = DRAWS,
) -> Comparison:
    """The pooled acceptance length of A minus that of B, on the seeds that both have.

    Prompts are paired by their place.

    Args:
      positions: of the draft, whose accepted tokens count. Of a single position, the difference is
        one of its share of accepted drafts.
      chances: as of `counts`.

    Raises:
      ValueError: there is no common seed, or A and B were not measured on the same prompts.
    """
    common = {row["seed"] for row in rows_a} & {row["seed"] for row in rows_b}
    if not common:
        seeds_a, seeds_b = (sorted(row["seed"] for row in rows) for rows in (rows_a, rows_b))
        raise ValueError(
            f"variants are compared on the seeds that both have; got {seeds_a} and {seeds_b}; run "
            "the missing seeds"
        )

    def counts_of(rows: Sequence[Row]) -> Counts:
        """Of the common seeds, at the positions that count."""
        with_common_seed = [row for row in rows if row["seed"] in common]
        total = counts(with_common_seed, measurement=measurement, kinds=kinds, chances=chances)
        return dataclasses.replace(total, num_accepted=total.num_accepted[:, :, positions])

    a, b = counts_of(rows_a), counts_of(rows_b)
    _check_same_kinds(a.kinds, b.kinds)
    both = (*rows_a, *rows_b)
    measured = [row["measurements"][measurement] for row in both]
    on_text = any(one.get("on_text") for one in measured)
    if on_text and len({one["temperature"] for one in measured}) > 1:
        raise ValueError("texts that the target writes at another temperature are other texts")
    if len({_source(one) for one in measured}) > 1:
        raise ValueError(
            "variants are compared on the same prompts; got two sets of them; run all with one "
            "cache"
        )
    drawn = _draws(len(a.seeds), a.documents, draws)
    difference, by_seed = _pooled(a) - _pooled(b), _by_seed(a) - _by_seed(b)
    drawn_differences = _pooled(a, *drawn) - _pooled(b, *drawn)
    low, high = _wider(difference, by_seed, drawn_differences)
    values = dict(zip(a.seeds, by_seed.tolist(), strict=True))
    verdict, p = _verdict(low, high, len(common)), _p_value(by_seed, drawn_differences)
    return Comparison(difference.item(), low, high, verdict, values, p)


def holm(ps: Sequence[float]) -> list[float]:
    """P-values after Holm's correction: of several comparisons, one is wrong with this chance.

    Holm, 1979, Scandinavian Journal of Statistics 6, 65.
    """
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted, largest = [0.0] * len(ps), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = largest
    return adjusted


def among_several(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons of one experiment, after Holm's correction for their number."""
    ps = [one.p for one in comparisons if one.p is not None]
    adjusted = iter(holm(ps))
    corrected = []
    for one in comparisons:
        if one.p is not None:
            p_holm = next(adjusted)
            verdict = one.verdict if p_holm <= LEVEL else "within noise"
            one = dataclasses.replace(one, p_holm=p_holm, verdict=verdict)
        corrected.append(one)
    return corrected


def detectable_difference(deviation: float, num_seeds: int, power: float = 0.8) -> float:
    """The true difference that Student's t test of the seeds would find with a chance of `power`.

    Args:
      deviation: standard deviation of the seeds' differences.
      num_seeds: 2 or more.
      power: of the two-sided test at LEVEL, before a correction for several comparisons.
    """
    freedom = num_seeds - 1
    bound = student(freedom)
    # the sample's variance over the true one, s: chi-squared over its degrees of freedom
    s = (np.arange(20_000) + 0.5) * (12 / 20_000)
    density = s ** (freedom / 2 - 1) * np.exp(-freedom * s / 2)
    density /= density.sum()
    limits = bound * np.sqrt(s)

    def found(shift: float) -> float:
        """The chance of t above the bound where the mean lies `shift` standard errors off.

        That of t below -bound, for such shifts, is nothing.
        """
        above = 0.5 * (1 - np.vectorize(math.erf)((limits - shift) / math.sqrt(2)))
        return float((density * above).sum())

    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < power else (low, middle)
    return high * deviation / num_seeds**0.5


def _p_value(by_seed: np.ndarray, drawn: np.ndarray) -> float | None:
    n = len(by_seed)
    if n < 2:
        return None
    error = np.std(by_seed, ddof=1) / n**0.5
    of_seeds = student_tails(float(np.abs(by_seed.mean()) / error), n - 1) if error else 0.0
    one_side = min((drawn <= 0).mean(), (drawn >= 0).mean())
    if not error and not by_seed.any():
        of_seeds = 1.0
    return float(max(of_seeds, min(1.0, max(2 * one_side, 1 / len(drawn)))))


def student_tails(t: float, freedom: int) -> float:
    """Chance that Student's t is further from 0 than t (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / freedom**0.5)
    sine, cosine = math.sin(angle), math.cos(angle)
    total, term = 0.0, cosine if freedom % 2 else 1.0
    for k in range(1 + freedom % 2, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    within = sine * total if freedom % 2 == 0 else 2 / math.pi * (angle + sine * total)
    return max(0.0, 1 - within)


def _verdict(low: float, high: float, num_seeds: int) -> str:
    if num_seeds == 1:
        return "one seed only"
    if low > 0:
        return "better"
    return "worse" if high < 0 else "within noise"


def student(freedom: int) -> float:
    """97.5 % quantile of Student's t distribution. SciPy is no dependency of this project."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z, n = 1.959964, freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def _check_same_kinds(a: Sequence[str], b: Sequence[str]) -> None:
    """Raises ValueError where the prompts of two runs are of different kinds of text."""
    rule = "runs are compared on the same prompts"
    if len(a) != len(b):
        raise ValueError(f"{rule}; got {len(a)} and {len(b)} of them; run both with one budget")
    for i, (kind_a, kind_b) in enumerate(zip(a, b, strict=True)):
        if kind_a != kind_b:
            got = f"got {kind_a} and {kind_b} as prompt {i}"
            raise ValueError(f"{rule}; {got}; run both on one set of prompts")


@functools.lru_cache(maxsize=32)
def _draws(
    seeds: int, documents: tuple[int, ...], draws: int
) -> tuple[Int[np.ndarray, "draws R"], Int[np.ndarray, "draws P"]]:
    """How often each draw takes each seed and each prompt.

    They are cached: all variants of an experiment then share their draws.
    """
    generator = np.random.default_rng(20260201)
    num_documents = max(documents) + 1
    drawn_seeds = generator.multinomial(seeds, np.full(seeds, 1 / seeds), draws)
    share = np.full(num_documents, 1 / num_documents)
    drawn_documents = generator.multinomial(num_documents, share, draws)
    return drawn_seeds, drawn_documents[:, documents]


def _pooled(
    total: Counts,
    seeds: Int[np.ndarray, "draws R"] | None = None,
    prompts: Int[np.ndarray, "draws P"] | None = None,
) -> np.ndarray:
    """Pooled acceptance length: a scalar of the data, or a value for each draw."""
    accepted, drafts = total.num_accepted.sum(2), total.num_drafts
    if seeds is None or prompts is None:
        return 1 + accepted.sum() / drafts.sum()
    sum_accepted, sum_drafts = (
        np.einsum("ds,ds->d", seeds, prompts @ values.T) for values in (accepted, drafts)
    )
    # a draw can consist of nothing but prompts that ended before the first draft
    return 1 + sum_accepted / np.maximum(sum_drafts, 1)


def _by_seed(total: Counts) -> Float[np.ndarray, " R"]:
    return 1 + total.num_accepted.sum((1, 2)) / total.num_drafts.sum(1)


def _wider(value: float, by_seed: np.ndarray, drawn: np.ndarray) -> tuple[float, float]:
    """The wider of the two intervals that the top of this file describes."""
    low, high = np.percentile(drawn, PERCENTILES)
    n = len(by_seed)
    half = student(n - 1) * np.std(by_seed, ddof=1) / n**0.5 if n > 1 else 0.0
    if 2 * half > high - low:
        return float(value - half), float(value + half)
    return float(low), float(high)
