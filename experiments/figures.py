"""Pictures of an experiment.

Each has acceptance length, the same by kind of text, and acceptance by position. A second picture
shows how the heads were trained.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import panels
from experiments.findings import GROUPS, Finding, Findings
from experiments.panels import GROUP_STYLE, LENGTH, MAX_LINES, PLAIN_BAR, SHADES
from peagle_jax.report.pictures import save
from peagle_jax.report.plots import INK, STYLE
from peagle_jax.report.records import NAMES

LETTERS = 190  # that fit side by side below a picture of training curves


def draw(findings: Findings, out: Path) -> list[tuple[str, str]]:
    """Writes `<experiment>.png` and `<experiment>_training.png`, where there is something to draw.

    Returns:
      File name and caption of each.
    """
    name, is_curve = findings.experiment.name, findings.experiment.kind == "curve"
    shown = [v for v in findings.variants if v.length and not (is_curve and v.x is None)]
    trained = [v for v in findings.variants if any(row["curve"] for row in v.rows)]
    style = STYLE | {
        "font.size": 10,
        "axes.titlesize": 11,
        "figure.facecolor": "white",
        "text.parse_math": False,
    }
    pictures = []
    with plt.rc_context(style):
        if shown:
            figure, caption = (_curve if is_curve else _bars)(findings, shown)
            pictures.append(_save(out / f"{name}.png", figure, caption))
        if trained:
            figure, caption = _training(trained)
            pictures.append(_save(out / f"{name}_training.png", figure, caption))
    return pictures


def _save(path: Path, figure: Figure, caption: str) -> tuple[str, str]:
    save(figure, path, bbox_inches="tight")
    return path.name, caption


# ---------------------------------------------------------------- bars


def _bars(findings: Findings, variants: Sequence[Finding]) -> tuple[Figure, str]:
    """A row for each variant."""
    are_many = len(variants) > MAX_LINES
    compared = [v for v in variants if v.against and len(v.against.by_seed) > 1]
    reference = next((v for v in variants if v.name == findings.experiment.reference), None)
    colors = [PLAIN_BAR] * len(variants) if are_many else panels.colors_of(variants)

    figure, axes = plt.subplots(
        1,
        4 if compared else 3,
        figsize=(17.5 if compared else 14, max(3.4, 1.5 + 0.4 * len(variants))),
        layout="constrained",
        width_ratios=(1.15, *([0.85] if compared else []), 0.9, 1.2),
    )
    lengths, *differences, groups, positions = axes
    panels.length_bars(lengths, variants, colors, reference)
    panels.group_dots(groups, variants)
    _row_axes([lengths, *differences, groups, *([positions] if are_many else [])], len(variants))
    _row_labels(lengths, variants, reference)
    caption = (
        f"{_measured(findings)} Bars: pooled over seeds and prompts, with 95 % intervals; dots: "
        "single seeds; dashed: the reference."
    )
    if compared:
        panels.differences(*differences, findings, variants, colors)
        caption += (
            " Differences are paired, same prompts and same seeds; filled where they are called "
            "better or worse."
        )
    # of against_eagle3, published acceptance by position is drawn beside ours
    if are_many:
        panels.position_table(positions, variants)
    elif compared and findings.experiment.name != "against_eagle3":
        compared_colors = [c for v, c in zip(variants, colors, strict=True) if v in compared]
        panels.position_differences(positions, findings, compared, compared_colors)
    else:
        names = [v.name for v in variants]
        caption += panels.position_lines(positions, findings, variants, colors, names)
    _titles(axes)
    return figure, caption


def _row_axes(axes: Sequence[Axes], num_rows: int) -> None:
    """Axes whose rows are variants."""
    for axis in axes:
        axis.set_ylim(num_rows - 0.45, -0.55)
        axis.grid(False, axis="y")
        axis.set_yticks(range(num_rows), [""] * num_rows)
        axis.tick_params(axis="y", length=0)


def _row_labels(axis: Axes, variants: Sequence[Finding], reference: Finding | None) -> None:
    names = [f"{v.name} (reference)" if v is reference else v.name for v in variants]
    for tick, variant in zip(axis.set_yticks(range(len(variants)), names), variants, strict=True):
        tick.label1.set_fontweight("bold" if variant is reference else "normal")


# ---------------------------------------------------------------- curves


def _curve(findings: Findings, variants: Sequence[Finding]) -> tuple[Figure, str]:
    """The variants along an axis."""
    experiment = findings.experiment
    figure, (lengths, groups, positions) = plt.subplots(
        1, 3, figsize=(14, 4.3), layout="constrained"
    )
    variants = sorted(variants, key=lambda v: v.x)
    methods = [method for method in NAMES if any(v.method == method for v in variants)]
    for method in methods:
        of_method = [v for v in variants if v.method == method]
        _length_curve(lengths, of_method, NAMES[method] if len(methods) > 1 else "ours")
        _group_curves(groups, of_method, NAMES[method] if len(methods) > 1 else None)
    panels.sampled_drafts(lengths, variants)
    caption = (
        f"{_measured(findings)} Filled: pooled over seeds and prompts, with 95 % intervals; small "
        "circles: single seeds."
    )
    if experiment.name == "speculation_depth":
        caption += panels.published_lengths(lengths)
    for variant in variants:
        if variant.name == experiment.reference:
            circle = {"ms": 12, "mfc": "none", "mec": INK, "mew": 1.2, "label": "reference"}
            lengths.plot([variant.x], [variant.length.value], "o", **circle)
    for axis in (lengths, groups):
        panels.x_axis(axis, [v.x for v in variants])
        axis.set(xlabel=experiment.axis, ylim=(1, None))
    lengths.set(ylabel=LENGTH)
    lengths.set_title("Acceptance length")
    groups.set_title("By kind of text")
    labels = _curve_labels(variants, several_methods=len(methods) > 1)
    shades = panels.scale(len(variants))
    caption += panels.position_lines(positions, findings, variants, shades, labels)
    _titles((lengths, groups, positions))
    return figure, caption


def _length_curve(axis: Axes, variants: Sequence[Finding], label: str) -> None:
    """Acceptance length of one method's variants, and the single seeds as circles."""
    color = SHADES[variants[0].method][0]
    places, values = [v.x for v in variants], [v.length for v in variants]
    panels.intervals(axis, places, values, color, "o", label, line="-")
    for variant in variants:
        seeds = list(variant.length.by_seed.values())
        circles = {"ms": 3.5, "mfc": "white", "mec": color, "mew": 0.8, "zorder": 3}
        axis.plot([variant.x] * len(seeds), seeds, "o", **circles)


