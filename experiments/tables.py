"""The tables of a report: what was found, what else was measured, how it was trained."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.base import Experiment
from experiments.findings import GROUPS, Finding, Findings
from experiments.published import NUMBERS, SHARE
from experiments.statistics import Comparison, Interval, detectable_difference, interval

VERDICTS = ("better", "worse", "within noise", "one seed only")
Table = list[list[str]]  # the first row is the head
CHANCES = (
    "Chance of a draft behind accepted ones, as the mean over all places of the texts, in percent; "
    "in brackets the difference to the reference in points"
)


def overview(all_findings: Sequence[Findings], without_rows: Sequence[Experiment]) -> Table:
    """One line per experiment: how much ran, and which variants got which verdict."""
    table = [["experiment", "question", "variants run", "seeds", "reference", *VERDICTS]]
    for findings in all_findings:
        experiment = findings.experiment
        num_run = len(findings.variants)
        table.append(
            [
                experiment.name,
                experiment.question,
                f"{num_run} of {num_run + len(findings.missing)}",
                _num_seeds(findings),
                _reference(findings),
                *(_with_verdict(findings, verdict) for verdict in VERDICTS),
            ]
        )
    for experiment in without_rows:
        num_run = f"0 of {len(experiment.variants)}"
        empty = [""] * len(VERDICTS)
        table.append(
            [experiment.name, experiment.question, num_run, "", experiment.reference, *empty]
        )
    return table


def _num_seeds(findings: Findings) -> str:
    """ "3", or "2 to 3" where variants differ."""
    numbers = sorted({len(variant.rows) for variant in findings.variants})
    return " to ".join(str(number) for number in dict.fromkeys((numbers[0], numbers[-1])))


def _reference(findings: Findings) -> str:
    """The reference, with its acceptance length if it ran."""
    name = findings.experiment.reference
    for variant in findings.variants:
        if variant.name == name and variant.length:
            return f"{name}: {variant.length.value:.2f}"
    return name


def _with_verdict(findings: Findings, verdict: str) -> str:
    compared = [variant for variant in findings.variants if variant.against]
    return ", ".join(
        f"{variant.name} ({variant.against.difference:+.2f})"
        for variant in compared
        if variant.against.verdict == verdict
    )


def main_table(findings: Findings) -> Table:
    """One line per variant: the first measurement, compared with the reference."""
    head = [
        findings.experiment.axis,
        "changes",
        "seeds",
        "acceptance length (95 %)",
        "mean over texts",
        "between seeds",
        f"against {findings.experiment.reference}",
        "verdict",
        "p (Holm)",
        "per position, %",
        *GROUPS,
        "speedup",
        "lossless",
        "export",
    ]
    did_not_run = [""] * (len(head) - 2)
    return [
        head,
        *(_variant_cells(variant, findings) for variant in findings.variants),
        *([name, "did not run", *did_not_run] for name in findings.missing),
    ]


def power_note(findings: Findings) -> str:
    """How large a difference had to be to be found: the power of an experiment's comparisons.

    Empty where no comparison has several seeds.
    """
    compared = [v.against for v in findings.variants if v.against and len(v.against.by_seed) > 1]
    if not compared:
        return ""
    seeds = min(len(comparison.by_seed) for comparison in compared)
    variances = [np.var(list(comparison.by_seed.values()), ddof=1) for comparison in compared]
    deviation = float(np.sqrt(np.mean(variances)))
    least = detectable_difference(deviation, seeds)
    return (
        f"Power: the seeds' differences to {findings.experiment.reference} have a standard "
        f"deviation of {deviation:.3f}, pooled over the variants. With {seeds} seeds a true "
        f"difference of {least:.2f} is then found in 80 % of such experiments (Student's t, before "
        "Holm's correction)."
    )


def _p(p: float | None) -> str:
    if p is None:
        return ""
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _variant_cells(variant: Finding, findings: Findings) -> list[str]:
    rows = variant.rows
    changes = dict.fromkeys(str(change) for row in rows for change in row["changes"])
    speedups = [row["speed"]["speedup"] for row in rows if row["speed"]]
    exports = dict.fromkeys(str(row["export"]) for row in rows if row["export"])
    groups = [variant.groups.get(group) for group in GROUPS]
    return [
        variant.name,
        "; ".join(changes),
        " ".join(str(row["seed"]) for row in rows),
        _length(variant.length),
        "" if variant.mean_over_prompts is None else f"{variant.mean_over_prompts:.2f}",
        _between_seeds(variant.length),
        _difference(variant.against) if variant.against else "",
        _verdict(variant, findings),
        _p(variant.against.p_holm if variant.against else None),
        " ".join(f"{100 * share:.0f}" for share in variant.positions),
        *(f"{group.value:.2f}" if group else "" for group in groups),
        f"{np.median(speedups):.2f}x" if speedups else "",
        _lossless(rows),
        "; ".join(exports),
    ]


def _between_seeds(length: Interval | None) -> str:
    if length is None or length.deviation is None:
        return ""
    low, high = length.range
    return f"sd {length.deviation:.3f}, {low:.2f} to {high:.2f}"


def _difference(comparison: Comparison) -> str:
    return f"{comparison.difference:+.2f} ({comparison.low:+.2f} to {comparison.high:+.2f})"


def _verdict(variant: Finding, findings: Findings) -> str:
    if variant.against:
        return variant.against.verdict
    return "reference" if variant.name == findings.experiment.reference else "not compared"


def by_position(findings: Findings) -> Table:
    """Differences to the reference at each position; only where there are several seeds."""
    compared = [
        variant
        for variant in findings.variants
        if variant.against_by_position and variant.against.verdict in VERDICTS[:3]
    ]
    width = max((len(variant.against_by_position) for variant in compared), default=0)
    table = [[findings.experiment.axis, *(str(position + 1) for position in range(width))]]
    for variant in compared:
        cells = [_share_difference(comparison) for comparison in variant.against_by_position]
        table.append([variant.name, *cells, *([""] * (width - len(cells)))])
    return table


def conditional(findings: Findings) -> Table:
    """Of the drafts behind accepted ones, the share that was accepted, in percent, by position."""
    width = max((len(variant.positions) for variant in findings.variants), default=0)
    table = [[findings.experiment.axis, *(str(position + 1) for position in range(width))]]
    for variant in findings.variants:
        before = (1.0, *variant.positions)
        cells = [
            f"{100 * share / reached:.0f}" if reached else ""
            for share, reached in zip(variant.positions, before, strict=False)
        ]
        table.append([variant.name, *cells, *([""] * (width - len(cells)))])
    return table


def chances(findings: Findings, *, intervals: bool = True) -> Table:
    """Chances of drafts behind accepted ones, at all places of the texts, by position.

    Each with the difference to the reference in percentage points, and its 95 % interval if
    `intervals`; without one, a difference within noise has an equals sign.
    """
    width = max((len(variant.chances) for variant in findings.variants), default=0)
    table = [[findings.experiment.axis, *(str(position + 1) for position in range(width))]]
    for variant in findings.variants:
        if not variant.chances:
            continue
        cells = [f"{100 * chance:.0f}" for chance in variant.chances]
        for i, comparison in enumerate(variant.chances_against):
            if comparison.verdict == VERDICTS[-1]:
                continue
            if intervals:
                cells[i] += f": {_share_difference(comparison)}"
            else:
                sign = "=, " if comparison.verdict == "within noise" else ""
                cells[i] += f" ({sign}{100 * comparison.difference:+.0f})"
        table.append([variant.name, *cells, *([""] * (width - len(cells)))])
    return table


def _share_difference(comparison: Comparison) -> str:
    """In percentage points, and a verdict that is not "within noise"."""
    low, high = (f"{100 * bound:+.1f}" for bound in (comparison.low, comparison.high))
    cell = f"{100 * comparison.difference:+.1f} ({low} to {high})"
    return cell if comparison.verdict == "within noise" else f"{cell} {comparison.verdict}"


def _length(length: Interval | None) -> str:
    if length is None:
        return "cannot be said"
    return f"{length.value:.2f} ({length.low:.2f} to {length.high:.2f})"


def _lossless(rows: Sequence[Mapping]) -> str:
    """Whether every greedy text was plain decoding's; empty where none was checked."""
    checked = [row["exact"] for row in rows if row["exact"] and any(row["exact"].values())]
    if not checked:
        return ""
    different, ties, same = (
        sum(counts[key] for counts in checked) for key in ("different", "near_ties", "same")
    )
    verdict = f"NO: {different} of {same + ties + different} differ" if different else "yes"
    return f"{verdict} ({ties} near ties)" if ties else verdict


