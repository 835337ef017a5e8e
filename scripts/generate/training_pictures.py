"""Draws how the packaged heads learned, and what memory training takes.

    python scripts/generate/training_pictures.py

docs/pictures/training_curves.png is of the heads' training.jsonl: the acceptance length on held-out
prompts, and P-EAGLE's accuracy by depth. docs/pictures/training_memory.png is of result rows: a
step's memory against the length of a row, and that of a corpus against its conversations.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from peagle_jax.report.pictures import save
from peagle_jax.report.plots import COLORS, DARKEST_TO_PALEST, STYLE

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
SMOOTHED = 20  # rows of a training's log that one point of its accuracy is the mean of
MB = 1e6


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def newest(rows: Sequence[Mapping], name: str, key: str) -> list[Mapping]:
    """The newest row of each value of `key`, in its order."""
    last = {row[key]: row for row in rows if row["name"] == name}
    return [last[value] for value in sorted(last)]


def draw_curves(path: Path) -> None:
    """Acceptance lengths of both heads, and one head's accuracy by depth, against steps."""
    logs = {
        method: read(ROOT / "peagle_jax" / "assets" / method / "training.jsonl")
        for method in ("peagle", "eagle3")
    }
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
        for method, rows in logs.items():
            measured = [row for row in rows if row.get("acceptance_length")]
            k = len(measured[-1]["accepted_per_position"])
            name = {"peagle": "P-EAGLE", "eagle3": "EAGLE-3"}[method]
            left.plot(
                [row["step"] / 1000 for row in measured],
                [row["acceptance_length"] for row in measured],
                "o-",
                ms=3,
                color=COLORS[method],
                label=f"{name}, K = {k}",
            )
        left.set_title("acceptance length on held-out prompts")
        left.legend()
        depths = accuracy_by_depth(logs["peagle"])
        colors = plt.get_cmap("viridis")(np.linspace(*DARKEST_TO_PALEST, len(depths)))
        for depth, ((steps, shares), color) in enumerate(zip(depths, colors, strict=True)):
            right.plot(steps, shares, color=color, lw=1.3, label=f"{depth}")
        right.set_title("P-EAGLE's accuracy by depth, training rows")
        right.legend(title="depth", ncols=2, fontsize=9)
        for axis in (left, right):
            axis.set_xlabel("thousand steps")
            axis.set_ylim(bottom=0)
        save(figure, path)


def accuracy_by_depth(rows: Sequence[Mapping]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(thousand steps, accuracy) of each depth, while it is trained: means of SMOOTHED rows."""
    trained = [row for row in rows if "accuracy" in row]
    found = []
    for depth in range(max(len(row["accuracy"]) for row in trained)):
        points = [
            (row["step"] / 1000, row["accuracy"][depth])
            for row in trained
            if len(row["accuracy"]) > depth
        ]
        groups = np.array_split(np.array(points), max(1, len(points) // SMOOTHED))
        found.append(tuple(np.array([group.mean(axis=0) for group in groups]).T))
    return found


def draw_memory(path: Path) -> None:
    """Memory of a step by the tokens of a row, and of a corpus by its conversations."""
    steps = read(ROOT / "results/training_memory.jsonl")
    steps = newest([r for r in steps if "recipe" not in r], "training_memory", "tokens")
    corpora = read(ROOT / "results/corpus_memory.jsonl")
    corpora = [row for row in corpora if row["format"] == "jsonl"]
    corpora = newest(corpora, "corpus_memory", "conversations")
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
        tokens = np.array([row["tokens"] for row in steps])
        for key, name, style in (
            ("peak_rss", "measured: the process's peak", "o-"),
            ("compiled", "XLA's count of buffers", "s--"),
        ):
            left.plot(
                tokens,
                [row[key] / MB if row[key] else np.nan for row in steps],
                style,
                ms=4,
                color=COLORS["peagle" if style == "o-" else "none"],
                label=name,
            )
        least = steps[0]["compiled"] / MB
        left.plot(
            tokens,
            least * tokens / tokens[0],
            ":",
            color="#9aa4b1",
            label="in proportion to the tokens",
        )
        left.set_title("a step of a small head, K = 8, MB")
        left.set_xlabel("tokens of a row")
        conversations = [row["conversations"] for row in corpora]
        for key, name, style in (
            ("peak_own_bytes", "of its own", "o-"),
            ("peak_resident_bytes", "with pages of the mapped files", "s--"),
        ):
            right.plot(
                conversations,
                [row[key] / MB for row in corpora],
                style,
                ms=4,
                color=COLORS["peagle" if style == "o-" else "none"],
                label=name,
            )
        right.plot(
            conversations,
            [row["corpus_bytes"] / MB for row in corpora],
            ":",
            color="#9aa4b1",
            label="the corpus itself",
        )
        right.set_title("encoding a corpus, MB")
        right.set_xlabel("conversations")
        for axis in (left, right):
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.legend(fontsize=9)
        left.set_xscale("log", base=2)
        save(figure, path)


def main() -> None:
    for name, draw in {"training_curves": draw_curves, "training_memory": draw_memory}.items():
        draw(PICTURES / f"{name}.png")
        print(f"docs/pictures/{name}.png")


if __name__ == "__main__":
    main()
