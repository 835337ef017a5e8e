"""The text stage: six kinds of text from the Python standard library, for training and held out."""

import json
import platform
from collections.abc import Sequence
from pathlib import Path

from experiments import texts
from experiments.budgets import Budget
from experiments.stages.cache import Log, Stage
from peagle_jax import corpus
from peagle_jax.atomic_write import write_atomically

HELD_OUT = 0.05  # share of modules that no model is trained on
HELD_OUT_SHARE, HELD_OUT_CHARS = (
    8,
    100_000,
)  # held-out text: an eighth of the budget's, at least so much
LIBRARY_CHARS = 30_000_000  # about what the whole library gives


def text_stage(budget: Budget) -> Stage:
    """train.jsonl and held_out.jsonl: rows of name, kind and text, `budget.chars` of each kind."""

    def make(folder: Path, parents: Sequence[Path], log: Log) -> None:
        train, held_out = corpus.split(corpus.read_corpus(None), HELD_OUT)
        few = budget.chars and max(budget.chars // HELD_OUT_SHARE, HELD_OUT_CHARS)
        _write(folder / "train.jsonl", train, budget.chars)
        _write(folder / "held_out.jsonl", held_out, few)

    config = {
        "chars": budget.chars,
        "held_out": HELD_OUT,
        "python": platform.python_version(),  # whose standard library it is
    }
    return Stage("text", config, (__name__,), (), 8 * (budget.chars or LIBRARY_CHARS), make)


def _write(path: Path, modules: Sequence[corpus.Document], chars: int | None) -> None:
    """All kinds of text of some modules, so many characters of each kind."""
    rows = [
        {"name": document.name, "kind": kind, "text": document.text}
        for kind, documents in texts.by_kind(modules).items()
        for document in corpus.subsample(documents, chars, 0)
    ]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
