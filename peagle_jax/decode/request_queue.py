"""The requests of an engine that wait, and those that nobody wants any more."""

import collections
import itertools
import threading
from collections.abc import Iterable

from peagle_jax.decode.rows import Row


class RequestQueue:
    """Rows in the order in which they came. Any thread may add and cancel, one takes them out."""

    def __init__(self) -> None:
        # other threads add requests while a step looks at those that wait
        self._rows: collections.deque[Row] = collections.deque()
        self._cancelled: set[int] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        """Puts a row behind the others."""
        with self._lock:
            self._rows.append(row)

    def first(self, count: int) -> list[Row]:
        """The first rows, `count` at most, which stay here."""
        with self._lock:
            return list(itertools.islice(self._rows, count))

    def remove(self, rows: Iterable[Row]) -> None:
        """Takes rows out."""
        with self._lock:
            for row in rows:
                self._rows.remove(row)

    def take_all(self) -> list[Row]:
        """Takes out all rows that somebody still wants."""
        with self._lock:
            wanted = [row for row in self._rows if row.id not in self._cancelled]
        self.remove(wanted)
        return wanted

    def cancel(self, request_id: int) -> None:
        """Marks a request that nobody wants any more, wherever it is."""
        self._cancelled.add(request_id)

    def is_cancelled(self, request_id: int) -> bool:
        """Whether it was cancelled, and not answered since."""
        return request_id in self._cancelled

    def take_cancelled(self, entering: list[Row]) -> list[Row]:
        """Takes out the rows that were cancelled while they waited.

        Args:
          entering: rows whose prompts are being read together. They are read to their end, unless
            all were cancelled, and are among the result then.
        """
        if not self._cancelled:
            return []
        cancelled = set(self._cancelled)
        with self._lock:
            leaving = [row for row in self._rows if row.id in cancelled]
        self.remove(leaving)
        if {row.id for row in entering} <= cancelled:
            leaving += entering
        self._cancelled -= {row.id for row in leaving}
        return leaving

    def forget_cancelled(self, others: Iterable[Row]) -> None:
        """Drops the numbers of requests that are neither here nor among `others`."""
        if not self._cancelled:
            return
        cancelled = set(self._cancelled)  # first, because another thread may add and cancel one
        with self._lock:
            known = {row.id for row in (*self._rows, *others)}
        self._cancelled -= cancelled - known
