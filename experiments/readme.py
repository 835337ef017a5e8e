"""Writes the tables and pictures of experiments/README.md: `python -m experiments.readme`.

Everything between `<!-- NAME: ... -->` and `<!-- end -->` is written anew from the rows.
"""

import argparse
import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import folders, one_page
from experiments.base import Experiment
from experiments.figures import draw
from experiments.findings import Findings, find
from experiments.rows import latest, read_rows
from experiments.tables import (
    CHANCES,
    Table,
    chances,
    conditional,
    main_table,
    markdown,
    other_measurements,
    overview,
    power_note,
)
from peagle_jax.atomic_write import write_atomically
from peagle_jax.json_files import read_text
from peagle_jax.types import InputError

REPORT_COLUMNS = ("changes", "between seeds", "speedup", "lossless")  # the report's alone
README = folders.ROOT / "experiments" / "README.md"
COLUMNS = 100  # of a line of text


def fill(readme: Path, rows: Sequence[Mapping], experiments: Mapping[str, Experiment]) -> list[str]:
    """Writes what stands between the markers anew, and pictures/NAME.png beside the file.

    Args:
      readme: the file, which exists.
      rows: of one budget.
      experiments: the registry.

    Returns:
      Names of experiments that have rows, but no marker in the file.

    Raises:
      InputError: the file cannot be read, or a marker in it has no end.
    """
    text = read_text(readme)
    by_name: dict[str, list[Mapping]] = {}
    for row in rows:
        by_name.setdefault(row["experiment"], []).append(row)
    all_findings = {
        name: find(name, latest(by_name[name]), experiment)
        for name, experiment in experiments.items()
        if name in by_name
    }
    parts = {"overview": markdown(overview(list(all_findings.values()), []))}
    if f"<!-- {one_page.MARKER}: " in text:
        try:
            parts[one_page.MARKER] = markdown(one_page.heads_table(latest(rows)))
        except ValueError as error:
            rule = "its heads must be of one target, and as sure as the page says"
            next_step = "run what is missing, or change HEADS and the page"
            raise InputError("experiments/one_page.py", rule, error, next_step) from None
    for name in (*parts, *all_findings):
        _check_end(readme, text, name)
    pictures = readme.parent / "pictures"
    pictures.mkdir(exist_ok=True)
    for name, findings in all_findings.items():
        parts[name] = _section(findings, pictures)
    for name, part in parts.items():
        marked = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        text = marked.sub(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text)
    write_atomically(readme, text)
    return [name for name in by_name if f"<!-- {name}: " not in text]


def _check_end(readme: Path, text: str, name: str) -> None:
    """Raises InputError where a marker has no end of its own: what follows would be replaced."""
    begin = re.search(rf"<!-- {name}: [^\n]*-->\n", text)
    following = re.search(r"<!-- [^\n]*-->", text[begin.end() :]) if begin else None
    if begin and (following is None or following.group() != "<!-- end -->"):
        rule = f"the marker <!-- {name}: ... --> must be followed by <!-- end -->"
        got = following.group() if following else "none"
        raise InputError(readme, rule, got, "write the end where the tables end")


def _section(findings: Findings, pictures: Path) -> str:
    """What stands between an experiment's markers; its picture goes to `pictures`."""
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        # the second picture, of training curves, is in the report only
        for name, caption in draw(findings, Path(folder))[:1]:
            write_atomically(pictures / name, (Path(folder) / name).read_bytes())
            parts.append(f"![{findings.experiment.name}](pictures/{name})")
            parts.append(textwrap.fill(caption, COLUMNS, break_long_words=False))
    if power := power_note(findings):
        parts.append(textwrap.fill(power, COLUMNS, break_long_words=False))
    parts += [f"> {note}" for note in findings.notes]
    parts.append(markdown(narrow(main_table(findings))))
    positions = conditional(findings)
    if len(positions[0]) > 2:
        parts += ["Accepted where all drafts before were, by position, in percent:"]
        parts.append(markdown(positions))
    everywhere = chances(findings, intervals=False)
    if len(everywhere[0]) > 2:
        equal = ', and "=" where the 95 % interval of that difference alone has 0'
        has_equal = any("(=, " in cell for line in everywhere for cell in line)
        title = CHANCES + equal * has_equal
        parts += [textwrap.fill(f"{title}:", COLUMNS), markdown(everywhere)]
    others = other_measurements(findings)
    if len(others[0]) > 1:
        parts += ["Acceptance length, other measurements:", markdown(others)]
    return "\n\n".join(parts)


def narrow(table: Table) -> Table:
    """The main table without what only the report has room for; of the export, its first word."""
    head, *rows = table
    shown = [i for i, title in enumerate(head) if title not in REPORT_COLUMNS]
    export = head.index("export")
    narrowed = [[head[i] for i in shown]]
    for row in rows:
        if row[1] != "did not run":
            cells = [*row[:export], row[export].split(":")[0], *row[export + 1 :]]
            narrowed.append([cells[i] for i in shown])
    return narrowed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.readme", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--results",
        type=Path,
        help=f"folder of rows (default: {folders.RESULTS}; for smoke, where its rows go)",
    )
    parser.add_argument(
        "--readme",
        type=Path,
        default=README,
        help="the file to fill; pictures/ beside it is written, too "
        "(default: experiments/README.md)",
    )
    parser.add_argument("--budget", default="small", help="whose rows are taken (default: small)")
    args = parser.parse_args(argv)
    from experiments.registry import EXPERIMENTS  # here: `fill` works with other experiments too

    try:
        if args.budget == "smoke" and args.readme.resolve() == README:
            rule = "smoke rows must not stand in the README that git tracks"
            raise InputError("--budget", rule, "smoke", "name another file with --readme")
        results = args.results or folders.ROOT / folders.default_results(args.budget)
        rows, warnings = read_rows(results)
        for warning in warnings:
            print(f"experiments.readme: warning: {warning}", file=sys.stderr)
        rows = [row for row in rows if row["budget"] == args.budget]
        if not rows:
            rule = f"must hold rows of the budget {args.budget}"
            raise InputError(results, rule, "none", "run python -m experiments.run NAME first")
        without_marker = fill(args.readme, rows, EXPERIMENTS)
    except InputError as error:
        print(f"experiments.readme: {error}", file=sys.stderr)
        return 2
    for name in without_marker:
        print(f"{name} has rows, and no marker in {args.readme.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
