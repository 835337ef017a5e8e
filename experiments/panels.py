"""Panels of an experiment's pictures: each draws one thing into one axis of matplotlib."""

import contextlib
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from experiments.findings import GROUPS, Finding, Findings
from experiments.published import EAGLE3_POSITIONS, LENGTH_BY_K, PEAGLE_POSITIONS
from experiments.statistics import Comparison, Interval, interval
from peagle_jax.report.plots import INK

Color = str | tuple[float, ...]

# EAGLE-3 is orange and red wherever it is drawn, P-EAGLE never is
SHADES = {
    "peagle": ("#0b7285", "#5c7cfa", "#2b8a3e", "#9c36b5", "#868e96", "#74b816", "#1b3a8a"),
    "eagle3": ("#e8590c", "#c92a2a", "#f08c00", "#a61e4d", "#d9a441", "#8d4b2a", "#ff8787"),
    "eagle": ("#5f3dc4", "#9775fa"),
}
GRAY, PURPLE, PLAIN_BAR = "#868e96", "#9c36b5", "#4f7f8f"
GROUP_STYLE = {"structured": ("#1864ab", "s"), "code": ("#6b7683", "o"), "open": ("#d6336c", "^")}
PUBLISHED = {  # published acceptance per position that is drawn beside ours, by experiment
    "against_eagle3": (
        (PEAGLE_POSITIONS, SHADES["peagle"][0]),
        (EAGLE3_POSITIONS, SHADES["eagle3"][0]),
    ),
    "speculation_depth": ((PEAGLE_POSITIONS, GRAY),),
}
MAX_LINES = (
    7  # variants that lines of different colors can tell apart; more become a table of colors
)
LENGTH = "acceptance length, tokens per target forward"
SHARE = "drafts accepted, %"
DASHED = (0, (4, 3))


def colors_of(variants: Sequence[Finding]) -> list[Color]:
    """One color for each variant, by method; shades of one scale where variants are many."""
    if len(variants) > MAX_LINES:
        return scale(len(variants))
    num_used = {method: 0 for method in SHADES}
    colors: list[Color] = []
    for variant in variants:
        shades = SHADES[variant.method]
        colors.append(shades[num_used[variant.method] % len(shades)])
        num_used[variant.method] += 1
    return colors


def scale(count: int) -> list[Color]:
    """Shades of one scale, dark to light."""
    viridis = plt.get_cmap("viridis")
    return [viridis(0.92 * i / max(1, count - 1)) for i in range(count)]


# ---------------------------------------------------------------- one row per variant


def length_bars(
    axis: Axes, variants: Sequence[Finding], colors: Sequence[Color], reference: Finding | None
) -> None:
    """Acceptance length with its interval, and the single seeds as dots."""
    ys, values = np.arange(len(variants)), np.array([v.length.value for v in variants])
    axis.barh(ys, values - 1, left=1, height=0.62, color=colors, alpha=0.85)
    ends = np.array([_ends(v.length) for v in variants]).T
    axis.errorbar(values, ys, xerr=ends, fmt="none", ecolor=INK, elinewidth=1.2, capsize=3)
    for y, variant in zip(ys, variants, strict=True):
        seeds = list(variant.length.by_seed.values())
        axis.plot(seeds, [y + 0.17] * len(seeds), "o", ms=4, mfc="white", mec=INK, mew=0.8)
    end = max(max(v.length.high, v.length.range[1]) for v in variants)
    for y, value in zip(ys, values, strict=True):
        axis.annotate(
            f"{value:.2f}",
            (end, y),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
        )
    if reference:
        axis.axvline(reference.length.value, color=INK, lw=0.9, ls=DASHED)
    axis.set(xlim=(1, 1 + (end - 1) * 1.16), xlabel=LENGTH)
    axis.set_title("Acceptance length")


def group_dots(axis: Axes, variants: Sequence[Finding]) -> None:
    """Acceptance length by kind of text, in the rows of the bars."""
    for group, offset in zip(GROUPS, (-0.24, 0.0, 0.24), strict=True):
        rows = [(y, v.groups[group]) for y, v in enumerate(variants) if group in v.groups]
        if rows:
            color, marker = GROUP_STYLE[group]
            places = [y + offset for y, _ in rows]
            intervals(axis, places, [i for _, i in rows], color, marker, group, sideways=True)
    axis.set(xlabel=LENGTH)
    axis.set_xlim(left=1)
    axis.set_title("By kind of text")