def other_measurements(findings: Findings) -> Table:
    """Everything that was measured beside the first measurement: a column for each way."""
    # by (K, temperature, new tokens, prompt tokens, title), which is the columns' order
    columns: dict[tuple, dict[str, str]] = {}
    for variant in findings.variants:
        if not variant.length:
            continue
        for number in range(1, min(len(row["measurements"]) for row in variant.rows)):
            try:
                cell = _length(interval(variant.rows, measurement=number))
            except ValueError as error:  # runs of one variant that were not measured alike
                cell = str(error)
            place = _column(variant.rows[0]["measurements"][number])
            columns.setdefault(place, {})[variant.name] = cell
    places = sorted(columns)
    table = [[findings.experiment.axis, *(place[-1] for place in places)]]
    for variant in findings.variants:
        cells = (columns[place].get(variant.name, "") for place in places)
        table.append([variant.name, *cells])
    return table


def _column(measurement: Mapping) -> tuple:
    """Place and title of a measurement's column."""
    k, temperature = measurement["k"], measurement["temperature"]
    new_tokens, prompt_tokens = measurement["max_new_tokens"], measurement["prompt_tokens"]
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    if temperature and measurement.get("sample_drafts"):
        sampling += ", sampled drafts"
    if measurement.get("on_text"):
        sampling += ", expected"
    title = f"K = {k}, {sampling}, {new_tokens} after {prompt_tokens} tokens"
    return k, temperature, new_tokens, prompt_tokens, title


