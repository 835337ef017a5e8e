"""All experiments on one page: figures, verdicts, tables, and where every number comes from.

    python -m experiments.report [--results results/experiments] [--out runs/experiments/report]
                                 [--budget small]

Writes report.html (it needs no other file), a PNG of every figure, and tables.md (the same tables).
"""

import argparse
import base64
import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import folders
from experiments.base import Experiment
from experiments.figures import draw
from experiments.findings import Findings, find
from experiments.rows import latest, read_rows
from experiments.tables import (
    CHANCES,
    VERDICTS,
    Table,
    by_position,
    chances,
    conditional,
    main_table,
    markdown,
    markdown_text,
    other_measurements,
    overview,
    power_note,
    published_table,
    training_table,
)
from peagle_jax.atomic_write import write_atomically
from peagle_jax.report.page import STYLE
from peagle_jax.types import InputError

MORE_STYLE = """
body { max-width: 92rem } td { max-width: 22rem } td, td:first-child { white-space: normal }
table.words td, table.words th { text-align: left }
.warning { background: #fff4e0; padding: .4rem .8rem; border-radius: 6px }
td.better { color: #2b8a3e; font-weight: 600 } td.worse { color: #c92a2a; font-weight: 600 }
"""
HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8>"
    "<meta name=viewport content='width=device-width'>"
)
ABOUT_VERDICTS = (
    "A verdict is about acceptance length alone: `better` or `worse` where the 95 % interval of "
    "the paired difference to the reference leaves out 0, and p is at most 0.05 after Holm's "
    "correction for the comparisons of the experiment. The interval is the wider one of a "
    "bootstrap over seeds and prompts and of Student's t over the seeds (see "
    "experiments/statistics.py). Of 20 experiments in which nothing matters, one is expected to "
    "call something better or worse by chance. With one seed no claim is made, and its intervals "
    "are over prompts alone."
)
BY_POSITION = (
    "Accepted at each position against the reference, percentage points of all drafts (95 %)"
)
CONDITIONAL = "Accepted where all drafts before were, by position, %"


def build(
    rows: Sequence[Mapping],
    experiments: Mapping[str, Experiment],
    out: Path,
    *,
    results: Path = folders.RESULTS,
    warnings: Sequence[str] = (),
) -> Path:
    """Writes the page, the pictures and tables.md to `out`.

    Args:
      rows: as `read_rows` gives them, all of one budget; of the same variant and seed the last one
        counts.
      experiments: the registry; rows that it does not know are shown with a note.
      out: a folder that exists.
      results: the folder of the rows, as the page is to name it.
      warnings: what was left out while reading.

    Returns:
      The path of the page.

    Raises:
      ValueError: there is no row, or rows are of several budgets.
    """
    budgets = sorted({row["budget"] for row in rows})
    if len(budgets) != 1:
        got = budgets or "no rows"
        raise ValueError(f"a report is about one budget; got {got}; choose the rows of one")
    by_name: dict[str, list[Mapping]] = {name: [] for name in experiments}
    for row in latest(rows):
        by_name.setdefault(row["experiment"], []).append(row)
    all_findings = [
        find(name, rows, experiments.get(name)) for name, rows in by_name.items() if rows
    ]
    without_rows = [experiments[name] for name, rows in by_name.items() if not rows]

    title = f"Experiments, budget {budgets[0]}"
    table, published = overview(all_findings, without_rows), published_table()
    escaped = html.escape(title)
    page = [
        HEAD,
        f"<title>{escaped}</title><style>{STYLE}{MORE_STYLE}</style><h1>{escaped}</h1>",
        *(f"<p class=warning>{html.escape(warning)}</p>" for warning in warnings),
        _html_table(table, "words"),
        f"<p class=note>{html.escape(ABOUT_VERDICTS)}</p>",
    ]
    text = [
        f"# {markdown_text(title)}",
        *(f"> {markdown_text(warning)}" for warning in warnings),
        markdown(table),
        ABOUT_VERDICTS,
    ]
    for findings in all_findings:
        pictures = draw(findings, out)
        page += _html_section(findings, pictures, out, results)
        text += _markdown_section(findings, results)
    page += ["<h2>Published numbers</h2>", _html_table(published, "words")]
    text += ["## Published numbers", markdown(published)]
    write_atomically(out / "tables.md", "\n\n".join(text) + "\n")
    write_atomically(out / "report.html", "\n".join(page) + "\n")
    return out / "report.html"


def _section_tables(findings: Findings) -> list[tuple[str, Table]]:
    """Title and table of everything that an experiment has rows for."""
    tables = [
        ("", main_table(findings)),
        (BY_POSITION, by_position(findings)),
        (CONDITIONAL, conditional(findings)),
        (CHANCES, chances(findings)),
        ("Acceptance length, other measurements", other_measurements(findings)),
        ("Training", training_table(findings)),
    ]
    return [(title, table) for title, table in tables if len(table) > 1 and len(table[0]) > 1]


