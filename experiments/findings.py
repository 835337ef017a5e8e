"""What an experiment's rows say: a finding for every variant, and what to be careful about."""

import dataclasses
from collections.abc import Mapping, Sequence

from experiments.base import Experiment, Variant
from experiments.statistics import (
    Comparison,
    Interval,
    among_several,
    compare,
    counts,
    interval,
    mean_over_prompts,
    per_position,
)
from experiments.texts import OPEN, STRUCTURED

# keys of a row -> what several values of them are
ORIGINS = {
    "base": "base runs",
    "training_code": "versions of the code that trains",
    "measuring_code": "versions of the code that measures",
    "jax": "versions of JAX",
    "flax": "versions of Flax",
}
PACKAGES = ("jax", "flax")
GROUPS = {"structured": STRUCTURED, "code": ("code",), "open": OPEN}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One variant: its runs, and what they measured.

    Attributes:
      name: of the variant.
      rows: its runs, by seed.
      x: place on the axis of a curve.
      method: "peagle", "eagle3" or "eagle".
      length: acceptance length; None where nothing can be said, and a note tells why.
      mean_over_prompts: the mean of the prompts' own acceptance lengths; None as `length`.
      groups: acceptance length by group of kinds of text.
      positions: share of all drafts that was accepted at each position, 0..1.
      against: comparison with the reference; None for the reference itself.
      against_by_position: the same for each position; empty where the two draft other numbers of
        tokens.
      chances: of each draft behind accepted ones, the chance to be accepted, at all places of the
        texts alike; empty where drafts were decoded, or in older rows.
      chances_against: these compared with the reference's.
    """

    name: str
    rows: tuple[Mapping, ...]
    x: float | None
    method: str
    length: Interval | None = None
    mean_over_prompts: float | None = None
    groups: Mapping[str, Interval] = dataclasses.field(default_factory=dict)
    positions: tuple[float, ...] = ()
    against: Comparison | None = None
    against_by_position: tuple[Comparison, ...] = ()
    chances: tuple[float, ...] = ()
    chances_against: tuple[Comparison, ...] = ()


@dataclasses.dataclass(frozen=True)
class Findings:
    """One experiment.

    Attributes:
      experiment: as the registry has it.
      variants: in the order in which the registry lists them.
      missing: names of variants that did not run.
      notes: what a reader must know.
    """

    experiment: Experiment
    variants: tuple[Finding, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[Mapping]:
        return [row for finding in self.variants for row in finding.rows]


def find(name: str, rows: Sequence[Mapping], experiment: Experiment | None) -> Findings:
    """What the rows of one experiment and budget say.

    Args:
      rows: all of one experiment, as `latest` gives them.
      experiment: None where the registry does not know it; the first variant is then the reference.
    """
    by_variant: dict[str, list] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        by_variant.setdefault(row["variant"], []).append(row)
    notes = []
    if experiment is None:
        notes.append(
            "The registry does not know this experiment. All variants are compared with the first "
            "one."
        )
        experiment = _stand_in(name, list(dict.fromkeys(row["variant"] for row in rows)))
    unknown = [variant for variant in by_variant if variant not in experiment.variants]
    if unknown:
        notes.append(f"The registry does not know these variants: {', '.join(unknown)}.")
    reference = by_variant.get(experiment.reference, ())
    findings = []
    for variant in [*experiment.variants, *unknown]:
        if variant in by_variant:
            finding, more_notes = _finding(variant, by_variant[variant], experiment, reference)
            findings.append(finding)
            notes += more_notes
    if not reference:
        notes.append(f"The reference {experiment.reference} did not run: nothing is compared.")
    corrected = iter(among_several([f.against for f in findings if f.against]))
    findings = [
        dataclasses.replace(f, against=next(corrected)) if f.against else f for f in findings
    ]
    missing = tuple(variant for variant in experiment.variants if variant not in by_variant)
    return Findings(experiment, tuple(findings), missing, (*notes, *_cautions(rows)))


def _finding(
    name: str, rows: Sequence[Mapping], experiment: Experiment, reference: Sequence[Mapping]
) -> tuple[Finding, list[str]]:
    """What one variant's rows say, and notes.

    Args:
      reference: rows of the variant that it is compared with; none if that did not run.
    """
    known = experiment.variants.get(name)
    x, method = (known.x, known.method) if known else (None, "peagle")
    finding = Finding(name, tuple(rows), x, method)
    notes = []
    if len({str((row["changes"], _settings(row))) for row in rows}) > 1:
        notes.append(f"The runs of {name} differ in more than their seed.")
    try:
        total = counts(rows)
    except ValueError as error:
        return finding, [*notes, f"{name} cannot be counted: {error}."]
    groups = {}
    for group, kinds in GROUPS.items():
        prompts = [i for i, kind in enumerate(total.kinds) if kind in kinds]
        if prompts and (total.num_drafts[:, prompts].sum(1) > 0).all():
            groups[group] = interval(rows, kinds=kinds)
    finding = dataclasses.replace(
        finding,
        length=interval(rows),
        mean_over_prompts=mean_over_prompts(rows),
        groups=groups,
        positions=tuple(per_position(rows)),
    )
    has_chances = _has_chances(rows)
    if has_chances:
        chances = tuple(per_position(rows, chances=True))
        finding = dataclasses.replace(finding, chances=chances)
    if name == experiment.reference or not reference:
        return finding, notes
    try:
        # with another K shares by position are of other drafts, and do not compare heads
        is_same_k = len(finding.positions) == len(per_position(reference))
        finding = dataclasses.replace(
            finding,
            against=compare(rows, reference),
            against_by_position=tuple(
                compare(rows, reference, positions=slice(i, i + 1))
                for i in range(len(finding.positions) if is_same_k else 0)
            ),
            chances_against=tuple(
                compare(rows, reference, positions=slice(i, i + 1), chances=True)
                for i in range(len(finding.chances))
                if is_same_k and _has_chances(reference)
            ),
        )
    except ValueError as error:
        notes.append(f"{name} cannot be compared with {experiment.reference}: {error}.")
    return finding, notes


def _has_chances(rows: Sequence[Mapping]) -> bool:
    prompts = (prompt for row in rows for prompt in row["measurements"][0]["prompts"])
    return all("chance_per_pos" in prompt for prompt in prompts)


def _settings(row: Mapping) -> dict | None:
    """The configuration of a row's training without its seed; None in rows that have none."""
    config = row.get("config")
    return {**config, "seed": None} if isinstance(config, dict) else None


