"""Writes the tables of README.md, and a picture, from the rows in results/.

    python scripts/generate/readme_table.py [--check]

The first table is the newest comparison with vLLM and transformers (results/peers.jsonl), which is
also drawn to docs/pictures/peers.png; below it stand the ratios on other devices, and those of
comparisons in which both engines hand out the tokens of every step. The second is the small demo
(results/demo.jsonl): of every device the newest `make demo` counts, with its greedy rows. Each
stands between two markers.
`--check` writes nothing and exits with 1 if a table is not what the rows say.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from peagle_jax.old_names import RESULT_ROW_KEYS, with_new_names
from peagle_jax.report import peers

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- demo table: written by scripts/generate/readme_table.py -->"
END = "<!-- end of demo table -->"
PEERS_BEGIN = "<!-- peers table: written by scripts/generate/readme_table.py -->"
PEERS_END = "<!-- end of peers table -->"
DEMO = "demo/small"
METHODS = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
DRAFTERS = ("eagle3", "peagle")


def newest_demos(lines: Iterable[str]) -> dict[str, list[dict]]:
    """Device -> the greedy rows of its newest small demo, devices in the order of their first demo.

    The rows of one demo share their time and commit.
    """
    rows = [
        with_new_names(json.loads(line), RESULT_ROW_KEYS, "results/demo.jsonl")
        for line in lines
        if line.strip()
    ]
    by_device: dict[str, list[dict]] = {}
    for row in rows:
        if row["name"] == DEMO:
            by_device.setdefault(row["device"], []).append(row)
    return {device: _greedy(_last_demo(rows)) for device, rows in by_device.items()}


def _last_demo(rows: list[dict]) -> list[dict]:
    last = rows[-1]
    return [r for r in rows if (r["time"], r["commit"]) == (last["time"], last["commit"])]


def _greedy(rows: list[dict]) -> list[dict]:
    return [row for row in rows if not row.get("temperature")]


def short_name(device: str) -> str:
    """`Intel(R) Xeon(R) Processor, 2 cores` -> `Intel`."""
    return device.split()[0].removesuffix(",").replace("(R)", "")


def table(demos: dict[str, list[dict]]) -> list[str]:
    """The lines of the Markdown table: for each device and method a row, for each K a column.

    A cell has the speedup at batch 1 and, in brackets, the acceptance length; the last ones have
    the best speedup at a larger batch size.
    """
    every = [row for rows in demos.values() for row in rows]
    ks = sorted({row["k"] for row in every if row["k"]})
    batches = sorted({row["batch_size"] for row in every})[1:]
    header = ["speedup (length)", *(f"K = {k}" for k in ks)]
    header += [f"batch {b}, best K" for b in batches]
    lines = [_row(header), _row(["---"] * len(header))]
    for device, rows in demos.items():
        by_case = {(row["method"], row["k"], row["batch_size"]): row for row in rows}
        for method in (m for m in DRAFTERS if any(row["method"] == m for row in rows)):
            cells = [f"{short_name(device)}: {METHODS[method]}"]
            cells += [_numbers(by_case.get((method, k, 1))) for k in ks]
            lines.append(_row(cells + [_best(rows, method, batch) for batch in batches]))
    return lines


def _numbers(row: dict | None) -> str:
    """Speedup and acceptance length; empty where the device has no such row."""
    return f"{row['speedup']:.2f} ({row['acceptance_length']:.2f})" if row else ""


def _best(rows: list[dict], method: str, batch: int) -> str:
    """The best speedup at a batch size."""
    speedups = [r["speedup"] for r in rows if (r["method"], r["batch_size"]) == (method, batch)]
    return f"{max(speedups):.2f}" if speedups else ""


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def origins(demos: dict[str, list[dict]]) -> list[str]:
    """For each device: its dtype, its speed in plain decoding, and where its rows come from."""
    lines = []
    for device, rows in demos.items():
        plain = next(row for row in rows if (row["method"], row["batch_size"]) == ("none", 1))
        origin = f"commit {rows[0]['commit']}, {rows[0]['time'][:10]}"
        speed = f"plain {plain['tokens_per_second']:.0f} tokens/s"
        lines.append(f"- {device}, {rows[0]['dtype']}, {speed}, {origin}")
    return lines


def block(demos: dict[str, list[dict]]) -> str:
    """Everything between the markers, markers included."""
    return "\n".join([BEGIN, *table(demos), "", *origins(demos), END])


def peers_block() -> str:
    """The comparison with other engines, markers included."""
    path = ROOT / "results" / "peers.jsonl"
    rows = peers.newest(path)
    header, *lines = peers.table(rows)
    table_lines = [_row(header), _row(["---"] * len(header)), *map(_row, lines)]
    here, *elsewhere = peers.newest_of_devices(path).values()
    sentences = [peers.caption(here)]
    sentences += [peers.ratios(rows, beside=here) for rows in elsewhere]
    for device, others in peers.newest_of_devices(path, stream=True).items():
        where = f"Where both hand out the tokens of every step, on {short_name(device)}"
        sentences.append(peers.ratios(others, where, beside=here))
    caption = textwrap.wrap(" ".join(sentences), 100)
    return "\n".join([PEERS_BEGIN, *table_lines, "", *caption, PEERS_END])


def with_block(text: str, begin: str, end: str, new: str) -> str:
    """`text` with `new` in the place of everything from one marker to the other."""
    before, rest = text.split(begin)
    return before + new + rest.split(end)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    with (ROOT / "results" / "demo.jsonl").open(encoding="utf-8") as file:
        new = with_block(text, BEGIN, END, block(newest_demos(file)))
    new = with_block(new, PEERS_BEGIN, PEERS_END, peers_block())
    if new == text:
        print("README.md is what the rows say")
        return 0
    if args.check:
        print("README.md is not what the rows say: run scripts/generate/readme_table.py")
        return 1
    readme.write_text(new, encoding="utf-8")
    rows = peers.newest(ROOT / "results" / "peers.jsonl")
    peers.draw(rows, ROOT / "docs" / "pictures" / "peers.png")
    print("README.md: the tables were written; docs/pictures/peers.png: was drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
