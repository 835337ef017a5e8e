"""All experiments on one page: figures, verdicts, tables, and where every number comes from.

    python -m experiments.report [--results results/experiments] [--out runs/experiments/report] [--budget small]

Writes report.html (needs no other file), a PNG of every figure, and tables.md (the same tables, for experiments/README.md).
"""

import argparse
import base64
import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.base import Experiment
from experiments.figures import draw
from experiments.findings import GROUPS, Finding, Findings, find, latest, read_rows
from experiments.published import NUMBERS, SHARE
from experiments.stages import ROOT
from experiments.statistics import Interval, interval
from peagle_jax.atomic_write import write_atomically
from peagle_jax.report.page import STYLE
from peagle_jax.types import InputError

WORDS = ("better", "worse", "within noise", "one seed only")
MORE_STYLE = """
body { max-width: 92rem } td { max-width: 22rem } td, td:first-child { white-space: normal }
table.words td, table.words th { text-align: left } .warning { background: #fff4e0; padding: .4rem .8rem; border-radius: 6px }
td.better { color: #2b8a3e; font-weight: 600 } td.worse { color: #c92a2a; font-weight: 600 }
"""
CAREFUL = (
    "A verdict is about acceptance length alone: `better` or `worse` where the 95 % interval of the paired difference to the reference "
    "leaves out 0. The interval is the wider one of a bootstrap over seeds and prompts and of Student's t over the seeds (see "
    "experiments/statistics.py). Of 20 variants that change nothing, one is expected to be called better or worse by chance. "
    "With one seed no claim is made, and its intervals are over prompts alone."
)
AT = "Accepted at each position against the reference, percentage points of all drafts (95 %)"
Table = list[list[str]]  # the first row is the head


def build(
    rows: Sequence[Mapping],
    experiments: Mapping[str, Experiment],
    out: Path,
    *,
    warnings: Sequence[str] = (),
) -> Path:
    """Writes the page, the pictures and tables.md to `out`.

    Args:
      rows: as `read_rows` gives them, all of one budget; of the same variant and seed the last one counts.
      experiments: the registry; rows that it does not know are shown with a note.
      warnings: what was left out while reading.

    Returns:
      The path of the page.
    """
    budgets = sorted({row["budget"] for row in rows})
    if len(budgets) != 1:
        raise ValueError(
            f"a report is about one budget; got {budgets or 'no rows'}; choose the rows of one"
        )
    by_name: dict[str, list[Mapping]] = {name: [] for name in experiments}
    for row in latest(rows):
        by_name.setdefault(row["experiment"], []).append(row)
    all_found = [find(name, rows, experiments.get(name)) for name, rows in by_name.items() if rows]
    waiting = [experiments[name] for name, rows in by_name.items() if not rows]
    title, table, numbers = (
        f"Experiments, budget {budgets[0]}",
        overview(all_found, waiting),
        _published(),
    )
    page = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{html.escape(title)}</title><style>{STYLE}{MORE_STYLE}</style><h1>{html.escape(title)}</h1>",
        *(f"<p class=warning>{html.escape(warning)}</p>" for warning in warnings),
        _html(table, "words"),
        f"<p class=note>{html.escape(CAREFUL)}</p>",
    ]
    text = [
        f"# {_plain(title)}",
        *(f"> {_plain(warning)}" for warning in warnings),
        markdown(table),
        CAREFUL,
    ]
    for found in all_found:
        on_page, in_text = _section(found, draw(found, out), out)
        page += on_page
        text += in_text
    page += ["<h2>Published numbers</h2>", _html(numbers, "words")]
    text += ["## Published numbers", markdown(numbers)]
    write_atomically(out / "tables.md", "\n\n".join(text) + "\n")
    write_atomically(out / "report.html", "\n".join(page) + "\n")
    return out / "report.html"


def _section(
    found: Findings, pictures: Sequence[tuple[str, str]], out: Path
) -> tuple[list[str], list[str]]:
    """One experiment, as HTML and as Markdown."""
    experiment, facts = found.experiment, _facts(found)
    others = other_measurements(found)
    tables = [("", main_table(found)), (AT, by_position(found))]
    tables += [("Acceptance length, other measurements", others), ("Training", _training(found))]
    tables = [(title, table) for title, table in tables if len(table[0]) > 1 and len(table) > 1]
    e, name = html.escape, experiment.name
    page = [
        f'<h2 id="{e(name)}">{e(name)}</h2>',
        *([f"<p class=big>{e(experiment.question)}</p>"] if experiment.question else []),
    ]
    page += [_figure(out, *picture) for picture in pictures]
    page += [f"<p class=warning>{e(note)}</p>" for note in found.notes]
    page += [(f"<h3>{e(title)}</h3>" if title else "") + _html(table) for title, table in tables]
    page += [
        "<dl>",
        *(
            f"<dt>{e(key)}</dt>" + "".join(f"<dd>{e(v)}</dd>" for v in values)
            for key, values in facts.items()
        ),
        "</dl>",
    ]
    text = [
        f"## {_plain(name)}",
        *([_plain(experiment.question)] if experiment.question else []),
        *(f"> {_plain(n)}" for n in found.notes),
    ]
    text += [(f"**{title}**\n\n" if title else "") + markdown(table) for title, table in tables]
    text.append(
        "\n".join(
            f"- {key}: {'; '.join(_plain(v) for v in values)}" for key, values in facts.items()
        )
    )
    return page, text


