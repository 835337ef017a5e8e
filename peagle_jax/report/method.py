"""The picture that explains the method: the rows a head reads, its placeholders, and what the target makes of the drafts."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

REAL, SHARED, DRAFT, GOOD, BAD, TARGET = (
    "#d0ebff",
    "#ffe3b3",
    "#c3e6e9",
    "#b7e4c7",
    "#f5c2c0",
    "#e3e7ec",
)
INK, SOFT = "#1d2430", "#5a6473"
TOKENS = ("for", "i", "in")  # read by the target; the last one was sampled but not read yet
DRAFTS, WANTED = ("range", "(", "n", ")"), ("range", "(", "len", "(", "x")
ACCEPTED = 2
WIDTH, HEIGHT, GAP = 1.3, 0.62, 0.16


def draw_method(out: Path) -> tuple[str, str]:
    """Writes method.png. Returns (file name, caption)."""
    figure, axis = plt.subplots(figsize=(11, 6.7))
    axis.set(xlim=(-3.7, 10.4), ylim=(0.3, 8.15))
    axis.axis("off")
    _draft(axis)
    _verify(axis)
    _accept(axis)
    figure.savefig(out / "method.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    caption = (
        "One decoding step with K = 4. EAGLE-3 would fill the four draft rows one forward after the other, feeding each drafted token and "
        "hidden state back; P-EAGLE puts placeholders there and fills them in one forward. The target decides what stays, so the text is "
        "the target's own."
    )
    return "method.png", caption


def _x(column: float | int) -> float:
    return column * (WIDTH + GAP)


def _cell(axis, column: int, y: float, text: str, color: str, *, bold=False) -> None:
    shape = "round,pad=0,rounding_size=0.09"
    axis.add_patch(
        FancyBboxPatch(
            (_x(column), y), WIDTH, HEIGHT, boxstyle=shape, fc=color, ec="#8d99a8", lw=0.8
        )
    )
    axis.text(
        _x(column) + WIDTH / 2,
        y + HEIGHT / 2,
        text,
        ha="center",
        va="center",
        fontsize=11 if len(text) < 9 else 10,
        color=INK,
        fontweight="bold" if bold else None,
    )


def _label(axis, y: float, text: str) -> None:
    axis.text(-0.25, y + HEIGHT / 2, text, ha="right", va="center", fontsize=10.5, color=SOFT)


def _title(axis, y: float, text: str) -> None:
    axis.text(-3.6, y, text, ha="left", va="center", fontsize=13, fontweight="bold", color=INK)


def _arrow(axis, x0, y0, x1, y1, color=SOFT) -> None:
    axis.add_patch(
        FancyArrowPatch(
            (x0, y0),
            (x1, y1),
            arrowstyle="-|>",
            mutation_scale=11,
            color=color,
            lw=1.2,
            shrinkA=1,
            shrinkB=1,
        )
    )


def _draft(axis) -> None:
    _title(axis, 7.85, "1  Draft: ONE forward of the head")
    token, feature, drafted = 6.75, 6.0, 4.75
    _label(axis, token, "token")
    _label(axis, feature, "fused target features")
    _label(axis, drafted, "drafts")
    for column, (read, after) in enumerate(zip(TOKENS[:-1], TOKENS[1:], strict=True)):
        _cell(axis, column, token, after, REAL)
        _cell(axis, column, feature, f"fc(h[{read}])", REAL)
    for column in range(2, 5):
        _cell(axis, column, token, "mask", SHARED)
        _cell(axis, column, feature, "fc(shared)", SHARED)
    for i, text in enumerate(DRAFTS):
        _arrow(axis, _x(i + 1) + WIDTH / 2, feature, _x(i + 1) + WIDTH / 2, drafted + HEIGHT)
        _cell(axis, i + 1, drafted, text, DRAFT, bold=True)
    axis.text(_x(0), 7.47, "real rows", fontsize=10, color="#1c6fb5")
    axis.text(
        _x(2),
        7.47,
        "placeholders: one learned token, one learned hidden state",
        fontsize=10,
        color="#a86a00",
    )
    other = "EAGLE-3 has no placeholders:\nit runs the head 4 times, and\nfeeds each token it drafted\nback into the next run."
    axis.text(_x(5.15), 6.4, other, va="center", fontsize=10.5, color=SOFT)


def _verify(axis) -> None:
    _title(axis, 4.1, "2  Verify: ONE forward of the target over K + 1 tokens")
    read, wanted = 3.2, 2.1
    _label(axis, read, "reads")
    _label(axis, wanted, "would write itself")
    for i, text in enumerate((TOKENS[-1], *DRAFTS)):
        _cell(axis, i, read, text, REAL if i == 0 else DRAFT)
    for i, text in enumerate(WANTED):
        good = i < ACCEPTED
        _arrow(axis, _x(i) + WIDTH / 2, read, _x(i) + WIDTH / 2, wanted + HEIGHT)
        _cell(
            axis,
            i,
            wanted,
            text,
            GOOD if good else BAD if i == ACCEPTED else TARGET,
            bold=i <= ACCEPTED,
        )
        if i < len(DRAFTS):  # compared with the draft one column on
            sign, color = (
                ("=", "#2b8a3e") if good else ("≠", "#c92a2a") if i == ACCEPTED else ("", SOFT)
            )
            axis.text(
                _x(i + 1) - GAP / 2,
                (read + wanted + HEIGHT) / 2,
                sign,
                ha="center",
                va="center",
                fontsize=14,
                color=color,
                fontweight="bold",
            )


def _accept(axis) -> None:
    _title(
        axis, 1.45, "3  Accept: drafts up to the first difference, and the target's own token there"
    )
    y = 0.45
    _label(axis, y, "emitted")
    for i in range(ACCEPTED):
        _cell(axis, i, y, DRAFTS[i], GOOD, bold=True)
    _cell(axis, ACCEPTED, y, WANTED[ACCEPTED], BAD, bold=True)
    said = "3 tokens from one target forward: acceptance length 3.\nCaches keep their slots; their length moves back."
    axis.text(_x(3.15), y + HEIGHT / 2, said, va="center", fontsize=10.5, color=SOFT)
