"""What commands print on stdout: lines, tables, and facts with their names."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

PIPE_WIDTH = 200  # columns of a table in a pipe or a file, where no terminal limits them


def make_console() -> Console:
    """A console for stdout; in a pipe it is as wide as a table of results needs."""
    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if limited else PIPE_WIDTH)


def say(line: object) -> None:
    """Prints one line of plain text at once, also into a pipe."""
    print(line, flush=True)


def print_marked(content: RenderableType) -> None:
    """Prints a table, or a line with rich's markup such as [bold].

    It goes through `print`, as all other lines, so that a progress bar stays below it.
    """
    console = make_console()
    with console.capture() as capture:
        console.print(content, highlight=False)
    print(capture.get(), end="", flush=True)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Prints names and values as a table of two columns."""
    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(escape(name.replace("_", " ")), escape(fact_text(value)))
    print_marked(table)


def fact_text(value: Any) -> str:
    """A value for people: fractions with four digits, large whole numbers in groups of three."""
    if isinstance(value, list | tuple):
        return ", ".join(fact_text(item) for item in value)
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool) and value > 99_999:
        return f"{value:,}"
    return str(value)
