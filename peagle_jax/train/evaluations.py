"""Which evaluation of a head was the best so far, and whether to go on."""

from collections.abc import Mapping
from typing import Any


class Evaluations:
    """The acceptance lengths that were measured while a head trains, in the order of their steps.

    A resumed run adds those in its metrics.jsonl, and so decides as a run in one session would.

    Args:
      patience: after so many evaluations without a longer acceptance length training is over;
        None: never.
      patience_from: evaluations up to this step do not use up patience.

    Attributes:
      best_step: of the longest acceptance length, the first of equals; None before there is one.
      best_length: that length.
    """

    def __init__(self, patience: int | None, patience_from: int = 0) -> None:
        self._patience, self._patience_from = patience, patience_from
        self._since_best = 0
        self.best_step: int | None = None
        self.best_length = 0.0

    def add(self, row: Mapping[str, Any]) -> bool:
        """Counts an evaluation.

        Args:
          row: of metrics.jsonl. Where it has no "acceptance_length", or nothing was drafted, it is
            not counted.

        Returns:
          Whether it is the best so far.
        """
        length = row.get("acceptance_length")
        if length is None:
            return False
        if self.best_step is None or length > self.best_length:
            self.best_step, self.best_length, self._since_best = row["step"], length, 0
            return True
        if row["step"] > self._patience_from:
            self._since_best += 1
        return False

    @property
    def is_over(self) -> bool:
        """Whether the patience has run out."""
        return self._patience is not None and self._since_best >= self._patience
