"""Plots of result rows and training metrics. Captions come from `statements`."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from peagle_jax.report import statements
from peagle_jax.report.pictures import save
from peagle_jax.report.records import NAMES, batch_sizes, chains, greedy, methods

INK = "#1d2430"
# Lines and bars have a contrast of at least 3 : 1 with the page, texts of at least 4.5 : 1.
COLORS = {"peagle": "#0b7285", "eagle3": "#c2410c", "eagle": "#6741d9", "none": "#5a6473"}
PALE = {
    "peagle": "#99d5de",
    "eagle3": "#fbc19a",
    "eagle": "#d0bfff",
}  # verification, on top of drafting
REST_COLOR, REST_EDGE = "#dfe4ea", "#6b7683"
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.edgecolor": "#9aa4b1",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6eaef",
    "axes.axisbelow": True,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "figure.dpi": 130,
}
DARKEST_TO_PALEST = (0.0, 0.7)  # of viridis; what lies above is yellow, and hard to see on white


def draw(
    out: Path,
    records: Sequence[dict],
    curves: Mapping[str, Sequence[dict]],
    fresh: Sequence[dict],
    *,
    fresh_is_measured: bool = False,
) -> list[tuple[str, str]]:
    """Writes every plot that the data allow, as PNG files in `out`.

    Args:
      records: result rows of `bench.suite.run_suite`. Of an adaptive K and of trees nothing is
        drawn: they are no points of a curve against K.
      curves: by method, the metrics that its head's training wrote.
      fresh: the metrics of the head that the demo trains itself.
      fresh_is_measured: whether that head is one of those in `records`.

    Returns:
      (file name, caption) of each plot, in reading order.
    """
    records = chains(records)
    greedy_rows = greedy(records) if methods(records) else []
    plots = []
    with plt.rc_context(STYLE):
        for batch_size in batch_sizes(greedy_rows):
            rows = [r for r in greedy_rows if r["batch_size"] == batch_size]
            caption = statements.against_k_caption(rows)
            plots.append(_save(out, f"against_k_batch_{batch_size}", _against_k(rows), caption))
        if greedy_rows:
            caption = statements.break_even_caption(greedy_rows)
            plots.append(_save(out, "break_even", _break_even(greedy_rows), caption))
            rows = [r for r in greedy_rows if r["batch_size"] == min(batch_sizes(greedy_rows))]
            plots.append(_save(out, "step", _step(rows), statements.step_caption(rows)))
        if panels := _position_panels(records):
            caption = statements.per_position_caption(panels)
            plots.append(_save(out, "acceptance_per_position", _per_position(panels), caption))
        if any("acceptance_length" in row for rows in curves.values() for row in rows):
            caption = statements.training_caption(curves)
            plots.append(_save(out, "training", _training(curves), caption))
        if fresh_rows := [row for row in fresh if "accuracy" in row]:
            caption = statements.fresh_head_caption(fresh_rows, fresh_is_measured)
            plots.append(_save(out, "fresh_head", _fresh_head(fresh_rows), caption))
    return plots


def _save(out: Path, name: str, figure: Figure, caption: str) -> tuple[str, str]:
    """Writes a figure as PNG. Returns its file name and caption."""
    save(figure, out / f"{name}.png", bbox_inches="tight")
    return f"{name}.png", caption


def _series(
    records: Sequence[dict], method: str, value: Callable[[dict], float]
) -> tuple[list[int], list[float]]:
    """The K of a method's rows in order, and a value of each row."""
    rows = sorted((r for r in records if r["method"] == method), key=lambda r: r["k"])
    return [r["k"] for r in rows], [value(r) for r in rows]


def _label_k_axis(axis: Axes, records: Sequence[dict]) -> None:
    axis.set_xlabel("K, tokens drafted per step")
    axis.set_xticks(sorted({r["k"] for r in records if r["k"]}))


def _against_k(records: Sequence[dict]) -> Figure:
    """Acceptance, drafting time, step time and speed against K, at one batch size."""
    plain = next(r for r in records if r["method"] == "none")
    panels = (
        ("Acceptance length", "tokens per target forward", _acceptance_length, None),
        ("Drafting", "ms per step", _draft_ms, None),
        ("Whole step: draft, verify, accept", "ms per step", _step_ms, _step_ms(plain)),
        ("Speed", "tokens/s", _tokens_per_second, _tokens_per_second(plain)),
    )
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 6.6), layout="constrained")
    for axis, (title, unit, value, plain_value) in zip(axes.flat, panels, strict=True):
        for method in methods(records):
            ks, values = _series(records, method, value)
            axis.plot(ks, values, "o-", color=COLORS[method], label=NAMES[method])
        if plain_value is not None:
            axis.axhline(plain_value, color=COLORS["none"], ls="--", label=NAMES["none"])
        axis.set(title=title, ylabel=unit)
        axis.margins(y=0.12)
        axis.set_ylim(bottom=1 if value is _acceptance_length else 0)
        _label_k_axis(axis, records)
    handles, labels = axes[1, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3)
    return figure