def differences(
    axis: Axes, findings: Findings, variants: Sequence[Finding], colors: Sequence[Color]
) -> None:
    """Paired differences to the reference, in the rows of the bars."""
    for y, (variant, color) in enumerate(zip(variants, colors, strict=True)):
        comparison = variant.against
        if comparison and len(comparison.by_seed) > 1:
            _difference(axis, y, comparison, color, 1, sideways=True)
            seeds = list(comparison.by_seed.values())
            axis.plot(seeds, [y + 0.2] * len(seeds), "o", ms=3.5, mfc="white", mec=INK, mew=0.7)
    axis.axvline(0, color=INK, lw=0.9, ls=DASHED)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set(xlabel="tokens per target forward")
    axis.set_title(f"Minus {findings.experiment.reference}")


def position_table(axis: Axes, variants: Sequence[Finding]) -> None:
    """Acceptance by position as a table of colors, a row for each variant, beside its bar."""
    k = max(len(v.positions) for v in variants)
    shares = np.full((len(variants), k), np.nan)
    for row, variant in zip(shares, variants, strict=True):
        row[: len(variant.positions)] = 100 * np.array(variant.positions)
    axis.imshow(
        shares,
        aspect="auto",
        cmap="YlGnBu",
        vmin=0,
        vmax=100,
        extent=(0.5, k + 0.5, len(variants) - 0.5, -0.5),
    )
    for (y, x), share in np.ndenumerate(shares):
        if not np.isnan(share):
            color = "white" if share > 60 else INK
            place = {"ha": "center", "va": "center", "fontsize": 9}
            axis.text(x + 1, y, f"{share:.0f}", color=color, **place)
    axis.set(xlabel="position of the draft")
    axis.set_xticks(range(1, k + 1))
    axis.grid(False)
    axis.set_title("By position: drafts accepted, %")


# ---------------------------------------------------------------- by position


def position_differences(
    axis: Axes, findings: Findings, variants: Sequence[Finding], colors: Sequence[Color]
) -> None:
    """Differences to the reference at each position of the draft.

    An acceptance length can stay equal while the first position wins and the late ones lose.
    """
    for i, (variant, color) in enumerate(zip(variants, colors, strict=True)):
        offset = 0.6 * ((i + 0.5) / len(variants) - 0.5)
        for position, comparison in enumerate(variant.against_by_position, 1):
            label = variant.name if position == 1 else None
            _difference(axis, position + offset, comparison, color, 100, label=label)
    axis.axhline(0, color=INK, lw=0.9, ls=DASHED)
    axis.set(xlabel="position of the draft", ylabel="percentage points of all drafts")
    axis.set_xticks(range(1, max(len(v.against_by_position) for v in variants) + 1))
    axis.grid(False, axis="x")
    axis.set_title(f"By position, minus {findings.experiment.reference}")
    # many entries would hide what they name
    is_beside = len(variants) > 4
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.02)} if is_beside else {}
    axis.legend(fontsize=8, **beside)


def _difference(
    axis: Axes,
    place: float,
    comparison: Comparison,
    color: Color,
    unit: float,
    *,
    sideways: bool = False,
    label: str | None = None,
) -> None:
    """One difference with its interval, filled where it is called better or worse.

    Args:
      place: on the other axis.
      unit: 100 for percentage points.
      sideways: differences lie on the x axis.
    """
    value = unit * comparison.difference
    ends = unit * np.array(
        [
            [comparison.difference - comparison.low],
            [comparison.high - comparison.difference],
        ]
    )
    style = {
        "fmt": "o",
        "ms": 5,
        "color": color,
        "mfc": "white" if comparison.verdict == "within noise" else color,
        "elinewidth": 1.2,
        "capsize": 2.5,
        "label": label,
    }
    if sideways:
        axis.errorbar(value, place, xerr=ends, **style)
    else:
        axis.errorbar(place, value, yerr=ends, **style)