def overview(all_found: Sequence[Findings], waiting: Sequence[Experiment]) -> Table:
    table = [["experiment", "question", "variants run", "seeds", "reference", *WORDS]]
    for found in all_found:
        x = found.experiment
        reference = next(
            (
                f"{v.name}: {v.length.value:.2f}"
                for v in found.variants
                if v.name == x.reference and v.length
            ),
            x.reference,
        )
        compared = [v for v in found.variants if v.against]
        said = {
            word: [
                f"{v.name} ({v.against.difference:+.2f})"
                for v in compared
                if v.against.word == word
            ]
            for word in WORDS
        }
        ran, seeds = len(found.variants), sorted({len(v.rows) for v in found.variants})
        seeds = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        table.append(
            [
                x.name,
                x.question,
                f"{ran} of {ran + len(found.missing)}",
                seeds,
                reference,
                *(", ".join(said[w]) for w in WORDS),
            ]
        )
    return table + [
        [x.name, x.question, f"0 of {len(x.variants)}", "", x.reference, *([""] * len(WORDS))]
        for x in waiting
    ]


def main_table(found: Findings) -> Table:
    head = [
        found.experiment.axis,
        "changes",
        "seeds",
        "acceptance length (95 %)",
        "between seeds",
        f"against {found.experiment.reference}",
        "verdict",
        "per position, %",
        *GROUPS,
        "speedup",
        "lossless",
        "export",
    ]
    return [
        head,
        *(_cells(v, found) for v in found.variants),
        *([v, "did not run", *([""] * (len(head) - 2))] for v in found.missing),
    ]


def _cells(v: Finding, found: Findings) -> list[str]:
    changes = list(dict.fromkeys(change for row in v.rows for change in row["changes"]))
    spread = ""
    if v.length and v.length.deviation is not None:
        low, high = v.length.range
        spread = f"sd {v.length.deviation:.3f}, {low:.2f} to {high:.2f}"
    difference = (
        f"{v.against.difference:+.2f} ({v.against.low:+.2f} to {v.against.high:+.2f})"
        if v.against
        else ""
    )
    word = (
        v.against.word
        if v.against
        else "reference"
        if v.name == found.experiment.reference
        else "not compared"
    )
    speeds = [row["speed"]["speedup"] for row in v.rows if row["speed"]]
    exports = list(dict.fromkeys(str(row["export"]) for row in v.rows if row["export"]))
    return [
        v.name,
        "; ".join(str(c) for c in changes),
        " ".join(str(row["seed"]) for row in v.rows),
        _length(v.length),
        spread,
        difference,
        word,
        " ".join(f"{100 * p:.0f}" for p in v.positions),
        *(f"{v.groups[g].value:.2f}" if g in v.groups else "" for g in GROUPS),
        f"{np.median(speeds):.2f}x" if speeds else "",
        _lossless(v.rows),
        "; ".join(exports),
    ]


def by_position(found: Findings) -> Table:
    """Differences to the reference at each position; only where there are several seeds."""
    compared = [v for v in found.variants if v.at and v.against.word in WORDS[:3]]

    def cell(c):
        return f"{100 * c.difference:+.1f} ({100 * c.low:+.1f} to {100 * c.high:+.1f}){'' if c.word == WORDS[2] else ' ' + c.word}"

    width = max((len(v.at) for v in compared), default=0)
    head = [found.experiment.axis, *(str(i + 1) for i in range(width))]
    return [head, *([v.name, *map(cell, v.at), *([""] * (width - len(v.at)))] for v in compared)]


def _length(i: Interval | None) -> str:
    return f"{i.value:.2f} ({i.low:.2f} to {i.high:.2f})" if i else "cannot be said"


def _lossless(rows: Sequence[Mapping]) -> str:
    checked = [row["exact"] for row in rows if row["exact"] and any(row["exact"].values())]
    if not checked:
        return ""
    wrong, ties, same = (
        sum(one[key] for one in checked) for key in ("different", "near_ties", "same")
    )
    return (f"NO: {wrong} of {same + ties + wrong} differ" if wrong else "yes") + (
        f" ({ties} near ties)" if ties else ""
    )


def other_measurements(found: Findings) -> Table:
    """Everything that was measured beside the first measurement: a column for each way."""
    columns: dict[
        tuple, dict[str, str]
    ] = {}  # by (K, temperature, .., title), which is their order
    for v in found.variants:
        for number in range(1, min(len(row["measured"]) for row in v.rows)) if v.length else ():
            one = v.rows[0]["measured"][number]
            how = "greedy" if one["temperature"] == 0 else f"temperature {one['temperature']:g}"
            how += ", sampled drafts" if one.get("sample_drafts") else ""
            title = (
                f"K = {one['k']}, {how}, {one['new_tokens']} after {one['prompt_tokens']} tokens"
            )
            place = (one["k"], one["temperature"], one["new_tokens"], one["prompt_tokens"], title)
            try:
                columns.setdefault(place, {})[v.name] = _length(
                    interval(v.rows, measurement=number)
                )
            except ValueError as error:  # runs of one variant that were not measured alike
                columns.setdefault(place, {})[v.name] = str(error)
    places = sorted(columns)
    head = [found.experiment.axis, *(place[-1] for place in places)]
    return [
        head,
        *([v.name, *(columns[place].get(v.name, "") for place in places)] for v in found.variants),
    ]