def _cautions(rows: Sequence[Mapping]) -> list[str]:
    """What a reader of the numbers must know about where they come from."""
    notes = []
    commits = list(dict.fromkeys(str(row["commit"]) for row in rows))
    if len(commits) > 1:
        notes.append(f"The runs come from {len(commits)} commits: {', '.join(commits)}.")
    if dirty := sum(row["dirty"] for row in rows):
        notes.append(
            f"{dirty} of {len(rows)} runs were made in a working tree with changes that their "
            "commit does not hold."
        )
    if len(devices := {row["device"] for row in rows}) > 1:
        names = "; ".join(sorted(devices))
        notes.append(f"The runs come from several devices ({names}): do not compare speeds.")
    for key, what in ORIGINS.items():
        values = dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None)
        if len(values) > 1:
            shown = f": {', '.join(values)}" if key in PACKAGES else ""
            notes.append(f"The runs come from several {what}{shown}: differences may be of that.")
    # by its contents, or in older rows by its stage
    targets = {
        row.get("target_digest") or row["stages"].get("target")
        for row in rows
        if isinstance(row.get("stages"), dict)
    }
    prompts = [prompt for row in rows for prompt in row["measurements"][0]["prompts"]]
    if unnamed := sum("module" not in prompt for prompt in prompts):
        notes.append(
            f"{unnamed:,} of {len(prompts):,} prompts do not say which module they are of, and are "
            "resampled as if each were of its own: intervals may be too narrow."
        )
    if len(targets) > 1:
        notes.append(
            f"The runs were measured on {len(targets)} different targets: acceptance lengths "
            "differ by that, too."
        )
    return notes


def _stand_in(name: str, variants: Sequence[str]) -> Experiment:
    """In place of an experiment that the registry no longer has, or does not have yet."""
    without_measurements = {variant: Variant(measurements=()) for variant in variants}
    return Experiment(
        name=name,
        question="",
        expects="",
        axis="variant",
        kind="bars",
        reference=variants[0],
        variants=without_measurements,
        paper="",
    )
