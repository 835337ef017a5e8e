"""Pictures of an experiment: acceptance length, the same by kind of text, acceptance by position, and how its heads were trained."""

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.findings import GROUPS, Finding, Findings
from experiments.published import EAGLE3_POSITIONS, LENGTH_BY_K, PEAGLE_POSITIONS
from experiments.statistics import Comparison, interval
from peagle_jax.report.plots import INK, STYLE
from peagle_jax.report.records import NAMES

# EAGLE-3 is orange and red wherever it is drawn, P-EAGLE never is
SHADES = {
    "peagle": ("#0b7285", "#5c7cfa", "#2b8a3e", "#9c36b5", "#868e96", "#74b816", "#1b3a8a"),
    "eagle3": ("#e8590c", "#c92a2a", "#f08c00", "#a61e4d", "#d9a441", "#8d4b2a", "#ff8787"),
}
GROUP_STYLE = {"structured": ("#1864ab", "s"), "code": ("#6b7683", "o"), "open": ("#d6336c", "^")}
FAINT = "#c3cad3"
PUBLISHED = {  # positions drawn beside ours: in which experiment, and how
    "against_eagle3": (
        (PEAGLE_POSITIONS, SHADES["peagle"][0]),
        (EAGLE3_POSITIONS, SHADES["eagle3"][0]),
    ),
    "speculation_depth": ((PEAGLE_POSITIONS, "#868e96"),),
}
LINES = 7  # variants that lines of different colours can tell apart; more become a table of colours
LENGTH, SHARE = "acceptance length, tokens a target forward", "drafts accepted, %"


def draw(found: Findings, out: Path) -> list[tuple[str, str]]:
    """Writes `<experiment>.png` and `<experiment>_training.png`, where there is something to draw.

    Returns:
      (file name, caption) of each.
    """
    name, shown, made = found.experiment.name, [v for v in found.variants if v.length], []
    with plt.rc_context(
        STYLE
        | {
            "font.size": 10,
            "axes.titlesize": 11,
            "figure.facecolor": "white",
            "text.parse_math": False,
        }
    ):
        curve = found.experiment.kind == "curve"
        on_axis = [v for v in shown if v.x is not None] if curve else shown
        if on_axis:
            made.append(_save(out / f"{name}.png", *(_curve if curve else _bars)(found, on_axis)))
        trained = [v for v in found.variants if any(row["curve"] for row in v.rows)]
        if trained:
            made.append(_save(out / f"{name}_training.png", *_training(found, trained)))
    return made


def _save(path: Path, figure: Figure, caption: str) -> tuple[str, str]:
    """Whole or not at all, like every file here."""
    data = io.BytesIO()
    figure.savefig(data, format="png", bbox_inches="tight")
    plt.close(figure)
    work = path.with_name(f".{path.name}.tmp")
    work.write_bytes(data.getvalue())
    work.replace(path)
    return path.name, caption


def _colors(variants: Sequence[Finding]) -> list:
    """One a variant; by method, and for many variants shades of one scale."""
    if len(variants) > LINES:
        return [
            plt.get_cmap("viridis")(0.92 * i / (len(variants) - 1)) for i in range(len(variants))
        ]
    seen = {method: 0 for method in SHADES}
    out = []
    for v in variants:
        out.append(SHADES[v.method][seen[v.method]])
        seen[v.method] += 1
    return out


