"""What a GPU measured (results/gpu.jsonl), as tables of a page.

    python scripts/gpu/measured.py [--doc docs/kernels.md]

Rows of several states of the code are told apart by when they were measured.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu.page import markdown_table, with_table  # noqa: E402
from peagle_jax.atomic_write import write_atomically  # noqa: E402

ROWS = ROOT / "results" / "gpu.jsonl"
LONGEST = 12  # kernels of a profile
# table of the page -> the step whose kernels it lists
PROFILED = {
    "kernels": "qwen3-coder-30b-a3b-instruct, none K=0, batch 1",
    "kernels of eight tokens": "qwen3-coder-30b-a3b-instruct, peagle K=7, batch 1",
    "kernels of GPT-OSS": "gpt-oss-20b, none K=0, batch 1",
    "kernels of GPT-OSS's eight tokens": "gpt-oss-20b, peagle K=7, batch 1",
}
# states of the code, by when the first of their rows was written; who measures another adds it
STATES = {
    "first": "",
    "second": "2026-11-26T07:00:00Z",
    "third": "2026-11-26T13:00:00Z",
    "fourth": "2026-11-26T13:58:00Z",
    "fifth": "2026-11-26T22:00:00Z",
    "sixth": "2026-11-28T05:00:00Z",
}
METHODS = {"none": "plain", "peagle": "P-EAGLE", "eagle3": "EAGLE-3"}
# columns of the table of experts -> what their rows call them
EXPERTS = {
    "pair by pair": ("pair by pair",),
    "an expert once": ("without tensor cores",),
    "in tiles": ("sorted into tiles", "in tiles"),
}


def state_of(row: Mapping) -> str:
    """The name of the state of the code that a row was measured with."""
    return [name for name, since in STATES.items() if row["time"] >= since][-1]


def step_lines(rows: Sequence[Mapping]) -> list[list[str]]:
    """A line a step of a whole target."""
    found: dict[tuple, list[Mapping]] = {}
    for row in rows:
        if row.get("part") == "steps" and row["layers"] is None:
            key = row["target"], row["method"], row["k"], row["batch"], row["routing"]
            found.setdefault(key, []).append(row)
    lines = [["step", "floor, ms", *(f"{name}, ms" for name in STATES), "tokens/s"]]
    # batch after batch, a target's steps together
    first_seen = {target: i for i, (target, *_) in enumerate(found)}
    in_order = sorted(found.items(), key=lambda item: (item[0][3], first_seen[item[0][0]]))
    for (target, method, k, batch, routing), measured in in_order:
        if method == "none" and routing == "alike" and batch == 1:
            continue  # one token has nobody to choose like
        by_state = {state_of(row): row for row in sorted(measured, key=lambda row: row["time"])}
        last = list(by_state.values())[-1]
        name = f"{target}, batch {batch}, {METHODS[method]}"
        name += f", K = {k}" if k else ""
        name += "" if method == "none" and batch == 1 else f", {routing}"
        times = [
            f"{by_state[state]['step_us'] / 1e3:.2f}" if state in by_state else ""
            for state in STATES
        ]
        floor = f"{last['floor_us'] / 1e3:.2f}"
        lines.append([name, floor, *times, f"{last['tokens_per_s']:.0f}"])
    return lines


def kernel_lines(rows: Sequence[Mapping], case: str) -> list[list[str]]:
    """The longest kernels of the newest profile of a step, without graphs."""
    profiles = [row for row in rows if row.get("part") == "profile" and row["case"] == case]
    profiles = [row for row in profiles if row["way"] == "no graphs"]
    profile = max(profiles, key=lambda row: row["time"])
    lines = [["kernel", "programs", "a step", "us", "us a step"]]
    for kernel in profile["kernels"][:LONGEST]:
        name, _, details = kernel["name"].partition(" regs:")
        grid = re.search(r"grid:(\S+)", details)
        programs = " x ".join(x for x in grid[1].split(",") if x != "1") if grid else ""
        count, us = kernel["a_step"], kernel["us"]
        lines.append(
            [f"`{name}`", programs or "1", f"{count:.0f}", f"{us:.1f}", f"{count * us:.0f}"]
        )
    total, launches = profile["busy_us_a_step"], profile["launches_a_step"]
    lines.append(["all", "", f"{launches:.0f}", "", f"{total:.0f}"])
    return lines


def expert_lines(rows: Sequence[Mapping]) -> list[list[str]]:
    """Both products of a layer's experts, one way beside the other; a line a number of tokens."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row.get("part") != "variants: experts":
            continue
        columns = found.setdefault(row["shape"], {name: [] for name in EXPERTS})
        columns.setdefault("floor", []).append(f"{min(row['floor_us'].values()):.0f}")
        for name, spellings in EXPERTS.items():
            columns[name] += [f"{row['us'][s]:.0f}" for s in spellings if s in row["us"]]
    lines = [["experts of a layer", "floor, us", *EXPERTS]]
    for shape, columns in found.items():
        columns["floor"] = list(dict.fromkeys(columns["floor"]))
        cells = [", ".join(columns[name]) for name in ("floor", *EXPERTS)]
        lines.append([shape, *cells])
    return lines


def tables(rows: Sequence[Mapping]) -> dict[str, str]:
    """Markdown tables by their names in the page."""
    found = {"steps": step_lines(rows), "experts": expert_lines(rows)}
    found |= {name: kernel_lines(rows, case) for name, case in PROFILED.items()}
    return {name: markdown_table(header, lines) for name, (header, *lines) in found.items()}


def filled(text: str, found: Mapping[str, str]) -> str:
    """A page with tables between `<!-- measured NAME: -->` and `<!-- end -->`."""
    for name, table in found.items():
        text = with_table(text, f"measured {name}:", table)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--doc", type=Path, help="a Markdown file whose tables are written anew")
    args = parser.parse_args()
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    found = tables(rows)
    print("\n\n".join(found.values()))
    if args.doc:
        write_atomically(args.doc, filled(args.doc.read_text(encoding="utf-8"), found))


if __name__ == "__main__":
    main()