def _acceptance_length(row: dict) -> float:
    """Not a number, of which no point is drawn, where nothing was drafted."""
    return math.nan if row["acceptance_length"] is None else float(row["acceptance_length"])


def _draft_ms(row: dict) -> float:
    return 1e3 * row["draft_seconds"]


def _verify_ms(row: dict) -> float:
    return 1e3 * row["verify_seconds"]


def _step_ms(row: dict) -> float:
    return 1e3 * row["step_seconds"]


def _tokens_per_second(row: dict) -> float:
    return float(row["tokens_per_second"])


def _break_even(records: Sequence[dict]) -> Figure:
    """The acceptance length reached and the one needed, with one panel per batch size.

    All panels have the same vertical axis, which includes the values of all of them.
    """
    sizes = batch_sizes(records)
    figure, axes = plt.subplots(
        1,
        len(sizes),
        figsize=(4.9 * len(sizes), 3.7),
        layout="constrained",
        squeeze=False,
    )
    highest, lowest = 1.0, 1.0
    for axis, batch_size in zip(axes[0], sizes, strict=True):
        here = [r for r in records if r["batch_size"] == batch_size]
        for method in methods(here):
            ks, needed = _series(here, method, lambda r: r["break_even"])
            _, reached = _series(here, method, _acceptance_length)
            name, color = NAMES[method], COLORS[method]
            axis.plot(ks, needed, "--", color=color, label=f"{name}: needed")
            axis.plot(ks, reached, "o-", color=color, label=f"{name}: reached")
            drawn = [value for value in (*needed, *reached) if not math.isnan(value)]
            highest, lowest = max(highest, *drawn), min(lowest, *drawn)
        axis.set(title=f"Batch size {batch_size}")
        _label_k_axis(axis, here)
    margin = 0.05 * (highest - lowest)
    for axis in axes[0]:
        axis.set_ylim(lowest - margin, highest + margin)
    axes[0, 0].set_ylabel("acceptance length")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _step(records: Sequence[dict]) -> Figure:
    """Where a step's time goes, at one batch size: stacked bars for every method and K."""
    plain = next(r for r in records if r["method"] == "none")
    ks = sorted({r["k"] for r in records if r["k"]})
    names = methods(records)
    width = 0.8 / max(len(names), 1)
    figure, axis = plt.subplots(figsize=(9.5, 3.9), layout="constrained")
    for i, method in enumerate(names):
        rows = [r for r in records if r["method"] == method]
        xs = [ks.index(r["k"]) + (i - (len(names) - 1) / 2) * width for r in rows]
        _stack_parts(axis, xs, rows, method, 0.92 * width, label_rest=i == 0)
    name = "plain decoding, one token"
    axis.axhline(_step_ms(plain), color=COLORS["none"], ls="--", label=name)
    axis.set_xticks(range(len(ks)), [f"K = {k}" for k in ks])
    title = f"Where a step's time goes, batch size {plain['batch_size']}"
    axis.set(title=title, ylabel="ms per step")
    axis.legend(fontsize=9, ncols=2)
    return figure


def _stack_parts(
    axis: Axes,
    xs: Sequence[float],
    rows: Sequence[dict],
    method: str,
    width: float,
    *,
    label_rest: bool,
) -> None:
    """Bars of drafting, verification and what a step takes beyond them."""
    draft, verify = [_draft_ms(r) for r in rows], [_verify_ms(r) for r in rows]
    parts = [d + v for d, v in zip(draft, verify, strict=True)]
    rest = [max(0.0, _step_ms(r) - p) for r, p in zip(rows, parts, strict=True)]
    name = NAMES[method]
    axis.bar(xs, draft, width, color=COLORS[method], label=f"{name}: draft")
    axis.bar(xs, verify, width, bottom=draft, color=PALE[method], label=f"{name}: verify")
    axis.bar(
        xs,
        rest,
        width,
        bottom=parts,
        color=REST_COLOR,
        edgecolor=REST_EDGE,
        lw=0.6,
        label="rest of the step" if label_rest else None,
    )