def _training(found: Findings) -> Table:
    table = [
        [found.experiment.axis, "parameters", "steps", "seconds", "tokens/s", "10^12 operations"]
    ]
    for v in found.variants:

        def middle(key, rows=v.rows):
            return np.median([row[key] for row in rows])

        flops = [
            row["train_flops"] for row in v.rows if isinstance(row.get("train_flops"), int | float)
        ]
        table.append(
            [
                v.name,
                f"{middle('parameters'):,.0f}",
                f"{middle('steps'):,.0f}",
                f"{middle('train_seconds'):.0f}",
                f"{middle('train_tokens_per_second'):,.0f}",
                f"{np.median(flops) / 1e12:.3g}" if flops else "",
            ]
        )
    return table


def _facts(found: Findings) -> dict[str, list[str]]:
    """What stands under an experiment's tables."""
    rows, x = found.rows, found.experiment

    def every(key):
        return list(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None))

    commits = dict.fromkeys(
        f"{row['commit']}{' (with changes)' if row['dirty'] else ''}" for row in rows
    )
    versions = [
        f"{key} {', '.join(every(key))}"
        for key in ("python", "peagle_jax", "jax", "flax")
        if every(key)
    ]
    times = sorted(every("time"))
    facts = {
        "Expected": [x.expects],
        "The paper and its peers": [x.paper],
        "Command": every("command"),
        "Commit": [", ".join(commits)],
        "Machine": every("device"),
        "Versions": [", ".join(versions)],
        "Ran": [" to ".join(dict.fromkeys((times[0], times[-1])))],
        "Rows": [f"results/experiments/{x.name}.jsonl"],
    }
    return {key: [v for v in values if v] for key, values in facts.items() if any(values)}


def _published() -> Table:
    table = [["what", "number", "unit", "source", "what differs from ours"]]
    for n in NUMBERS:
        values = " ".join(f"{v:g}" if n.unit == SHARE else f"{v:.2f}" for v in n.values)
        at = (
            f" (at {', '.join(str(a) for a in n.at)})"
            if n.at and n.at != tuple(range(1, len(n.at) + 1))
            else ""
        )
        table.append([n.what, values + at, n.unit, n.source, n.differs])
    return table


def _html(table: Table, kind: str = "") -> str:
    e = html.escape
    head = "".join(f"<th>{e(cell)}</th>" for cell in table[0])

    def cell(text):
        return f'<td class="{text}">{text}</td>' if text in WORDS[:2] else f"<td>{e(text)}</td>"

    body = "".join("<tr>" + "".join(cell(text) for text in row) + "</tr>" for row in table[1:])
    return f'<div class=scroll><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def markdown(table: Table) -> str:
    lines = [
        "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in row) + " |" for row in table
    ]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in table[0]) + " |", *lines[1:]])


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return " ".join("".join(f"\\{c}" if c in "\\`*<[]" else c for c in text).split())


def _figure(out: Path, name: str, caption: str) -> str:
    data, text = base64.b64encode((out / name).read_bytes()).decode(), html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "experiments")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "experiments" / "report")
    parser.add_argument(
        "--budget", default="small", help="whose rows are shown: budgets cannot be compared"
    )
    args = parser.parse_args(argv)
    try:
        print(_report(args.results, args.out, args.budget))
    except InputError as error:
        print(f"experiments.report: {error}", file=sys.stderr)
        return 2
    return 0


def _report(results: Path, out: Path, budget: str) -> Path:
    from experiments.registry import (
        EXPERIMENTS,
    )  # here, so that `build` can be used with other experiments

    rows, warnings = read_rows(results)
    for warning in warnings:
        print(f"experiments.report: warning: {warning}", file=sys.stderr)
    if not rows:
        got = f"{len(warnings)} lines that cannot be used" if warnings else "none"
        raise InputError(
            results,
            "must hold rows of experiments in *.jsonl files",
            got,
            "run python -m experiments.run NAME first",
        )
    chosen = [row for row in rows if row["budget"] == budget]
    if not chosen:
        others = ", ".join(sorted({row["budget"] for row in rows}))
        raise InputError(
            results,
            f"must hold rows of the budget {budget}",
            f"rows of {others}",
            "choose one of these with --budget",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        return build(chosen, EXPERIMENTS, out, warnings=warnings)
    except OSError as error:
        raise InputError(
            out,
            "the output folder must be writable",
            error.strerror,
            "choose another place with --out",
        ) from None


if __name__ == "__main__":
    sys.exit(main())