def _bars(found: Findings, variants: Sequence[Finding]) -> tuple[Figure, str]:
    wide = len(variants) > LINES
    compared = [v for v in variants if v.against and len(v.against.by_seed) > 1]
    figure, axes = plt.subplots(
        1,
        4 if compared else 3,
        figsize=(17.5 if compared else 14, max(3.4, 1.5 + 0.4 * len(variants))),
        layout="constrained",
        width_ratios=(1.15, *([0.85] if compared else []), 0.9, 1.2),
    )
    lengths, *differences, groups, positions = axes
    ys, reference = (
        np.arange(len(variants)),
        next((v for v in variants if v.name == found.experiment.reference), None),
    )
    colors = ["#4f7f8f"] * len(variants) if wide else _colors(variants)
    _length_bars(lengths, variants, colors, reference)
    for name, offset in zip(GROUPS, (-0.24, 0.0, 0.24), strict=True):
        at = [(y, v.groups[name]) for y, v in zip(ys, variants, strict=True) if name in v.groups]
        if at:
            _intervals(
                groups,
                [y + offset for y, _ in at],
                [i for _, i in at],
                *GROUP_STYLE[name],
                name,
                sideways=True,
            )
    groups.set(xlabel=LENGTH)
    groups.set_xlim(left=1)
    for axis in (lengths, *differences, groups, *([positions] if wide else [])):
        axis.set_ylim(len(variants) - 0.45, -0.55)
        axis.grid(False, axis="y")
        axis.set_yticks(ys, [""] * len(ys))
        axis.tick_params(axis="y", length=0)
    labels = lengths.set_yticks(
        ys, [f"{v.name} (reference)" if v is reference else v.name for v in variants]
    )
    for tick, v in zip(labels, variants, strict=True):
        tick.label1.set_fontweight("bold" if v is reference else "normal")
    groups.set_title("By kind of text")
    caption = (
        _what(found)
        + " Bars: pooled over seeds and prompts, with 95 % intervals; dots: single seeds; dashed: the reference."
    )
    if compared:
        _differences(*differences, found, variants, colors)
        caption += " Differences are paired, same prompts and same seeds; filled where the interval leaves out 0."
    if wide:
        _position_table(positions, variants)
    elif (
        compared and found.experiment.name != "against_eagle3"
    ):  # whose published positions are drawn beside ours
        _position_differences(
            positions,
            found,
            [(v, c) for v, c in zip(variants, colors, strict=True) if v in compared],
        )
    else:
        caption += _position_lines(positions, found, variants, colors, [v.name for v in variants])
    _titles(axes)
    return figure, caption


def _length_bars(axis, variants: Sequence[Finding], colors, reference: Finding | None) -> None:
    ys, values = np.arange(len(variants)), np.array([v.length.value for v in variants])
    axis.barh(ys, values - 1, left=1, height=0.62, color=colors, alpha=0.85)
    ends = [(v.length.value - v.length.low, v.length.high - v.length.value) for v in variants]
    axis.errorbar(
        values, ys, xerr=np.array(ends).T, fmt="none", ecolor=INK, elinewidth=1.2, capsize=3
    )
    for y, v in zip(ys, variants, strict=True):
        seeds = list(v.length.by_seed.values())
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
        axis.axvline(reference.length.value, color=INK, lw=0.9, ls=(0, (4, 3)))
    axis.set(xlim=(1, 1 + (end - 1) * 1.16), xlabel=LENGTH)
    axis.set_title("Acceptance length")


def _differences(axis, found: Findings, variants: Sequence[Finding], colors) -> None:
    """Paired differences to the reference, in the rows of the bars."""
    for y, (v, color) in enumerate(zip(variants, colors, strict=True)):
        if v.against and len(v.against.by_seed) > 1:
            _difference(axis, y, v.against, color, 1, sideways=True)
            axis.plot(
                list(v.against.by_seed.values()),
                [y + 0.2] * len(v.against.by_seed),
                "o",
                ms=3.5,
                mfc="white",
                mec=INK,
                mew=0.7,
            )
    axis.axvline(0, color=INK, lw=0.9, ls=(0, (4, 3)))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set(xlabel="tokens a target forward")
    axis.set_title(f"Minus {found.experiment.reference}")