def _group_curves(axis: Axes, variants: Sequence[Finding], method_name: str | None) -> None:
    """Acceptance length of one method's variants by kind of text.

    Args:
      method_name: None where there is only one method.
    """
    for group in GROUPS:
        measured = [v for v in variants if group in v.groups]
        if not measured:
            continue
        color, marker = GROUP_STYLE[group]
        places, values = [v.x for v in measured], [v.groups[group] for v in measured]
        label = f"{group}, {method_name}" if method_name else group
        line = "--" if method_name and variants[0].method == "eagle3" else "-"
        panels.intervals(axis, places, values, color, marker, label, line=line)


def _curve_labels(variants: Sequence[Finding], several_methods: bool) -> list[str]:
    """The place on the axis, or the name where two variants share a place."""
    places = [v.x for v in variants]
    labels = []
    for variant in variants:
        label = f"{variant.x:g}" if places.count(variant.x) == 1 else variant.name
        labels.append(f"{label} {NAMES[variant.method]}" if several_methods else label)
    return labels


def _titles(axes: Sequence[Axes]) -> None:
    """Titles in one line.

    Between the titles and all axes but the last are their legends, where no data can be.
    """
    counts = [len(axis.get_legend_handles_labels()[1]) for axis in axes[:-1]]
    num_lines = max(_num_legend_lines(count) for count in counts)
    for axis in axes:
        axis.set_title(axis.get_title("left"), pad=6 + 17 * num_lines)
    for axis, count in zip(axes[:-1], counts, strict=True):
        if count > 1:
            axis.legend(
                loc="lower left",
                bbox_to_anchor=(-0.02, 0.99),
                ncols=3 if count <= 3 else 2,
                fontsize=8.5,
                columnspacing=1.2,
                handletextpad=0.4,
            )


