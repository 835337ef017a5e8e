"""Writes the tables and pictures of experiments/README.md, between its markers: `python -m experiments.readme`, after new rows."""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.figures import draw
from experiments.findings import find, latest, read_rows
from experiments.report import main_table, markdown, other_measurements, overview
from experiments.stages import ROOT
from peagle_jax.atomic_write import write_atomically
from peagle_jax.types import InputError

WIDE = ("changes", "between seeds", "speedup", "lossless")  # columns that only the report has
README = ROOT / "experiments" / "README.md"


def fill(readme: Path, rows: Sequence[dict], experiments: dict) -> list[str]:
    """Everything between `<!-- NAME: ... -->` and `<!-- end -->` is written anew, and pictures/NAME.png beside it.

    Returns:
      Experiments with rows that the file has no marker for.
    """
    text = readme.read_text(encoding="utf-8")
    by_name: dict[str, list[dict]] = {}
    for row in rows:
        by_name.setdefault(row["experiment"], []).append(row)
    found = {
        name: find(name, latest(mine), experiments[name])
        for name, mine in by_name.items()
        if name in experiments
    }
    pictures = readme.parent / "pictures"
    pictures.mkdir(exist_ok=True)
    parts = {
        "overview": markdown(overview([found[name] for name in experiments if name in found], []))
    }
    with tempfile.TemporaryDirectory() as work:
        for name, one in found.items():
            parts[name] = "".join(f"> {note}\n\n" for note in one.notes) + markdown(
                narrow(main_table(one))
            )
            if len((others := other_measurements(one))[0]) > 1:
                parts[name] += f"\n\nAcceptance length, other measurements:\n\n{markdown(others)}"
            for made, caption in draw(one, Path(work))[
                :1
            ]:  # the second one, of training curves, is the report's
                shutil.copy(Path(work) / made, pictures / made)
                parts[name] = f"![{name}](pictures/{made})\n\n{caption}\n\n{parts[name]}"
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        text = pattern.sub(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text)
    write_atomically(readme, text)
    return [name for name in by_name if f"<!-- {name}: " not in text]


def narrow(table: list[list[str]]) -> list[list[str]]:
    """Without what only the report has room for; of the export its first word."""
    export = table[0].index("export")
    table = [
        table[0],
        *([*row[:export], row[export].split(":")[0], *row[export + 1 :]] for row in table[1:]),
    ]
    kept = [i for i, title in enumerate(table[0]) if title not in WIDE]
    return [[row[i] for i in kept] for row in table if row[1] != "did not run"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.readme", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "experiments")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--budget", default="small")
    args = parser.parse_args(argv)
    from experiments.registry import EXPERIMENTS

    rows, warnings = read_rows(args.results)
    for line in warnings:
        print(f"experiments.readme: warning: {line}", file=sys.stderr)
    rows = [row for row in rows if row["budget"] == args.budget]
    try:
        if not rows:
            rule = f"must hold rows of the budget {args.budget}"
            raise InputError(args.results, rule, "none", "run python -m experiments.run NAME first")
        if not args.readme.exists():
            raise InputError(
                args.readme, "this file must exist", "nothing", "name one with --readme"
            )
        left = fill(args.readme, rows, EXPERIMENTS)
    except InputError as error:
        print(f"experiments.readme: {error}", file=sys.stderr)
        return 2
    for name in left:
        print(f"{name} has rows, and no marker in {args.readme.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
