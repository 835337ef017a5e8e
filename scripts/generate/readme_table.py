"""Writes the table of the small demo into README.md, from the rows of results/demo.jsonl.

    python scripts/generate/readme_table.py [--check]

Of every device the newest `make demo` counts. Its greedy rows at batch 1 become the table, its best
speedups at every batch size a sentence below the table. Everything stands between two markers.
`--check` writes nothing and exits with 1 if the table is not what the rows say.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from peagle_jax.old_names import RESULT_ROW_KEYS, with_new_names

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- demo table: written by scripts/generate/readme_table.py -->"
END = "<!-- end of demo table -->"
DEMO = "demo/small"
METHODS = {"none": "plain decoding", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
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
    """`Intel(R) Xeon(R) Processor, 2 cores` -> `Intel Xeon`."""
    return device.split(",")[0].replace("(R)", "").replace(" Processor", "")


def table(demos: dict[str, list[dict]]) -> list[str]:
    """The lines of the Markdown table: a row for each method and K, three columns per device."""
    header = ["method", "K"]
    for device in demos:
        header += [f"{short_name(device)}: tokens/s", "speedup", "length"]
    lines = [_row(header), _row(["---"] * len(header))]
    by_case = {
        device: {(row["k"], row["method"]): row for row in rows if row["batch_size"] == 1}
        for device, rows in demos.items()
    }
    cases = sorted({case for rows in by_case.values() for case in rows})
    for k, method in cases:
        cells = [METHODS[method], str(k) if k else ""]
        for rows in by_case.values():
            cells += _numbers(rows.get((k, method)))
        lines.append(_row(cells))
    return lines


def _numbers(row: dict | None) -> list[str]:
    """Tokens per second, speedup, acceptance length; empty where the device has no such row."""
    if row is None:
        return ["", "", ""]
    length = f"{row['acceptance_length']:.2f}" if row["k"] else ""
    return [f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}", length]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def sentences(demos: dict[str, list[dict]]) -> list[str]:
    """For each device: its dtype, where its rows come from, and the best speedup of each method."""
    lines = []
    for device, rows in demos.items():
        origin = f"{rows[0]['dtype']}, commit {rows[0]['commit']}, {rows[0]['time'][:10]}"
        lines.append(f"- {device}, {origin}. Best speedup:")
        batches = sorted({row["batch_size"] for row in rows})
        lines.append("  " + "; ".join(_best(rows, batch) for batch in batches) + ".")
    return lines


def _best(rows: list[dict], batch: int) -> str:
    parts = []
    for method in reversed(DRAFTERS):
        speedups = [r["speedup"] for r in rows if (r["method"], r["batch_size"]) == (method, batch)]
        parts.append(f"{METHODS[method]} {max(speedups):.2f}")
    return f"batch {batch}: {', '.join(parts)}"


def block(demos: dict[str, list[dict]]) -> str:
    """Everything between the markers, markers included."""
    return "\n".join([BEGIN, *table(demos), "", *sentences(demos), END])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    with (ROOT / "results" / "demo.jsonl").open(encoding="utf-8") as file:
        new = before + block(newest_demos(file)) + after
    if new == text:
        print("README.md is what the rows say")
        return 0
    if args.check:
        print("README.md is not what the rows say: run scripts/generate/readme_table.py")
        return 1
    readme.write_text(new, encoding="utf-8")
    print("README.md: the table was written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
