"""Draws ours beside what others published, and writes the table of docs/published.md.

    python scripts/generate/published_picture.py

Published tables are results/published/*.json. Ours are the newest small demo of every machine
(results/demo.jsonl).
"""

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from readme_table import newest_demos, short_name

from peagle_jax.atomic_write import write_atomically
from peagle_jax.report.published_picture import draw, panels
from peagle_jax.report.published_tables import PublishedTable, read_tables

ROOT = Path(__file__).parents[2]
PICTURE, PAGE = ROOT / "docs/pictures/published.png", ROOT / "docs/published.md"
BEGIN = "<!-- published: written by scripts/generate/published_picture.py -->"
END = "<!-- end -->"
WIDTH = 100  # columns of lists; a table's row is one line


def our_rows() -> dict[str, list[dict]]:
    """By machine, the greedy rows of its newest small demo."""
    lines = (ROOT / "results/demo.jsonl").read_text().splitlines()
    return {short_name(device): rows for device, rows in newest_demos(lines).items()}


def markdown(tables: dict[str, PublishedTable]) -> str:
    """What each table is, where it stands, and what differs."""
    lines = ["| table | source | target, engine | texts | differs from ours |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, table in tables.items():
        facts = table.facts
        what = f"[{facts['title']}](../results/published/{name}.json)"
        models = f"{facts['target']}, {facts['engine']}"
        lines.append(
            f"| {what} | {facts['source']} | {models} | {facts['texts']} | {facts['differs']} |"
        )
    notes = [
        bullet(f"{facts['title']}; {key.removesuffix('_note')}: {facts[key]}.")
        for facts in (table.facts for table in tables.values())
        for key in facts
        if key.endswith("_note") and key != "context_note"
    ]
    return "\n".join([*lines, "", "What the sources leave open:", "", *notes])


def bullet(text: str) -> str:
    """An item of a list, in lines of 100 columns."""
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", **whole)


def main() -> None:
    tables = read_tables(ROOT / "results/published")
    draw(PICTURE, panels(tables, our_rows()))
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END, 1)[1]
    write_atomically(PAGE, f"{before}{BEGIN}\n{markdown(tables)}\n{END}{after}")
    print(f"{PICTURE.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
