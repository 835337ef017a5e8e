"""README's numbers are rows of results/, and the files and commands it names exist."""

import json
import re
from pathlib import Path

import pytest

from peagle_jax.cli import COMMANDS
from peagle_jax.report.records import NAMES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def line(r: dict) -> str:
    """A record as README's table says it."""

    def ms(key):
        return f"{1e3 * r[key]:.2f}"

    accepted = " ".join(f"{100 * a:.0f}" for a in r["accepted_per_position"])
    parts = [
        NAMES[r["method"]],
        str(r["k"] or ""),
        f"{r['tokens_per_second']:.0f}",
        f"{r['speedup']:.2f}",
        f"{r['acceptance_length']:.2f}" if r["k"] else "",
        accepted,
        ms("draft_seconds") if r["k"] else "",
        ms("verify_seconds"),
        ms("step_seconds"),
    ]
    return "| " + " | ".join(parts) + " |"


def newest() -> list[dict]:
    """The last small demo's greedy rows at batch 1."""
    rows = [json.loads(text) for text in (ROOT / "results" / "demo.jsonl").read_text().splitlines()]
    rows = [r for r in rows if r["name"] == "demo/small"]
    return [
        r
        for r in rows
        if r["time"] == rows[-1]["time"] and r["batch"] == 1 and r["temperature"] == 0
    ]


def test_the_measured_table_is_the_newest_demo():
    rows = newest()
    assert {(r["method"], r["k"]) for r in rows} >= {
        (m, k) for m in ("eagle3", "peagle") for k in (1, 3, 5, 7, 11)
    }
    for r in rows:
        assert line(r) in README, line(r)
    assert all(r["lossless"] for r in rows if r["k"]) and not any(r["dirty"] for r in rows)


def test_every_path_and_command_it_names_exists():
    for name in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / name).exists(), name
    tree = README.split("## What is where")[1].split("```")[1]
    for name in re.findall(r"^  (\S+)", tree, re.MULTILINE):
        assert (ROOT / "peagle_jax" / name).exists(), name
    for name in re.findall(r"^(\w+/\S*)", tree, re.MULTILINE):
        assert (ROOT / name).exists(), name
    for command in re.findall(r"^peagle ([\w-]+)", README, re.MULTILINE):
        assert command in COMMANDS, command


@pytest.mark.parametrize(
    "room",
    sorted(
        p.name
        for p in (ROOT / "peagle_jax").iterdir()
        if p.suffix == ".py" and p.stem != "__init__"
    ),
)
def test_every_file_of_the_ground_floor_is_in_the_tree(room):
    assert f"  {room} " in README, room
