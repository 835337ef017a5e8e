"""The picture that explains P-EAGLE by one decoding step.

It shows the rows that the head reads, the placeholders among them, and what the target accepts.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from peagle_jax.report.pictures import save

# colors of cells
REAL, PLACEHOLDER, DRAFT = "#d0ebff", "#ffe3b3", "#c3e6e9"
ACCEPTED, CORRECTED, UNUSED = "#b7e4c7", "#f5c2c0", "#e3e7ec"
# colors of texts and lines
INK, SOFT, BORDER = "#1d2430", "#5a6473", "#8d99a8"
BLUE, BROWN, GREEN, RED = "#1864ab", "#8a5600", "#237a35", "#c92a2a"

TOKENS = ("for", "i", "in")  # the target has read all but the last one
DRAFTS = ("range", "(", "n", ")")
WANTED = ("range", "(", "len", "(", "x")  # what the target would write after each token it reads
NUM_ACCEPTED = 2

WIDTH, HEIGHT, GAP = 1.3, 0.62, 0.16  # of cells


def draw_method(out: Path) -> tuple[str, str]:
    """Writes method.png in `out`. Returns (file name, caption)."""
    figure, axis = plt.subplots(figsize=(11, 6.7))
    axis.set(xlim=(-3.7, 10.4), ylim=(0.3, 8.15))
    axis.axis("off")
    _draft(axis)
    _verify(axis)
    _accept(axis)
    save(figure, out / "method.png", dpi=120, bbox_inches="tight")
    caption = (
        "One decoding step with K = 4. EAGLE-3 would need four forwards of the head, one after the "
        "other, and feed each drafted token and hidden state back. P-EAGLE puts placeholders in "
        "their places and needs one forward. The target decides which drafts stay, so the text is "
        "the target's own."
    )
    return "method.png", caption


def _x(column: float | int) -> float:
    """Left edge of a column of cells."""
    return column * (WIDTH + GAP)


def _cell(axis: Axes, column: int, y: float, text: str, color: str, *, bold: bool = False) -> None:
    """A rounded box with a text."""
    shape = "round,pad=0,rounding_size=0.09"
    box = FancyBboxPatch(
        (_x(column), y), WIDTH, HEIGHT, boxstyle=shape, fc=color, ec=BORDER, lw=0.8
    )
    axis.add_patch(box)
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


def _label(axis: Axes, y: float, text: str) -> None:
    """The name of a row of cells, on its left."""
    axis.text(-0.25, y + HEIGHT / 2, text, ha="right", va="center", fontsize=10.5, color=SOFT)


def _note(axis: Axes, column: float, y: float, text: str) -> None:
    """A text on the right of the cells."""
    axis.text(_x(column), y, text, va="center", fontsize=10.5, color=SOFT)


def _title(axis: Axes, y: float, text: str) -> None:
    """The title of one of the three parts."""
    axis.text(-3.6, y, text, ha="left", va="center", fontsize=13, fontweight="bold", color=INK)


def _arrow_down(axis: Axes, column: int, start: float, end: float) -> None:
    """An arrow from one row of cells to another."""
    x = _x(column) + WIDTH / 2
    arrow = FancyArrowPatch(
        (x, start),
        (x, end),
        arrowstyle="-|>",
        mutation_scale=11,
        color=SOFT,
        lw=1.2,
        shrinkA=1,
        shrinkB=1,
    )
    axis.add_patch(arrow)


def _draft(axis: Axes) -> None:
    """Part 1: real rows and placeholders in one forward of the head."""
    _title(axis, 7.85, "1  Draft: ONE forward of the head")
    token_row, hidden_row, draft_row = 6.75, 6.0, 4.75
    _label(axis, token_row, "token")
    _label(axis, hidden_row, "fused aux hidden states")
    _label(axis, draft_row, "drafts")
    for column, (token, next_token) in enumerate(zip(TOKENS[:-1], TOKENS[1:], strict=True)):
        _cell(axis, column, token_row, next_token, REAL)
        _cell(axis, column, hidden_row, f"fc(h[{token}])", REAL)
    for column in range(2, 5):
        _cell(axis, column, token_row, "mask", PLACEHOLDER)
        _cell(axis, column, hidden_row, "fc(shared)", PLACEHOLDER)
    for column, draft in enumerate(DRAFTS, start=1):
        _arrow_down(axis, column, hidden_row, draft_row + HEIGHT)
        _cell(axis, column, draft_row, draft, DRAFT, bold=True)
    placeholders = "placeholders: one learned token, one learned hidden state"
    axis.text(_x(0), 7.47, "real rows", fontsize=10, color=BLUE)
    axis.text(_x(2), 7.47, placeholders, fontsize=10, color=BROWN)
    _note(
        axis,
        5.15,
        6.4,
        "EAGLE-3 has no placeholders:\n"
        "it runs the head 4 times, and\n"
        "feeds each token it drafted\n"
        "back into the next run.",
    )


def _verify(axis: Axes) -> None:
    """Part 2: what the target reads, and what it would write after each token."""
    _title(axis, 4.1, "2  Verify: ONE forward of the target over K + 1 tokens")
    read_row, wanted_row = 3.2, 2.1
    _label(axis, read_row, "reads")
    _label(axis, wanted_row, "would write itself")
    for column, token in enumerate((TOKENS[-1], *DRAFTS)):
        _cell(axis, column, read_row, token, REAL if column == 0 else DRAFT)
    for column, wanted in enumerate(WANTED):
        _arrow_down(axis, column, read_row, wanted_row + HEIGHT)
        color = _wanted_color(column)
        _cell(axis, column, wanted_row, wanted, color, bold=column <= NUM_ACCEPTED)
    # each wanted token is compared with the draft one column to the right, up to a difference
    y = (read_row + wanted_row + HEIGHT) / 2
    for column in range(NUM_ACCEPTED):
        _sign(axis, column, y, "=", GREEN)
    _sign(axis, NUM_ACCEPTED, y, "≠", RED)


def _wanted_color(column: int) -> str:
    """Of a token that the target would write."""
    if column < NUM_ACCEPTED:
        return ACCEPTED
    return CORRECTED if column == NUM_ACCEPTED else UNUSED


def _sign(axis: Axes, column: int, y: float, sign: str, color: str) -> None:
    """Whether a wanted token equals the draft that was read one column to its right."""
    axis.text(
        _x(column + 1) - GAP / 2,
        y,
        sign,
        ha="center",
        va="center",
        fontsize=14,
        color=color,
        fontweight="bold",
    )


def _accept(axis: Axes) -> None:
    """Part 3: the tokens that the step writes."""
    title = "3  Accept: drafts up to the first difference, and the target's own token there"
    _title(axis, 1.45, title)
    y = 0.45
    _label(axis, y, "written")
    for column in range(NUM_ACCEPTED):
        _cell(axis, column, y, DRAFTS[column], ACCEPTED, bold=True)
    _cell(axis, NUM_ACCEPTED, y, WANTED[NUM_ACCEPTED], CORRECTED, bold=True)
    _note(
        axis,
        3.15,
        y + HEIGHT / 2,
        "3 tokens from one target forward: acceptance length 3.\n"
        "Rejected drafts are rolled back by shortening the caches.",
    )
