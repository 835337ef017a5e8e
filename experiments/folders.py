"""Where experiments read and write by default."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHE = Path("runs/experiments")  # targets, hidden states, heads
RESULTS = Path("results/experiments")  # rows; git tracks them
SMOKE_CACHE, SMOKE_RESULTS = Path("runs/experiments-smoke"), Path("runs/experiments-smoke/results")


def default_cache(budget: str) -> Path:
    """The folder of a budget's caches, where --cache names none."""
    return SMOKE_CACHE if budget == "smoke" else CACHE


def default_results(budget: str) -> Path:
    """The folder of a budget's rows, where --results names none.

    Smoke runs only show that everything works. Their rows stay out of the results that git tracks.
    """
    return SMOKE_RESULTS if budget == "smoke" else RESULTS
