"""Pictures of a suite's records: one function a picture, each drawing what its file name says. Only running means are computed here."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from peagle_jax.report.records import NAMES

COLORS = {"peagle": "#0b7285", "eagle3": "#e8590c", "none": "#6b7683"}
PALE = {"peagle": "#99d5de", "eagle3": "#fbc19a", "none": "#c9cfd6"}
INK = "#1d2430"
STYLE = {
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


def draw(
    out: Path, records: Sequence[dict], curves: dict[str, Sequence[dict]], fresh: Sequence[dict]
) -> list[tuple[str, str]]:
    """Writes every picture that the data allow.

    Args:
      records: of `bench.suite.run_suite`.
      curves: method -> rows of the metrics.jsonl that its head's training wrote.
      fresh: rows of the metrics of the head that the demo itself trained.

    Returns:
      (file name, caption), in reading order.
    """
    greedy = [r for r in records if r["temperature"] == 0]
    made = []
    with plt.rc_context(STYLE):
        for batch in sorted({r["batch"] for r in greedy}):
            here = [r for r in greedy if r["batch"] == batch]
            made += [_save(out, f"against_k_batch_{batch}", *_against_k(here, batch))]
        made += [_save(out, "break_even", *_break_even(greedy))]
        made += [_save(out, "step", *_step(greedy))]
        made += [_save(out, "acceptance_per_position", *_per_position(records))]
        if any("acceptance_length" in row for rows in curves.values() for row in rows):
            made += [_save(out, "training", *_training(curves))]
        if any("accuracy" in row for row in fresh):
            made += [_save(out, "fresh_head", *_fresh(fresh))]
    return made


def _save(out: Path, name: str, figure, caption: str) -> tuple[str, str]:
    figure.savefig(out / f"{name}.png", bbox_inches="tight")
    plt.close(figure)
    return f"{name}.png", caption


def _series(records, method: str, value) -> tuple[list, list]:
    rows = sorted((r for r in records if r["method"] == method), key=lambda r: r["k"])
    return [r["k"] for r in rows], [value(r) for r in rows]


def _methods(records) -> list[str]:
    return [m for m in ("eagle3", "peagle") if any(r["method"] == m for r in records)]


def _k_axis(axis, records) -> None:
    axis.set_xlabel("K, tokens drafted a step")
    axis.set_xticks(sorted({r["k"] for r in records if r["k"]}))


def _against_k(records, batch: int):
    plain = next(r for r in records if r["method"] == "none")
    panels = (
        ("Acceptance length", "tokens a target forward", lambda r: r["acceptance_length"], None),
        ("Drafting", "ms a step", lambda r: 1e3 * r["draft_seconds"], None),
        (
            "Whole step: draft, verify, accept",
            "ms a step",
            lambda r: 1e3 * r["step_seconds"],
            1e3 * plain["step_seconds"],
        ),
        ("Speed", "tokens/s", lambda r: r["tokens_per_second"], plain["tokens_per_second"]),
    )
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 6.6), layout="constrained")
    for axis, (title, unit, value, line) in zip(axes.flat, panels, strict=True):
        for method in _methods(records):
            axis.plot(
                *_series(records, method, value), "o-", color=COLORS[method], label=NAMES[method]
            )
        if line is not None:
            axis.axhline(line, color=COLORS["none"], ls="--", label=NAMES["none"])
        axis.set(title=title, ylabel=unit)
        axis.set_ylim(bottom=1 if title == "Acceptance length" else 0)
        axis.margins(y=0.12)
        _k_axis(axis, records)
    handles, labels = axes[1, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3)
    return figure, (
        f"Greedy decoding, batch {batch}. P-EAGLE's drafting hardly grows with K, as all K tokens come from one forward; EAGLE-3 needs one "
        "forward a token. Speed is what both make of it, prompts included."
    )


def _break_even(records):
    batches = sorted({r["batch"] for r in records})
    figure, axes = plt.subplots(
        1,
        len(batches),
        figsize=(4.9 * len(batches), 3.7),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axis, batch in zip(axes[0], batches, strict=True):
        here = [r for r in records if r["batch"] == batch]
        for method in _methods(here):
            ks, needed = _series(here, method, lambda r: r["break_even"])
            _, reached = _series(here, method, lambda r: r["acceptance_length"])
            axis.plot(ks, needed, "--", color=COLORS[method], label=f"{NAMES[method]}: needed")
            axis.plot(ks, reached, "o-", color=COLORS[method], label=f"{NAMES[method]}: reached")
        axis.set(title=f"Batch {batch}", ylim=(1, None))
        _k_axis(axis, here)
    axes[0, 0].set_ylabel("acceptance length")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure, (
        "Break-even. Dashed: the acceptance length at which a speculative step costs as much per token as plain decoding, by the measured "
        "cost of whole calls. Solid: what the head reached. A method gains where its solid line lies above its dashed one."
    )


def _step(records):
    """Where a step's time goes, at the smallest batch."""
    batch = min(r["batch"] for r in records)
    here = [r for r in records if r["batch"] == batch]
    plain = next(r for r in here if r["method"] == "none")
    ks, methods = sorted({r["k"] for r in here if r["k"]}), _methods(here)
    figure, axis = plt.subplots(figsize=(9.5, 3.9), layout="constrained")
    width = 0.8 / max(len(methods), 1)
    for i, method in enumerate(methods):
        for j, k in enumerate(ks):
            r = next(r for r in here if r["method"] == method and r["k"] == k)
            x, first = j + (i - (len(methods) - 1) / 2) * width, j == 0
            draft, verify = 1e3 * r["draft_seconds"], 1e3 * r["verify_seconds"]
            rest = max(0.0, 1e3 * r["step_seconds"] - draft - verify)
            axis.bar(
                x,
                draft,
                width * 0.92,
                color=COLORS[method],
                label=f"{NAMES[method]} drafts" if first else None,
            )
            axis.bar(
                x,
                verify,
                width * 0.92,
                bottom=draft,
                color=PALE[method],
                label="target verifies" if first else None,
            )
            axis.bar(
                x,
                rest,
                width * 0.92,
                bottom=draft + verify,
                color="#eef1f4",
                edgecolor="#c9cfd6",
                lw=0.6,
                label="rest: cold caches, acceptance" if first and i == 0 else None,
            )
    axis.axhline(
        1e3 * plain["step_seconds"],
        color=COLORS["none"],
        ls="--",
        label="plain decoding, one token",
    )
    axis.set_xticks(range(len(ks)), [f"K = {k}" for k in ks])
    axis.set(title=f"Where a step's time goes, batch {batch}", ylabel="ms a step")
    axis.legend(fontsize=9, ncols=2)
    return figure, (
        "Drafting and verifying were timed each in its own loop, where part of the weights stays in "
        "the processor's cache; the rest is what a whole step takes more: head and target push each other out."
    )