def _html_section(
    findings: Findings, pictures: Sequence[tuple[str, str]], out: Path, results: Path
) -> list[str]:
    escape, experiment = html.escape, findings.experiment
    name = escape(experiment.name)
    section = [f'<h2 id="{name}">{name}</h2>']
    if experiment.question:
        section.append(f"<p class=big>{escape(experiment.question)}</p>")
    section += [_html_figure(out, *picture) for picture in pictures]
    section += [f"<p class=warning>{escape(note)}</p>" for note in findings.notes]
    for title, table in _section_tables(findings):
        heading = f"<h3>{escape(title)}</h3>" if title else ""
        section.append(heading + _html_table(table))
    section.append("<dl>")
    for key, values in _facts(findings, results).items():
        definitions = "".join(f"<dd>{escape(value)}</dd>" for value in values)
        section.append(f"<dt>{escape(key)}</dt>{definitions}")
    return [*section, "</dl>"]


def _markdown_section(findings: Findings, results: Path) -> list[str]:
    experiment = findings.experiment
    section = [f"## {markdown_text(experiment.name)}"]
    if experiment.question:
        section.append(markdown_text(experiment.question))
    section += [f"> {markdown_text(note)}" for note in findings.notes]
    for title, table in _section_tables(findings):
        heading = f"**{title}**\n\n" if title else ""
        section.append(heading + markdown(table))
    facts = [
        f"- {key}: {'; '.join(markdown_text(value) for value in values)}"
        for key, values in _facts(findings, results).items()
    ]
    return [*section, "\n".join(facts)]


def _facts(findings: Findings, results: Path) -> dict[str, list[str]]:
    """What stands under an experiment's tables; `results` is the folder of its rows."""
    rows, experiment = findings.rows, findings.experiment

    def values(key: str) -> list[str]:
        return list(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None))

    commits = dict.fromkeys(
        f"{row['commit']} (with changes)" if row["dirty"] else str(row["commit"]) for row in rows
    )
    versions = [
        f"{package} {', '.join(values(package))}"
        for package in ("python", "peagle_jax", "jax", "flax")
        if values(package)
    ]
    times = sorted(values("time"))
    facts = {
        "Expected": [experiment.expects],
        "The paper and its peers": [experiment.paper],
        "Power": [power_note(findings).removeprefix("Power: ")],
        "Command": values("command"),
        "Commit": [", ".join(commits)],
        "Machine": values("device"),
        "Versions": [", ".join(versions)],
        "Ran": [" to ".join(dict.fromkeys((times[0], times[-1])))],
        "Rows": [str(results / f"{experiment.name}.jsonl")],
    }
    return {key: [v for v in facts[key] if v] for key in facts if any(facts[key])}


def _html_table(table: Table, css_class: str = "") -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table[0])
    body = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in table[1:])
    return f'<div class=scroll><table class="{css_class}"><tr>{head}</tr>{body}</table></div>'


def _html_cell(text: str) -> str:
    """Verdicts that claim something have a color."""
    if text in VERDICTS[:2]:
        return f'<td class="{text}">{text}</td>'
    return f"<td>{html.escape(text)}</td>"


def _html_figure(out: Path, name: str, caption: str) -> str:
    data = base64.b64encode((out / name).read_bytes()).decode()
    text = html.escape(caption)
    image = f'<img alt="{text}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report", description=__doc__.splitlines()[0]
    )
    results_help = f"folder of rows ({folders.RESULTS}; smoke: {folders.SMOKE_RESULTS})"
    parser.add_argument("--results", type=Path, help=results_help)
    parser.add_argument("--out", type=Path, help="folder to write (report, beside the caches)")
    parser.add_argument(
        "--budget", default="small", help="whose rows are shown: budgets cannot be compared"
    )
    args = parser.parse_args(argv)
    results = args.results or folders.ROOT / folders.default_results(args.budget)
    out = args.out or folders.ROOT / folders.default_cache(args.budget) / "report"
    try:
        print(_report(results, out, args.budget))
    except InputError as error:
        print(f"experiments.report: {error}", file=sys.stderr)
        return 2
    return 0


def _shown(results: Path) -> Path:
    """The folder of rows as a page names it: within the checkout without the way there."""
    absolute = results.resolve()
    if absolute.is_relative_to(folders.ROOT):
        return absolute.relative_to(folders.ROOT)
    return results


def _report(results: Path, out: Path, budget: str) -> Path:
    """Reads the rows of one budget and writes their report to `out`; returns the page."""
    from experiments.registry import EXPERIMENTS  # here: `build` works with other experiments too

    rows, warnings = read_rows(results)
    for warning in warnings:
        print(f"experiments.report: warning: {warning}", file=sys.stderr)
    if not rows:
        got = f"{len(warnings)} lines that cannot be used" if warnings else "none"
        rule = "must hold rows of experiments in *.jsonl files"
        raise InputError(results, rule, got, "run python -m experiments.run NAME first")
    chosen = [row for row in rows if row["budget"] == budget]
    if not chosen:
        budgets = ", ".join(sorted({row["budget"] for row in rows}))
        rule = f"must hold rows of the budget {budget}"
        next_step = "choose one of these with --budget"
        raise InputError(results, rule, f"rows of {budgets}", next_step)
    try:
        out.mkdir(parents=True, exist_ok=True)
        return build(chosen, EXPERIMENTS, out, results=_shown(results), warnings=warnings)
    except OSError as error:
        rule = "the output folder must be writable"
        raise InputError(out, rule, error.strerror, "name another folder with --out") from None


if __name__ == "__main__":
    sys.exit(main())
