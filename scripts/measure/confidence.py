"""How well a confidence head's confidences are calibrated, before and after `peagle calibrate`.

    .venv/bin/python scripts/measure/confidence.py HEAD [--target peagle_jax/assets/target] \\
        [--record results/confidence.jsonl] [--picture docs/pictures/confidence.png]

Held-out excerpts of Python source are decoded with the head, greedily and at temperature 1. Every
second one calibrates; the others are measured. A row has the expected calibration error (15 bins)
of the chance that a draft is accepted if those before it were, over all positions and for each, and
of the chance that all drafts up to a position are accepted.

The rows also say how well the next steps are foretold: the acceptance length of 32 steps by the 8
steps before them, from what these accepted and from the confidences of their drafts, as the root of
the mean squared error over all such stretches of a prompt.
"""

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import load_pair, text
from peagle_jax.draft.confidence import KINDS
from peagle_jax.pipelines import calibration
from peagle_jax.pipelines.calibration import Outcomes
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.provenance import append_rows

PAST, FUTURE = 8, 32  # steps
COLORS = {"before": "#8d99ae", "after": "#0b6e4f"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("head", type=Path)
    parser.add_argument("--target", type=Path, default=ASSETS / "target")
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    parser.add_argument("--picture", type=Path, help="draw reliability curves to this PNG")
    args = parser.parse_args()
    target, head = load_pair(args.target, args.head)
    prompts = standard_prompts(text.load_tokenizer(args.target), args.num_prompts)
    rows, curves = [], {}
    for kind in KINDS:
        options = {"k": args.k, "kind": kind, "max_new_tokens": args.max_new_tokens}
        fitted, measured = (
            calibration.collect(target, head, prompts[half::2], **options) for half in (0, 1)
        )
        scaling = calibration.fit(fitted)
        for when, used in (("before", None), ("after", scaling)):
            confidence = calibration.confidences(measured, used)
            shape = {"k": args.k, "markov_rank": head.config.markov_rank, "kind": kind}
            counts = {"num_prompts": len(prompts[1::2]), "num_steps": len(measured.num_accepted)}
            row = shape | counts | {"max_new_tokens": args.max_new_tokens, "calibration": when}
            rows.append({"name": "confidence"} | row | errors(measured, confidence))
            reached = calibration.reached_positions(measured)
            accepted = calibration.accepted_positions(measured)
            pooled = confidence[reached], accepted[reached]
            curves[kind, when] = calibration.reliability(*pooled)
        rows[-1]["scaling"] = [[round(x, 4) for x in pair] for pair in scaling]
    Console(width=120).print(table_of(rows))
    if args.picture:
        draw(curves, args.picture)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/confidence.py")


def errors(seen: Outcomes, confidence: np.ndarray) -> dict:
    """The calibration errors of a row, and how well its confidences foretell."""
    reached = calibration.reached_positions(seen)
    accepted = calibration.accepted_positions(seen)
    survival = np.cumprod(confidence, axis=1)
    error, positions = calibration.calibration_error, range(confidence.shape[1])
    by_counts, by_confidence = foretelling(seen, survival)
    return {
        "error": error(confidence[reached], accepted[reached]),
        "error_by_position": [
            error(confidence[reached[:, i], i], accepted[reached[:, i], i]) for i in positions
        ],
        "steps_by_position": reached.sum(axis=0).tolist(),
        "survival_error": error(survival.ravel(), accepted.ravel()),
        "acceptance_length": 1 + float(seen.num_accepted.mean()),
        "expected_acceptance_length": 1 + float(survival.sum(axis=1).mean()),
        "rmse_by_counts": by_counts,
        "rmse_by_confidence": by_confidence,
    }


def foretelling(seen: Outcomes, survival: np.ndarray) -> tuple[float | None, float | None]:
    """Root mean squared errors of the acceptance length of `FUTURE` steps by the `PAST` before.

    Returns:
      That of the steps' counts, and that of their confidences; None where no prompt has as many.
    """
    pairs = []
    for prompt in np.unique(seen.prompt):
        here = seen.prompt == prompt
        counts, expected = seen.num_accepted[here], survival[here].sum(axis=1)
        for start in range(PAST, len(counts) - FUTURE + 1):
            past, future = slice(start - PAST, start), slice(start, start + FUTURE)
            pairs.append((counts[past].mean(), expected[past].mean(), counts[future].mean()))
    if not pairs:
        return None, None
    by_counts, by_confidence, found = np.array(pairs).T
    return tuple(float(np.sqrt(np.mean((x - found) ** 2))) for x in (by_counts, by_confidence))


def table_of(rows: list[dict]) -> Table:
    """Errors in percent."""
    table = Table("decoding", "calibration", "error", "by position", "survival", "length, expected")
    for row in rows:
        by_position = " ".join(f"{100 * x:.1f}" for x in row["error_by_position"])
        lengths = f"{row['acceptance_length']:.2f}, {row['expected_acceptance_length']:.2f}"
        error, survival = (f"{100 * row[name]:.1f} %" for name in ("error", "survival_error"))
        table.add_row(row["kind"], row["calibration"], error, by_position, survival, lengths)
    return table


def draw(curves: dict, path: Path) -> None:
    """Share accepted against confidence, with areas that show how many drafts there were."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(KINDS), figsize=(7.2, 3.6), constrained_layout=True)
    for axis, kind in zip(axes, KINDS, strict=True):
        axis.plot([0, 1], [0, 1], color="#cccccc", linewidth=1)
        for when, color in COLORS.items():
            said, found, count = np.array(curves[kind, when]).T
            axis.plot(said, found, color=color, linewidth=1, label=f"{when} calibration")
            axis.scatter(said, found, s=120 * count / count.max() + 4, color=color, alpha=0.7)
        axis.set_title(f"{kind}", fontsize=10)
        axis.set_xlabel("confidence")
    axes[0].set_ylabel("share of drafts accepted")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
