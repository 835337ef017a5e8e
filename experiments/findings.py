"""Result lines of experiments -> what they say: rows checked one by one, and a finding for every variant, with what to be careful about."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.base import Experiment, Variant
from experiments.statistics import Comparison, Interval, compare, counts, interval, per_position
from experiments.texts import KINDS, OPEN, STRUCTURED
from peagle_jax.types import InputError

GROUPS = {"structured": STRUCTURED, "code": ("code",), "open": OPEN}
NUMBER, TEXT = (int, float), (str, type(None))
NEEDED = {
    "experiment": str,
    "variant": str,
    "seed": int,
    "budget": str,
    "changes": list,
    "time": str,
    "commit": TEXT,
    "dirty": bool,
    "command": str,
    "device": str,
    "steps": int,
    "train_seconds": NUMBER,
    "train_tokens_per_second": NUMBER,
    "parameters": NUMBER,
    "curve": list,
    "measured": list,
    "speed": (dict, type(None)),
    "exact": (dict, type(None)),
    "export": TEXT,
}
NEEDED_STEP = {"step": int, "loss": NUMBER, "accuracy": list}
NEEDED_EXACT = {"same": int, "near_ties": int, "different": int}
NEEDED_MEASURED = {
    "k": int,
    "temperature": NUMBER,
    "prompt_tokens": int,
    "new_tokens": int,
    "prompts": list,
}
NEEDED_PROMPT = {"kind": str, "drafts": int, "accepted": list}
NAME = re.compile(r"\w[\w.-]*")  # it becomes a file's name and a place in the page


@dataclasses.dataclass(frozen=True)
class Finding:
    """One variant: its runs, and what they measured; `length` is None where nothing can be said, and a note tells why."""

    name: str
    rows: tuple[Mapping, ...]  # by seed
    x: float | None
    method: str
    length: Interval | None = None
    groups: Mapping[str, Interval] = dataclasses.field(
        default_factory=dict
    )  # by group of kinds of text
    positions: tuple[float, ...] = ()  # share of all drafts accepted at each, 0..1
    against: Comparison | None = None  # with the reference; None for the reference itself
    at: tuple[Comparison, ...] = ()  # the same by position, as far as both draft


@dataclasses.dataclass(frozen=True)
class Findings:
    """One experiment, variants in the order in which the registry lists them."""

    experiment: Experiment
    variants: tuple[Finding, ...]
    missing: tuple[str, ...]  # variants of the registry that did not run
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[Mapping]:
        return [row for finding in self.variants for row in finding.rows]


def read_rows(folder: Path) -> tuple[list[dict], list[str]]:
    """All usable rows of `folder`/*.jsonl in the order of their lines, and a warning for each line left out."""
    rows, warnings = [], []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise InputError(
                path, "results must be readable", error.strerror, "mend the file, or move it away"
            ) from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # also what is not UTF-8
                row, wrong = None, f"no JSON ({error})"
            else:
                wrong = _wrong(row, path.stem)
            if wrong:
                warnings.append(f"{path}:{number}: {wrong}; the line is left out")
            else:
                rows.append(row)
    return rows, warnings


def latest(rows: Sequence[Mapping]) -> list[Mapping]:
    """The rows that count: of one variant, seed and budget the last one."""
    last = {(row["experiment"], row["variant"], row["seed"], row["budget"]): row for row in rows}
    return list(last.values())


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
            "The registry does not know this experiment. All variants are compared with the first one."
        )
        experiment = _unknown(name, list(dict.fromkeys(row["variant"] for row in rows)))
    strange = [v for v in by_variant if v not in experiment.variants]
    if strange:
        notes.append(f"The registry does not know these variants: {', '.join(strange)}.")
    reference, variants = by_variant.get(experiment.reference, ()), []
    for variant in [*experiment.variants, *strange]:
        if variant in by_variant:
            finding, said = _finding(variant, by_variant[variant], experiment, reference)
            variants.append(finding)
            notes += said
    if not reference:
        notes.append(f"The reference {experiment.reference} did not run: nothing is compared.")
    missing = tuple(v for v in experiment.variants if v not in by_variant)
    return Findings(experiment, tuple(variants), missing, (*notes, *_cautions(rows)))


def _finding(
    name: str, rows: Sequence[Mapping], experiment: Experiment, reference: Sequence[Mapping]
) -> tuple[Finding, list[str]]:
    known = experiment.variants.get(name)
    finding = Finding(
        name, tuple(rows), known.x if known else None, known.method if known else "peagle"
    )
    notes = (
        []
        if len({str(row["changes"]) for row in rows}) == 1
        else [f"The runs of {name} differ in more than their seed."]
    )
    try:
        total = counts(rows)
    except ValueError as error:
        return finding, [*notes, f"{name} cannot be counted: {error}."]
    groups = {}
    for group, kinds in GROUPS.items():
        here = [i for i, kind in enumerate(total.kinds) if kind in kinds]
        if here and (total.drafts[:, here].sum(1) > 0).all():
            groups[group] = interval(rows, kinds=kinds)
    finding = dataclasses.replace(
        finding, length=interval(rows), groups=groups, positions=tuple(per_position(rows))
    )
    if name != experiment.reference and reference:
        try:
            common = min(len(finding.positions), len(per_position(reference)))
            at = tuple(compare(rows, reference, positions=slice(i, i + 1)) for i in range(common))
            finding = dataclasses.replace(finding, against=compare(rows, reference), at=at)
        except ValueError as error:
            notes.append(f"{name} cannot be compared with {experiment.reference}: {error}.")
    return finding, notes


def _cautions(rows: Sequence[Mapping]) -> list[str]:
    """What a reader of the numbers must know about where they come from."""
    notes = []
    commits = list(dict.fromkeys(str(row["commit"]) for row in rows))
    if len(commits) > 1:
        notes.append(f"The runs come from {len(commits)} commits: {', '.join(commits)}.")
    if dirty := sum(row["dirty"] for row in rows):
        notes.append(
            f"{dirty} of {len(rows)} runs were made in a working tree with changes that their commit does not hold."
        )
    if len({row["device"] for row in rows}) > 1:
        notes.append("The runs come from several machines: their speeds cannot be compared.")
    targets = {row["stages"].get("target") for row in rows if isinstance(row.get("stages"), dict)}
    if len(targets) > 1:
        notes.append(
            f"The runs were measured on {len(targets)} different targets: acceptance lengths differ by that, too."
        )
    return notes


def _unknown(name: str, variants: Sequence[str]) -> Experiment:
    """Stands in for an experiment that the registry no longer has, or does not have yet."""
    stand_in = {v: Variant(run=lambda run: run, measured=()) for v in variants}
    return Experiment(
        name=name,
        question="",
        expects="",
        axis="variant",
        kind="bars",
        reference=variants[0],
        variants=stand_in,
        paper="",
    )


def _wrong(row, stem: str) -> str | None:
    """Why a line cannot be used, if so."""
    if not isinstance(row, dict):
        return f"a run is a JSON object, this is {type(row).__name__}"
    if wrong := _lacks(row, NEEDED, ""):
        return wrong
    if row["experiment"] != stem:
        return f"it tells of the experiment {row['experiment'][:80]!r}, whose file has another name"
    if not NAME.fullmatch(row["experiment"]):
        return (
            f"an experiment is named by letters, digits and _, this one {row['experiment'][:80]!r}"
        )
    if not row["measured"]:
        return "it has no measurement"
    parts = [(row["exact"], NEEDED_EXACT, "exact"), (row["speed"], {"speedup": NUMBER}, "speed")]
    parts += [(step, NEEDED_STEP, f"curve[{i}]") for i, step in enumerate(row["curve"])]
    for part, needed, where in parts:
        if part is not None and (wrong := _lacks(part, needed, where)):
            return wrong
    for i, one in enumerate(row["measured"]):
        if wrong := _wrong_measured(one, f"measured[{i}]"):
            return wrong
    return None


def _wrong_measured(one, where: str) -> str | None:
    if wrong := _lacks(one, NEEDED_MEASURED, where):
        return wrong
    for j, prompt in enumerate(one["prompts"]):
        place = f"{where}.prompts[{j}]"
        if wrong := _lacks(prompt, NEEDED_PROMPT, place):
            return wrong
        if prompt["kind"] not in KINDS:
            return f"{place}.kind must be one of {', '.join(KINDS)}, it is {prompt['kind'][:80]!r}"
        accepted = prompt["accepted"]
        if len(accepted) != one["k"] or not all(
            isinstance(a, int) and 0 <= a <= prompt["drafts"] for a in accepted
        ):
            return f"{place}.accepted must be {one['k']} counts of at most {prompt['drafts']} each"
    return None if any(prompt["drafts"] for prompt in one["prompts"]) else f"{where} has no drafts"


def _lacks(given, needed: Mapping, where: str) -> str | None:
    if not isinstance(given, dict):
        return f"{where} must be an object"
    dot = f"{where}." if where else ""
    missing = [f"{dot}{key}" for key in needed if key not in given]
    if missing:
        return f"it lacks {', '.join(missing)}"
    wrong = [
        key
        for key, kind in needed.items()
        if not isinstance(given[key], kind) or (isinstance(given[key], bool) and kind is not bool)
    ]
    return f"{dot}{wrong[0]} has the wrong type: {str(given[wrong[0]])[:80]!r}" if wrong else None