def _per_position(records):
    sets = [r for r in records if r["method"] != "none" and r["accepted_per_position"]]
    panels = []
    for temperature, title in ((0, "Greedy"), (1, "Temperature 1")):
        here = [r for r in sets if r["temperature"] == temperature]
        if here:
            k = max((r["k"] for r in here if r["k"] <= 8), default=here[0]["k"])
            batch = max(r["batch"] for r in here)
            panels.append((title, [r for r in here if r["k"] == k and r["batch"] == batch]))
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.9 * len(panels), 3.6),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axis, (title, here) in zip(axes[0], panels, strict=True):
        width = 0.8 / len(here)
        for i, r in enumerate(here):
            xs = [p + 1 + (i - (len(here) - 1) / 2) * width for p in range(r["k"])]
            bars = axis.bar(
                xs,
                [100 * a for a in r["accepted_per_position"]],
                width * 0.94,
                color=COLORS[r["method"]],
                label=f"{NAMES[r['method']]}, acceptance length {r['acceptance_length']:.2f}",
            )
            axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
        axis.set(
            title=f"{title}, K = {here[0]['k']}", xlabel="position of the draft", ylim=(0, 105)
        )
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(fontsize=9)
    axes[0, 0].set_ylabel("drafts accepted, %")
    return figure, ("Share of steps in which the draft at each position was accepted.")


def _training(curves):
    figure, axes = plt.subplots(1, 2, figsize=(9.8, 3.7), layout="constrained")
    for method in ("eagle3", "peagle"):
        rows = [r for r in curves.get(method, ()) if r.get("acceptance_length")]
        minutes = [r["seconds"] / 60 for r in rows]
        axes[0].plot(
            minutes,
            [r["acceptance_length"] for r in rows],
            "o-",
            ms=4,
            color=COLORS[method],
            label=NAMES[method],
        )
        for position, style in ((0, "-"), (1, "--"), (3, ":")):
            if rows and position < len(rows[0]["accepted_per_position"]):
                axes[1].plot(
                    minutes,
                    [100 * r["accepted_per_position"][position] for r in rows],
                    style,
                    color=COLORS[method],
                    label=f"{NAMES[method]}, position {position + 1}",
                )
    axes[0].set(
        title="Acceptance length",
        xlabel="minutes of training",
        ylabel="tokens a target forward",
        ylim=(1, None),
    )
    axes[1].set(
        title="By position",
        xlabel="minutes of training",
        ylabel="drafts accepted, %",
        ylim=(0, 100),
    )
    axes[0].legend()
    axes[1].legend(fontsize=8, ncols=2)
    return figure, (
        "How the heads measured above were trained: greedy acceptance on excerpts of held-out files, against minutes of training."
    )


def _fresh(rows):
    rows = [r for r in rows if "accuracy" in r]
    figure, axes = plt.subplots(1, 2, figsize=(9.8, 3.5), layout="constrained")
    losses = [r["loss"] for r in rows]
    axes[0].plot(
        [r["seconds"] for r in rows], losses, color=PALE["peagle"], lw=1, label="one batch"
    )
    axes[0].plot(
        [r["seconds"] for r in rows],
        _running_mean(losses),
        color=COLORS["peagle"],
        label="running mean",
    )
    axes[0].legend(fontsize=8)
    axes[0].set(
        title="Loss (KL to the target)", xlabel="seconds of training", ylabel="nats", ylim=(0, None)
    )
    num_depths = max(len(r["accuracy"]) for r in rows)  # depths may be trained one after the other
    for depth in range(num_depths):
        shade = plt.get_cmap("viridis")(0.9 * depth / max(num_depths - 1, 1))
        seen = [r for r in rows if depth < len(r["accuracy"])]
        axes[1].plot(
            [r["seconds"] for r in seen],
            _running_mean([100 * r["accuracy"][depth] for r in seen]),
            color=shade,
            label=f"{depth}",
        )
    axes[1].set(
        title="Argmax as the target's, by depth",
        xlabel="seconds of training",
        ylabel="%",
        ylim=(0, 100),
    )
    axes[1].legend(title="depth", fontsize=8, ncols=2)
    return figure, (
        "The head that this run trained, to show training; it starts as a copy of the target's last layer. Depth 0 sees a real token and "
        "feature, deeper rows placeholders, which join later and raise the mean loss. Accuracies are running means."
    )


def _running_mean(values: Sequence[float], weight: float = 0.25) -> list[float]:
    """Each value with `weight`, those before it with the rest: single batches of one row are noisy."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else weight * value + (1 - weight) * out[-1])
    return out