def _position_panels(records: Sequence[dict]) -> list[list[dict]]:
    """Rows of the largest K up to 8 and the largest batch, for each temperature."""
    speculative = [r for r in records if r["accepted_per_position"]]
    panels = []
    for temperature in sorted({r["temperature"] for r in speculative}):
        rows = [r for r in speculative if r["temperature"] == temperature]
        ks = [r["k"] for r in rows]
        k = max((k for k in ks if k <= 8), default=min(ks))
        batch_size = max(batch_sizes(rows))
        panel = [r for r in rows if r["k"] == k and r["batch_size"] == batch_size]
        if panel:
            panels.append(panel)
    return panels


def _per_position(panels: Sequence[Sequence[dict]]) -> Figure:
    """Share of drafts accepted at each position, with one panel per temperature."""
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.9 * len(panels), 3.6),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axis, rows in zip(axes[0], panels, strict=True):
        width = 0.8 / len(rows)
        for i, row in enumerate(rows):
            shift = (i - (len(rows) - 1) / 2) * width
            label = NAMES[row["method"]]
            if row["acceptance_length"] is not None:
                label += f", acceptance length {row['acceptance_length']:.2f}"
            bars = axis.bar(
                [position + shift for position in range(1, row["k"] + 1)],
                [100 * share for share in row["accepted_per_position"]],
                width * 0.94,
                color=COLORS[row["method"]],
                label=label,
            )
            axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
        temperature = rows[0]["temperature"]
        mode = f"Temperature {temperature:g}" if temperature else "Greedy"
        axis.set(title=f"{mode}, K = {rows[0]['k']}", xlabel="position of the draft", ylim=(0, 105))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(fontsize=9)
    axes[0, 0].set_ylabel("drafts accepted, %")
    return figure


def _training(curves: Mapping[str, Sequence[dict]]) -> Figure:
    """Acceptance length, and acceptance by position, against minutes of training."""
    figure, (lengths, by_position) = plt.subplots(1, 2, figsize=(9.8, 3.7), layout="constrained")
    for method in ("eagle", "eagle3", "peagle"):
        rows = [r for r in curves.get(method, ()) if r.get("acceptance_length")]
        name, color = NAMES[method], COLORS[method]
        minutes = [r["seconds"] / 60 for r in rows]
        lengths.plot(
            minutes, [_acceptance_length(r) for r in rows], "o-", ms=4, color=color, label=name
        )
        for position, line_style in ((0, "-"), (1, "--"), (3, ":")):
            if not rows or position >= len(rows[0]["accepted_per_position"]):
                continue
            shares = [100 * r["accepted_per_position"][position] for r in rows]
            label = f"{name}, position {position + 1}"
            by_position.plot(minutes, shares, line_style, color=color, label=label)
    lengths.set(title="Acceptance length", ylabel="tokens per target forward")
    lengths.set_ylim(bottom=1)
    lengths.legend()
    by_position.set(title="By position", ylabel="drafts accepted, %", ylim=(0, 100))
    by_position.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for axis in (lengths, by_position):
        axis.set_xlabel("minutes of training")
    return figure


def _fresh_head(rows: Sequence[dict]) -> Figure:
    """Loss, and accuracy by depth, of the head that the demo trains itself."""
    figure, (loss_axis, depth_axis) = plt.subplots(1, 2, figsize=(9.8, 3.5), layout="constrained")
    seconds, losses = [r["seconds"] for r in rows], [r["loss"] for r in rows]
    color = COLORS["peagle"]
    loss_axis.plot(seconds, losses, color=PALE["peagle"], lw=1, label="one batch")
    means = statements.running_mean(losses)
    loss_axis.plot(seconds, means, color=color, label="running mean")
    loss_axis.set(title="Loss (KL to the target)", ylabel="nats")
    loss_axis.set_ylim(bottom=0)
    loss_axis.legend(fontsize=8)
    num_depths = max(len(r["accuracy"]) for r in rows)  # deeper ones may join later
    darkest, palest = DARKEST_TO_PALEST
    for depth in range(num_depths):
        share = depth / max(num_depths - 1, 1)
        shade = plt.get_cmap("viridis")(darkest + share * (palest - darkest))
        trained = [r for r in rows if depth < len(r["accuracy"])]
        accuracy = statements.running_mean([100 * r["accuracy"][depth] for r in trained])
        seconds = [r["seconds"] for r in trained]
        depth_axis.plot(seconds, accuracy, color=shade, label=f"{depth}")
    title = "Share of the target's argmaxes, by depth"
    depth_axis.set(title=title, ylabel="%", ylim=(0, 100))
    depth_axis.legend(title="depth", fontsize=8, ncols=2)
    for axis in (loss_axis, depth_axis):
        axis.set_xlabel("seconds of training")
    return figure