def _position_differences(axis, found: Findings, variants: Sequence[tuple[Finding, str]]) -> None:
    """The same by position: an acceptance length can stay equal while the first position wins and the late ones lose."""
    for i, (v, color) in enumerate(variants):
        for position, comparison in enumerate(v.at):
            x = position + 1 + 0.6 * ((i + 0.5) / len(variants) - 0.5)
            _difference(axis, x, comparison, color, 100, label=v.name if position == 0 else None)
    axis.axhline(0, color=INK, lw=0.9, ls=(0, (4, 3)))
    axis.set(xlabel="position of the draft", ylabel="percentage points of all drafts")
    axis.set_xticks(range(1, max(len(v.at) for v, _ in variants) + 1))
    axis.grid(False, axis="x")
    axis.set_title(f"By position, minus {found.experiment.reference}")
    axis.legend(fontsize=8)


def _difference(
    axis,
    place: float,
    c: Comparison,
    color,
    unit: float,
    *,
    sideways: bool = False,
    label: str | None = None,
) -> None:
    ends = unit * np.array([[c.difference - c.low], [c.high - c.difference]])
    how = {
        "fmt": "o",
        "ms": 5,
        "color": color,
        "mfc": "white" if c.word == "within noise" else color,
        "elinewidth": 1.2,
        "capsize": 2.5,
    }
    at, error = (
        ((unit * c.difference, place), "xerr")
        if sideways
        else ((place, unit * c.difference), "yerr")
    )
    axis.errorbar(*at, **{error: ends}, **how, label=label)


def _position_table(axis, variants: Sequence[Finding]) -> None:
    """A row a variant, beside its bar."""
    k = max(len(v.positions) for v in variants)
    shares = np.full((len(variants), k), np.nan)
    for row, v in zip(shares, variants, strict=True):
        row[: len(v.positions)] = 100 * np.array(v.positions)
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
            axis.text(
                x + 1,
                y,
                f"{share:.0f}",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if share > 60 else INK,
            )
    axis.set(xlabel="position of the draft")
    axis.set_xticks(range(1, k + 1))
    axis.grid(False)
    axis.set_title("By position: drafts accepted, %")


def _position_lines(
    axis, found: Findings, variants: Sequence[Finding], colors, labels: Sequence[str]
) -> str:
    """A line a variant. Returns what the caption must add."""
    several = len({v.method for v in variants}) > 1 and found.experiment.kind == "curve"
    for v, color, label in zip(variants, colors, labels, strict=True):
        style = "s--" if several and v.method == "eagle3" else "o-"
        axis.plot(
            range(1, len(v.positions) + 1),
            [100 * p for p in v.positions],
            style,
            ms=4,
            color=color,
            label=label,
        )
    said, k = "", max(len(v.positions) for v in variants)
    for number, color in PUBLISHED.get(found.experiment.name, ()):
        axis.plot(
            number.at,
            number.values,
            ":",
            lw=1.6,
            color=color,
            alpha=0.75,
            label=f"published: {number.what} ({number.source})",
        )
        said, k = (
            f" Dotted, by position: {number.source}; what differs: {number.differs}.",
            max(k, *number.at),
        )
    axis.set(xlabel="position of the draft", ylabel=SHARE, ylim=(0, None))
    axis.set_xticks(range(1, k + 1))
    axis.set_title("By position")
    beside = (
        {"loc": "upper left", "bbox_to_anchor": (1.0, 1.02)} if len(variants) > LINES else {}
    )  # so many lines leave no room inside
    axis.legend(
        fontsize=8,
        title_fontsize=8,
        title=found.experiment.axis if found.experiment.kind == "curve" else None,
        **beside,
    )
    return said