def training_table(findings: Findings) -> Table:
    """How the heads were trained; medians over the seeds."""
    table = [
        [
            findings.experiment.axis,
            "parameters",
            "steps",
            "seconds",
            "tokens/s",
            "10^12 operations",
        ]
    ]
    for variant in findings.variants:
        rows = variant.rows
        flops = [
            row["train_flops"] for row in rows if isinstance(row.get("train_flops"), int | float)
        ]
        table.append(
            [
                variant.name,
                f"{_median(rows, 'num_parameters'):,.0f}",
                f"{_median(rows, 'steps'):,.0f}",
                f"{_median(rows, 'train_seconds'):.0f}",
                f"{_median(rows, 'train_tokens_per_second'):,.0f}",
                f"{np.median(flops) / 1e12:.3g}" if flops else "",
            ]
        )
    return table


def _median(rows: Sequence[Mapping], key: str) -> float:
    return float(np.median([row[key] for row in rows]))


def published_table() -> Table:
    """Published numbers, and why each is not the same measurement as ours."""
    table = [["what", "number", "unit", "source", "what differs from ours"]]
    for number in NUMBERS:
        is_share = number.unit == SHARE
        values = " ".join(f"{v:g}" if is_share else f"{v:.2f}" for v in number.values)
        if number.at and number.at != tuple(range(1, len(number.at) + 1)):
            values += f" (at {', '.join(str(place) for place in number.at)})"
        table.append([number.what, values, number.unit, number.source, number.differs])
    return table


def markdown(table: Table) -> str:
    """A table in Markdown."""

    def line(row: Sequence[str]) -> str:
        cells = (markdown_text(cell).replace("|", "\\|") for cell in row)
        return f"| {' | '.join(cells)} |"

    rule = f"| {' | '.join('---' for _ in table[0])} |"
    return "\n".join([line(table[0]), rule, *map(line, table[1:])])


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    escaped = "".join(f"\\{c}" if c in "\\`*<[]" else c for c in text)
    return " ".join(escaped.split())
