"""Progress of long work: a bar on a terminal, a line every half minute elsewhere.

Everything goes to stderr, so that what a command prints on stdout can be piped.
"""

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

INTERVAL = 30.0  # seconds between two lines where stderr is not a terminal


class ProgressReport:
    """Context manager that shows how far a piece of work is.

    Args:
      label: what is being done, for example "train peagle".
      total: units of work in all; None while it is not known.
      completed: units that an earlier session has done.
      unit: what is counted, for example "steps".
    """

    def __init__(self, label: str, total: int | None, completed: int = 0, unit: str = "") -> None:
        self.label, self.total, self.completed, self.unit = label, total, completed, unit
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._started_at = self._printed_at = time.monotonic()
        self._completed_before = completed
        self._note = ""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._printer: threading.Thread | None = None

    def __enter__(self) -> "ProgressReport":
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                # rich would print stdout's lines above the bar, on stderr: wrong for a pipe
                redirect_stdout=sys.stdout.isatty(),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                self.label, total=self.total, completed=self.completed, note=""
            )
        else:
            self._printer = threading.Thread(target=self._print_lines, daemon=True)
            self._printer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._bar is not None:
            self._bar.stop()
        if self._printer is not None:
            self._printer.join()

    def update(self, completed: int, *, total: int | None = None, note: str = "") -> None:
        """Reports that `completed` units are done.

        Args:
          completed: since the very beginning, not since the last call.
          total: replaces the total given before.
          note: a few words to show beside it, for example "loss 2.31".
        """
        self.completed = completed
        self.total = self.total if total is None else total
        self._note = note
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, total=self.total, note=note)
        else:
            self._print_if_due()

    def _print_lines(self) -> None:
        """Runs in a thread of its own: a compilation takes minutes in which nobody calls update."""
        while not self._is_over.wait(self._printed_at + INTERVAL - time.monotonic()):
            self._print_if_due()

    def _print_if_due(self) -> None:
        """Prints a line where the last one is half a minute old."""
        now = time.monotonic()
        with self._lock:
            if now - self._printed_at < INTERVAL:
                return
            self._printed_at = now
        print(self._line(now), file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        """One line of plain text: how much is done, and how long the rest will take."""
        of_total = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{self.label}: {self.completed:,}{of_total} {self.unit}".rstrip()]
        if self._note:
            parts.append(self._note)
        done = self.completed - self._completed_before
        if self.total is not None and done > 0:
            seconds = (self.total - self.completed) * (now - self._started_at) / done
            parts.append(f"about {duration(max(seconds, 0.0))} left")
        return ", ".join(parts)


def duration(seconds: int | float) -> str:
    """A time in whole minutes, or in seconds where it is less than one and a half minutes."""
    number, unit = (seconds, "second") if seconds < 90 else (seconds / 60, "minute")
    rounded = round(number)
    return f"{rounded} {unit}" if rounded == 1 else f"{rounded} {unit}s"