def _curve(found: Findings, variants: Sequence[Finding]) -> tuple[Figure, str]:
    figure, (lengths, groups, positions) = plt.subplots(
        1, 3, figsize=(14, 4.3), layout="constrained"
    )
    variants = sorted(variants, key=lambda v: v.x)
    methods = [m for m in NAMES if any(v.method == m for v in variants)]
    for method in methods:
        here = [v for v in variants if v.method == method]
        label = NAMES[method] if len(methods) > 1 else "ours"
        _intervals(
            lengths,
            [v.x for v in here],
            [v.length for v in here],
            SHADES[method][0],
            "o",
            label,
            line="-",
        )
        for v in here:
            seeds = list(v.length.by_seed.values())
            lengths.plot(
                [v.x] * len(seeds),
                seeds,
                "o",
                ms=3.5,
                mfc="white",
                mec=SHADES[method][0],
                mew=0.8,
                zorder=3,
            )
        for group in GROUPS:
            at = [v for v in here if group in v.groups]
            label = f"{group}, {NAMES[method]}" if len(methods) > 1 else group
            line = "--" if method == "eagle3" and len(methods) > 1 else "-"
            if at:
                _intervals(
                    groups,
                    [v.x for v in at],
                    [v.groups[group] for v in at],
                    *GROUP_STYLE[group],
                    label,
                    line=line,
                )
    _sampled_drafts(lengths, variants)
    said = _published_lengths(lengths) if found.experiment.name == "speculation_depth" else ""
    for v in variants:
        if v.name == found.experiment.reference:
            lengths.plot(
                [v.x], [v.length.value], "o", ms=12, mfc="none", mec=INK, mew=1.2, label="reference"
            )
    for axis in (lengths, groups):
        _x_axis(axis, [v.x for v in variants])
        axis.set(xlabel=found.experiment.axis, ylim=(1, None))
    lengths.set(ylabel=LENGTH)
    lengths.set_title("Acceptance length")
    groups.set_title("By kind of text")
    shades = [
        plt.get_cmap("viridis")(0.92 * i / max(1, len(variants) - 1)) for i in range(len(variants))
    ]
    places = [v.x for v in variants]
    names = [
        (f"{v.x:g}" if places.count(v.x) == 1 else v.name)
        + (f" {NAMES[v.method]}" if len(methods) > 1 else "")
        for v in variants
    ]
    said += _position_lines(positions, found, variants, shades, names)
    _titles((lengths, groups, positions))
    return (
        figure,
        _what(found)
        + " Filled: pooled over seeds and prompts, with 95 % intervals; small circles: single seeds."
        + said,
    )


def _sampled_drafts(axis, variants: Sequence[Finding]) -> None:
    """Of what was also measured with sampled drafts: the same K, beside its argmax drafts."""
    at = []
    for v in variants:
        for number, one in enumerate(v.rows[0]["measured"]):
            if one.get("sample_drafts") and one["k"] == v.rows[0]["measured"][0]["k"]:
                at.append((v.x, interval(v.rows, measurement=number)))
    if at:
        _intervals(
            axis,
            [x for x, _ in at],
            [i for _, i in at],
            "#9c36b5",
            "D",
            "drafts sampled too",
            line="--",
        )


def _published_lengths(axis) -> str:
    axis.plot(
        LENGTH_BY_K.at,
        LENGTH_BY_K.values,
        "D:",
        ms=4,
        color="#868e96",
        label=f"published: GPT-OSS-20B ({LENGTH_BY_K.source})",
    )
    return f" Dotted: {LENGTH_BY_K.source}; what differs: {LENGTH_BY_K.differs}."


def _intervals(
    axis,
    places,
    intervals,
    color,
    marker: str,
    label: str,
    *,
    line: str = "",
    sideways: bool = False,
) -> None:
    values = [i.value for i in intervals]
    ends = np.array([(i.value - i.low, i.high - i.value) for i in intervals]).T
    how = {
        "fmt": marker + line,
        "ms": 5,
        "color": color,
        "elinewidth": 1.1,
        "capsize": 2.5,
        "label": label,
    }
    axis.errorbar(values, places, xerr=ends, **how) if sideways else axis.errorbar(
        places, values, yerr=ends, **how
    )


