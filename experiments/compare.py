"""Compares variants of one experiment with each other: `python -m experiments.compare NAME A B`.

The tables of reports compare with the experiment's reference. Here A is compared with B, or, where
none are named, every variant with every other one; p-values are then after Holm's correction for
all pairs.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments import folders
from experiments.rows import latest, read_rows
from experiments.statistics import Comparison, among_several, compare
from peagle_jax.types import InputError


def comparisons(
    rows: Sequence[Mapping], pairs: Sequence[tuple[str, str]]
) -> list[tuple[str, str, Comparison]]:
    """Acceptance lengths of pairs of variants, with p-values after Holm's correction.

    Args:
      rows: of one experiment and budget.
      pairs: names of variants.

    Raises:
      InputError: a variant has no rows, or two cannot be compared.
    """
    names = list(dict.fromkeys(row["variant"] for row in rows))
    of = {name: [row for row in rows if row["variant"] == name] for name in names}
    found = []
    for a, b in pairs:
        for name in (a, b):
            if name not in of:
                rule = f"variants with rows are {', '.join(names)}"
                raise InputError("variant", rule, name, "name one of these")
        try:
            found.append((a, b, compare(of[a], of[b])))
        except ValueError as error:
            rule, next_step = "must be measured alike", "name two that are, or run both anew"
            raise InputError(f"{a}, {b}", rule, error, next_step) from None
    corrected = among_several([comparison for _, _, comparison in found])
    return [(a, b, c) for (a, b, _), c in zip(found, corrected, strict=True)]


def table_of(found: Sequence[tuple[str, str, Comparison]]) -> Table:
    """A line for each pair."""
    table = Table("", "minus", "difference (95 %)", "verdict", "p (Holm)", "by seed")
    for a, b, c in found:
        difference = f"{c.difference:+.3f} ({c.low:+.3f} to {c.high:+.3f})"
        p = "" if c.p_holm is None else f"{c.p_holm:.3f}"
        seeds = " ".join(f"{value:+.3f}" for _, value in sorted(c.by_seed.items()))
        table.add_row(a, b, difference, c.verdict, p, seeds)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare", description=__doc__.splitlines()[0]
    )
    parser.add_argument("experiment", metavar="NAME")
    parser.add_argument("variants", metavar="A B", nargs="*", help="two variants; without, all")
    parser.add_argument("--budget", default="sampled", help="whose rows are taken (sampled)")
    parser.add_argument("--results", type=Path, help=f"folder of rows ({folders.RESULTS})")
    args = parser.parse_intermixed_args(argv)  # variants may follow options
    results = args.results or folders.ROOT / folders.default_results(args.budget)
    try:
        rows, warnings = read_rows(results)
        for warning in warnings:
            print(f"experiments.compare: warning: {warning}", file=sys.stderr)
        rows = [row for row in latest(rows) if row["experiment"] == args.experiment]
        rows = [row for row in rows if row["budget"] == args.budget]
        if not rows:
            rule = f"must hold rows of {args.experiment} with the budget {args.budget}"
            raise InputError(results, rule, "none", "run python -m experiments.run NAME first")
        if len(args.variants) not in (0, 2):
            rule, got = "two variants are compared, or all", ", ".join(args.variants)
            raise InputError("A B", rule, got, "give two names, with quotation marks around each")
        names = list(dict.fromkeys(row["variant"] for row in rows))
        pairs = [tuple(args.variants)] if args.variants else itertools.combinations(names, 2)
        found = comparisons(rows, [(a, b) for a, b in pairs])
    except InputError as error:
        print(f"experiments.compare: {error}", file=sys.stderr)
        return 2
    Console(width=120).print(table_of(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