def _num_legend_lines(count: int) -> int:
    """Lines that a legend of so many entries takes: none for one entry, and up to 3 on one line."""
    if count < 2:
        return 0
    return 1 if count <= 3 else (count + 1) // 2


def _measured(findings: Findings) -> str:
    """What the first measurement of all runs was, in words."""
    first = [row["measurements"][0] for row in findings.rows]

    def values(key: str) -> list:
        return sorted({measurement[key] for measurement in first})

    def words(numbers: Sequence[float]) -> str:
        return ", ".join(f"{number:g}" for number in numbers)

    sampling = ["greedy" if t == 0 else f"temperature {t:g}" for t in values("temperature")]
    if any(measurement.get("on_text") for measurement in first):
        sampling.append("expected along the target's text")
    num_prompts = sorted({len(measurement["prompts"]) for measurement in first})
    seeds = sorted({row["seed"] for row in findings.rows})
    return (
        f"K = {words(values('k'))}, {' and '.join(sampling)}, {words(values('max_new_tokens'))} "
        f"new tokens after {words(values('prompt_tokens'))}, {words(num_prompts)} prompts, seeds "
        f"{words(seeds)}."
    )


# ---------------------------------------------------------------- training


def _loss(step: Mapping) -> float:
    return step["loss"]


def _first_accuracy(step: Mapping) -> float:
    """How often the head's argmax is the target's at depth 0, in percent."""
    return 100 * step["accuracy"][0] if step["accuracy"] else np.nan


def _later_accuracy(step: Mapping) -> float:
    """The same, mean of the other depths."""
    later = step["accuracy"][1:]
    return 100 * float(np.mean(later)) if later else np.nan


TRAINING_PANELS: tuple[tuple[str, str, Callable[[Mapping], float]], ...] = (
    ("Loss, as each variant defines it", "loss", _loss),
    ("Argmax as the target's, depth 0", "%", _first_accuracy),
    ("The same, mean of the depths after it", "%", _later_accuracy),
)


def _training(variants: Sequence[Finding]) -> tuple[Figure, str]:
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.2), layout="constrained")
    colors = panels.colors_of(variants)
    for axis, (title, unit, value) in zip(axes, TRAINING_PANELS, strict=True):
        for variant, color in zip(variants, colors, strict=True):
            steps, means = _mean_curve(variant, value)
            axis.plot(steps, means, color=color, lw=1.3, label=variant.name)
        axis.set(title=title, xlabel="training step", ylabel=unit)
        if unit == "%":
            axis.set_ylim(bottom=0)
    num_fitting = LETTERS // (8 + max(len(v.name) for v in variants))
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=max(1, min(len(variants), num_fitting)),
        fontsize=8.5,
    )
    caption = (
        "Training, mean of the seeds. Depth 0 reads a real token and hidden state; later depths "
        "read placeholders (EAGLE-3: its own)."
    )
    return figure, caption


def _mean_curve(
    variant: Finding, value: Callable[[Mapping], float]
) -> tuple[list[int], list[float]]:
    """Logged steps of a variant's trainings, and the mean of its seeds at each."""
    values: dict[int, list[float]] = {}
    for row in variant.rows:
        for step in row["curve"]:
            values.setdefault(step["step"], []).append(value(step))
    steps = sorted(values)
    return steps, [float(np.mean(values[step])) for step in steps]