def _x_axis(axis, xs: Sequence[float]) -> None:
    """Ticks at the measured places where their numbers have room; logarithmic where equal steps would press most of them together."""
    xs = sorted(set(xs))
    if len(xs) > 2 and xs[0] > 0 and xs[-1] / xs[0] >= 16:
        axis.set_xscale("log")
    place = np.log(xs) if axis.get_xscale() == "log" else np.array(xs, float)
    shown: list[int] = []
    for i in range(len(xs)):
        room = (
            0.03 + 0.012 * (len(f"{xs[i]:g}") + len(f"{xs[shown[-1]]:g}")) if shown else 0.0
        )  # of the axis, for two half labels
        if not shown or place[i] - place[shown[-1]] >= room * (place[-1] - place[0]):
            shown.append(i)
    axis.set_xticks([xs[i] for i in shown], [f"{xs[i]:g}" for i in shown])
    axis.set_xticks([], minor=True)


def _titles(axes) -> None:
    """Titles in one line, and between them and all axes but the last their legends, where no data can be."""
    counts = [len(axis.get_legend_handles_labels()[1]) for axis in axes[:-1]]
    lines = max(0 if n < 2 else 1 if n <= 3 else (n + 1) // 2 for n in counts)
    for axis in axes:
        axis.set_title(axis.get_title("left"), pad=6 + 17 * lines)
    for axis, n in zip(axes[:-1], counts, strict=True):
        if n > 1:
            axis.legend(
                loc="lower left",
                bbox_to_anchor=(-0.02, 0.99),
                ncols=3 if n <= 3 else 2,
                fontsize=8.5,
                columnspacing=1.2,
                handletextpad=0.4,
            )


def _what(found: Findings) -> str:
    """What was measured, in words."""
    first = [row["measured"][0] for row in found.rows]

    def each(key):
        return sorted({m[key] for m in first})

    def said(values):
        return ", ".join(f"{v:g}" for v in values)

    how = ["greedy" if t == 0 else f"temperature {t:g}" for t in each("temperature")]
    prompts = said(sorted({len(m["prompts"]) for m in first}))
    return (
        f"K = {said(each('k'))}, {' and '.join(how)}, {said(each('new_tokens'))} new tokens after {said(each('prompt_tokens'))}, "
        f"{prompts} prompts, seeds {said(sorted({row['seed'] for row in found.rows}))}."
    )


def _training(found: Findings, variants: Sequence[Finding]) -> tuple[Figure, str]:
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.2), layout="constrained")
    colors = _colors(variants)
    panels = (
        ("Loss, as each variant defines it", "loss", lambda s: s["loss"]),
        (
            "Argmax as the target's, depth 0",
            "%",
            lambda s: 100 * s["accuracy"][0] if s["accuracy"] else np.nan,
        ),
        (
            "The same, mean of the depths after it",
            "%",
            lambda s: 100 * float(np.mean(s["accuracy"][1:])) if s["accuracy"][1:] else np.nan,
        ),
    )
    for axis, (title, unit, value) in zip(axes, panels, strict=True):
        for v, color in zip(variants, colors, strict=True):
            steps: dict[int, list[float]] = {}
            for row in v.rows:
                for step in row["curve"]:
                    steps.setdefault(step["step"], []).append(value(step))
            xs = sorted(steps)
            axis.plot(xs, [float(np.mean(steps[x])) for x in xs], color=color, lw=1.3, label=v.name)
        axis.set(title=title, xlabel="training step", ylabel=unit)
        if unit == "%":
            axis.set_ylim(bottom=0)
    columns = max(
        1, min(len(variants), 190 // (8 + max(len(v.name) for v in variants)))
    )  # the figure is some 190 letters wide
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=columns,
        fontsize=8.5,
    )
    return (
        figure,
        "Training, mean of the seeds. Depth 0 reads a real token and feature; later depths read placeholders (EAGLE-3: its own).",
    )
