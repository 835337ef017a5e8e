"""The memory that a process takes at most, watched by a thread of its own from /proc."""

import threading
from pathlib import Path


class PeakMemory:
    """The peak beyond what the process has now.

    Args:
      seconds: between two looks.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._before = self._peak = _memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[int, int]:
        """Ends the watch.

        Returns:
          Bytes of the process's own (anonymous) memory, and of all that is resident, mapped files
          included, which the system may drop at any time.
        """
        self._done.set()
        self._thread.join()
        own, resident = (1024 * (p - b) for p, b in zip(self._peak, self._before, strict=True))
        return own, resident

    def _watch(self) -> None:
        while not self._done.wait(self._seconds):
            own, resident = _memory()
            self._peak = max(self._peak[0], own), max(self._peak[1], resident)


def _memory() -> tuple[int, int]:
    """Kilobytes: own, resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["RssAnon"].split()[0]), int(fields["VmRSS"].split()[0])
