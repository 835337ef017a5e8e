"""What a run writes down while it trains: metrics.jsonl, and the time of its steps."""

import json
import os
import time
from pathlib import Path
from typing import TextIO

from peagle_jax import weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.train.mesh import is_first_process
from peagle_jax.train.trackers import Trackers
from peagle_jax.types import InputError


class TrainingClock:
    """Times a session of training, in three ways that differ in what they leave out.

    1. `session`: since the session began. It ends runs that have a time limit (`max_seconds`).
    2. `run`: this and all earlier sessions. It is the "seconds" of metrics.jsonl.
    3. `stepping`: without compilation. Tokens per second are computed from it.

    Evaluation is left out of all three, so that evaluating more often changes no training curve.

    Args:
      seconds_before: of the sessions before this one.
    """

    def __init__(self, seconds_before: float) -> None:
        self._seconds_before = seconds_before
        self._began = time.perf_counter()
        self._evaluating = 0.0
        self._compiling = 0.0

    def session(self) -> float:
        return time.perf_counter() - self._began - self._evaluating

    def run(self) -> float:
        return round(self._seconds_before + self.session(), 3)

    def stepping(self) -> float:
        return self.session() - self._compiling

    def leave_out_evaluation(self, seconds: float) -> None:
        self._evaluating += seconds

    def leave_out_compilation(self, seconds: float) -> None:
        self._compiling += seconds


class MetricsLog:
    """metrics.jsonl of a run: a row of JSON for each logged step and each evaluation.

    Rows past the step that a run resumes from are dropped, because they will be written again. Of
    several processes the first writes; the others only read what is there.

    Args:
      path: the file.
      resume_step: the step that the run resumes from; 0 for a new run.
      trackers: to which every row is sent, too; None: none.

    Attributes:
      rows: that the sessions before had written, up to `resume_step`.
      seconds: that they had spent by then.
    """

    def __init__(self, path: Path, resume_step: int, trackers: Trackers | None = None) -> None:
        self.path = path if is_first_process() else Path(os.devnull)
        self._trackers = trackers
        self._file: TextIO | None = None
        self.rows: list[dict] = []
        if path.is_file():
            self.rows = [row for row in _whole_rows(path) if row["step"] <= resume_step]
            if is_first_process():
                write_atomically(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.seconds: float = max((row["seconds"] for row in self.rows), default=0.0)

    def __enter__(self) -> "MetricsLog":
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            self._trackers.close()

    def write(self, row: dict) -> None:
        """Appends a row; it is in the file when this returns."""
        if self._file is None:
            raise ValueError("metrics are written inside a with statement")
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._trackers is not None:
            self._trackers.log(row)


def _whole_rows(path: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl, of which a killed session may have left half a line.

    Raises:
      InputError: a whole line is no row.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.endswith(b"}"):
            continue
        where, next_step = f"{path}:{number}", "remove the line"
        row = weights.parse_json(line, where, "the line", next_step)
        numbers = row.get("step"), row.get("seconds")
        if not all(type(number) in (int, float) for number in numbers):
            rule = "a row of metrics needs step and seconds"
            raise InputError(where, rule, ", ".join(row) or "an empty row", next_step)
        rows.append(row)
    return rows
