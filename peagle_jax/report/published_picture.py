"""Ours beside published numbers, on the same axes."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from peagle_jax.report.pictures import save
from peagle_jax.report.plots import COLORS, STYLE
from peagle_jax.report.published_tables import PublishedTable
from peagle_jax.report.records import NAMES

MARKERS = "sDv^<>phX"
PUBLISHED_STYLE = {"ls": "--", "mfc": "white", "lw": 1.0, "ms": 5}
OURS_STYLE = {"ls": "-", "marker": "o", "lw": 1.8, "ms": 4}
OTHERS = "#495057"  # methods that this package does not have
COLUMNS = 2
DPI = 80


@dataclasses.dataclass(frozen=True)
class Line:
    """What one line of a panel shows.

    Attributes:
      label: for the legend.
      method: decides the color.
      points: (x, y).
      is_ours: measured here, and not published by others.
    """

    label: str
    method: str
    points: Sequence[tuple[int | float, int | float]]
    is_ours: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines with the same axes.

    Attributes:
      title: of the panel.
      x: what the horizontal axis is.
      y: likewise.
      lines: published ones and ours.
      is_log: whether the horizontal axis is of powers of two.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    is_log: bool = False


def panels(tables: Mapping[str, PublishedTable], ours: Mapping[str, Sequence[dict]]) -> list[Panel]:
    """What can be drawn of both.

    Args:
      tables: from `published_tables.read_tables`.
      ours: by a short name of the machine, greedy rows of one demo, at all K and batch sizes.
    """
    return [
        Panel(
            "Accepted by position",
            "position of the draft",
            "share of steps, %",
            [*_published_positions(tables), *_our_positions(ours)],
        ),
        Panel(
            "Acceptance length",
            "K, tokens drafted per step",
            "tokens per target forward",
            [*_published_lengths(tables), *_our_lines(ours, 1, "acceptance_length")],
        ),
        Panel(
            "Speed over plain decoding, one sequence",
            "K, tokens drafted per step",
            "times plain decoding",
            [*_published_speedups(tables), *_our_lines(ours, 1, "speedup")],
        ),
        Panel(
            "P-EAGLE over EAGLE-3, both with K = 11",
            "sequences decoded together",
            "times EAGLE-3",
            [*_published_ratios(tables), *_our_ratios(ours, 11)],
            is_log=True,
        ),
        Panel(
            "P-EAGLE over EAGLE-3, each with its best K",
            "sequences decoded together",
            "times EAGLE-3",
            [*_published_best(tables), *_our_best(ours)],
            is_log=True,
        ),
        Panel(
            "P-EAGLE over EAGLE-3 with its best K, by K; published: HumanEval",
            "K, tokens that P-EAGLE drafts per step",
            "times EAGLE-3",
            [*_published_by_k(tables, "HumanEval"), *_our_by_k(ours)],
        ),
    ]


def _published_positions(tables: Mapping[str, PublishedTable]) -> list[Line]:
    """Of every table the rates with its largest K."""
    lines = []
    for table in tables.values():
        rows = [row for row in table.rows if "accepted_percent" in row]
        for method in dict.fromkeys(row["method"] for row in rows):
            of_method = [row for row in rows if row["method"] == method]
            row = max(of_method, key=lambda row: row["k"])
            points = list(enumerate(row["accepted_percent"], start=1))
            label = f"{table.facts['target']}, {table.facts['texts'].split(', ')[0]}"
            lines.append(Line(label, method, points))
    return lines


def _our_positions(ours: Mapping[str, Sequence[dict]], k: int = 7) -> list[Line]:
    """With K = 7; acceptance does not depend on the machine, so the first will do."""
    lines = []
    for machine, rows in list(ours.items())[:1]:
        for row in rows:
            if row["k"] == k and row["batch_size"] == 1:
                shares = [100 * share for share in row["accepted_per_position"]]
                points = list(enumerate(shares, start=1))
                lines.append(Line(f"ours, {machine}", row["method"], points, is_ours=True))
    return lines


def _published_lengths(tables: Mapping[str, PublishedTable]) -> list[Line]:
    """Of every table that has them for several K."""
    lines = []
    for table in tables.values():
        for method in dict.fromkeys(row["method"] for row in table.rows):
            lengths = {
                row["k"]: table.acceptance_length(row)
                for row in table.rows
                if row["method"] == method and row.get("k") and "texts" not in row
            }
            points = sorted((k, length) for k, length in lengths.items() if length)
            if len(points) > 1:
                lines.append(Line(table.facts["target"], method, points))
    return lines


def _published_speedups(tables: Mapping[str, PublishedTable]) -> list[Line]:
    """Over the plain row of the same table, at concurrency 1."""
    lines = []
    for table in tables.values():
        rows = [row for row in table.rows if row.get("concurrency") == 1 and "target" not in row]
        plain = next((row for row in rows if row["method"] == "none"), None)
        for method in dict.fromkeys(row["method"] for row in rows if row.get("k")):
            points = [
                (row["k"], speed(row) / speed(plain))
                for row in rows
                if plain and row["method"] == method and row.get("k") and speed(row)
            ]
            if points:
                label = f"{table.facts['target']}, {table.facts['source'].split(' (')[0]}"
                lines.append(Line(label, method, points))
    return lines


def speed(row: Mapping) -> int | float:
    """Tokens per second of one sequence; 0 where the row does not tell."""
    if "tpot_ms" in row:
        return 1e3 / row["tpot_ms"]
    return row.get("tokens_per_second", 0.0)


def _our_lines(ours: Mapping[str, Sequence[dict]], batch_size: int, key: str) -> list[Line]:
    lines = []
    for machine, rows in ours.items():
        for method in dict.fromkeys(row["method"] for row in rows if row["k"]):
            points = [
                (row["k"], row[key])
                for row in rows
                if row["method"] == method and row["batch_size"] == batch_size
            ]
            lines.append(Line(f"ours, {machine}", method, sorted(points), is_ours=True))
    return lines


def _published_ratios(tables: Mapping[str, PublishedTable]) -> list[Line]:
    """Against EAGLE-3 with the same K, by concurrency."""
    lines = []
    for table in tables.values():
        for texts in dict.fromkeys(row.get("texts") for row in table.rows if "over_eagle3" in row):
            points = [
                (row["concurrency"], row["over_eagle3"])
                for row in table.rows
                if row.get("texts") == texts and "over_eagle3" in row
            ]
            lines.append(Line(f"{table.facts['target']}, {texts}", "peagle", points))
    return lines


def _over_best(table: PublishedTable) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """(K, ratio to EAGLE-3 with its best K) by texts and concurrency."""
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in table.rows:
        if "over_best_eagle3" in row:
            key = row.get("texts", table.facts["texts"].split(", ")[0]), row["concurrency"]
            found.setdefault(key, []).append((row["k"], row["over_best_eagle3"]))
    return found


def _published_best(tables: Mapping[str, PublishedTable]) -> list[Line]:
    """By concurrency, of tables that have P-EAGLE with its best K only."""
    lines = []
    for table in tables.values():
        found = _over_best(table)
        if any(len(by_k) > 1 for by_k in found.values()):
            continue
        for texts in dict.fromkeys(texts for texts, _ in found):
            points = [(c, by_k[0][1]) for (of, c), by_k in found.items() if of == texts]
            lines.append(Line(f"{table.facts['target']}, {texts}", "peagle", sorted(points)))
    return lines


def _published_by_k(tables: Mapping[str, PublishedTable], texts: str) -> list[Line]:
    """By K, of tables that have several for one concurrency."""
    return [
        Line(f"{table.facts['target']}, {concurrency} sequences", "peagle", sorted(by_k))
        for table in tables.values()
        for (of, concurrency), by_k in _over_best(table).items()
        if of == texts and len(by_k) > 1
    ]


def _our_speeds(rows: Sequence[dict], method: str, batch_size: int) -> dict[int, float]:
    """Tokens per second by K."""
    return {
        row["k"]: row["tokens_per_second"]
        for row in rows
        if row["method"] == method and row["batch_size"] == batch_size
    }


def _our_by_k(ours: Mapping[str, Sequence[dict]]) -> list[Line]:
    """As `_published_by_k`, for every batch size."""
    lines = []
    for machine, rows in ours.items():
        for size in dict.fromkeys(row["batch_size"] for row in rows):
            peagle, eagle3 = (_our_speeds(rows, name, size) for name in ("peagle", "eagle3"))
            if peagle and eagle3:
                best = max(eagle3.values())
                points = [(k, speed / best) for k, speed in sorted(peagle.items())]
                what = "1 sequence" if size == 1 else f"{size} sequences"
                lines.append(Line(f"ours, {machine}, {what}", "peagle", points, is_ours=True))
    return lines


def _our_best(ours: Mapping[str, Sequence[dict]]) -> list[Line]:
    """As `_published_best`."""
    lines = []
    for machine, rows in ours.items():
        points = []
        for size in sorted({row["batch_size"] for row in rows}):
            peagle, eagle3 = (_our_speeds(rows, name, size) for name in ("peagle", "eagle3"))
            if peagle and eagle3:
                points.append((size, max(peagle.values()) / max(eagle3.values())))
        if points:
            lines.append(Line(f"ours, {machine}", "peagle", points, is_ours=True))
    return lines


def _our_ratios(ours: Mapping[str, Sequence[dict]], k: int) -> list[Line]:
    """P-EAGLE's tokens per second over EAGLE-3's of the same demo, K and batch size."""
    lines = []
    for machine, rows in ours.items():
        speeds = {
            (row["method"], row["batch_size"]): row["tokens_per_second"]
            for row in rows
            if row["k"] == k
        }
        sizes = sorted({size for method, size in speeds if method == "peagle"})
        points = [(size, speeds["peagle", size] / speeds["eagle3", size]) for size in sizes]
        if points:
            lines.append(Line(f"ours, {machine}", "peagle", points, is_ours=True))
    return lines


def draw(path: Path, drawn: Sequence[Panel]) -> None:
    """Writes the panels as a PNG."""
    with plt.rc_context(STYLE):
        num_rows = -(-len(drawn) // COLUMNS)
        figure, axes = plt.subplots(
            num_rows, COLUMNS, figsize=(7 * COLUMNS, 5.2 * num_rows), squeeze=False
        )
        for ax, panel in zip(axes.flat, drawn, strict=False):
            _panel(ax, panel)
        for ax in axes.flat[len(drawn) :]:
            ax.set_axis_off()
        figure.suptitle("solid: ours, on CPUs; dashed: published, on GPUs and Trainium")
        figure.tight_layout()
        save(figure, path, dpi=DPI)


def _panel(ax: Axes, panel: Panel) -> None:
    markers = iter(MARKERS * 2)
    for line in panel.lines:
        xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
        style = OURS_STYLE if line.is_ours else {**PUBLISHED_STYLE, "marker": next(markers)}
        color = COLORS.get(line.method, OTHERS)
        ax.plot(
            xs,
            ys,
            color=color,
            label=f"{NAMES.get(line.method, line.method)}: {line.label}",
            **style,
        )
    if panel.is_log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:.0f}")
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x)
    ax.set_ylabel(panel.y)
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=7)