def position_lines(
    axis: Axes,
    findings: Findings,
    variants: Sequence[Finding],
    colors: Sequence[Color],
    labels: Sequence[str],
) -> str:
    """Acceptance by position, a line for each variant.

    Returns:
      What the caption must add: the sources of published lines.
    """
    is_curve = findings.experiment.kind == "curve"
    both_methods = is_curve and len({v.method for v in variants}) > 1
    for variant, color, label in zip(variants, colors, labels, strict=True):
        style = "s--" if both_methods and variant.method == "eagle3" else "o-"
        places = range(1, len(variant.positions) + 1)
        shares = [100 * share for share in variant.positions]
        axis.plot(places, shares, style, ms=4, color=color, label=label)
    caption, k = "", max(len(v.positions) for v in variants)
    for number, color in PUBLISHED.get(findings.experiment.name, ()):
        label = f"published: {number.what} ({number.source})"
        axis.plot(number.at, number.values, ":", lw=1.6, color=color, alpha=0.75, label=label)
        caption = f" Dotted, by position: {number.source}; what differs: {number.differs}."
        k = max(k, *number.at)
    axis.set(xlabel="position of the draft", ylabel=SHARE, ylim=(0, None))
    axis.set_xticks(range(1, k + 1))
    axis.set_title("By position")
    legend = {"fontsize": 8, "title_fontsize": 8}
    if is_curve:
        legend["title"] = findings.experiment.axis
    if len(variants) > MAX_LINES:  # so many lines leave no room inside
        legend |= {"loc": "upper left", "bbox_to_anchor": (1.0, 1.02)}
    axis.legend(**legend)
    return caption


# ---------------------------------------------------------------- curves


def intervals(
    axis: Axes,
    places: Sequence[float],
    values: Sequence[Interval],
    color: Color,
    marker: str,
    label: str,
    *,
    line: str = "",
    sideways: bool = False,
) -> None:
    """Values with their intervals, joined by a line where `line` names a style."""
    ends = np.array([_ends(value) for value in values]).T
    style = {
        "fmt": marker + line,
        "ms": 5,
        "color": color,
        "elinewidth": 1.1,
        "capsize": 2.5,
        "label": label,
    }
    middles = [value.value for value in values]
    if sideways:
        axis.errorbar(middles, places, xerr=ends, **style)
    else:
        axis.errorbar(places, middles, yerr=ends, **style)


def _ends(length: Interval) -> tuple[float, float]:
    """How far an interval reaches to either side of its value."""
    return length.value - length.low, length.high - length.value


def sampled_drafts(axis: Axes, variants: Sequence[Finding]) -> None:
    """What was also measured with sampled drafts: the same K, beside its argmax drafts."""
    places, lengths = [], []
    for variant in variants:
        measurements = variant.rows[0]["measurements"]
        # rows of several versions may have fewer measurements than the first one
        fewest = min(len(row["measurements"]) for row in variant.rows)
        for number, measurement in enumerate(measurements[1:fewest], 1):
            if _differs_in_sampled_drafts(measurements[0], measurement):
                with contextlib.suppress(ValueError):  # those of one number do not fit each other
                    lengths.append(interval(variant.rows, measurement=number))
                    places.append(variant.x)
    if places:
        intervals(axis, places, lengths, PURPLE, "D", "drafts sampled too", line="--")


def _differs_in_sampled_drafts(first: Mapping, other: Mapping) -> bool:
    """Whether a measurement samples its drafts, and is otherwise the first, which does not."""
    keys = ("k", "temperature", "on_text", "prompt_tokens", "max_new_tokens")
    is_alike = all(first.get(key) == other.get(key) for key in keys)
    return is_alike and bool(other.get("sample_drafts")) and not first.get("sample_drafts")


def published_lengths(axis: Axes) -> str:
    """The published acceptance length by K. Returns what the caption must add."""
    number = LENGTH_BY_K
    label = f"published: GPT-OSS-20B ({number.source})"
    axis.plot(number.at, number.values, "D:", ms=4, color=GRAY, label=label)
    return f" Dotted: {number.source}; what differs: {number.differs}."


def x_axis(axis: Axes, places: Sequence[float]) -> None:
    """Ticks at the measured places where their numbers have room.

    The axis is logarithmic where equal steps would press most of them together.
    """
    xs = sorted(set(places))
    if len(xs) > 2 and xs[0] > 0 and xs[-1] / xs[0] >= 16:
        axis.set_xscale("log")
    on_axis = np.log(xs) if axis.get_xscale() == "log" else np.array(xs, float)
    shown = [0]
    for i in range(1, len(xs)):
        last = shown[-1]
        num_letters = len(f"{xs[i]:g}") + len(f"{xs[last]:g}")
        room = 0.03 + 0.012 * num_letters  # a share of the axis, for two half labels
        if on_axis[i] - on_axis[last] >= room * (on_axis[-1] - on_axis[0]):
            shown.append(i)
    axis.set_xticks([xs[i] for i in shown], [f"{xs[i]:g}" for i in shown])
    axis.set_xticks([], minor=True)
