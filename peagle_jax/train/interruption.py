"""Ctrl-C and SIGTERM during training: the step is finished and saved before the process ends."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

from peagle_jax.prompt_end import postpone_end


class Interruption:
    """Context manager that turns the first SIGINT or SIGTERM into a request to stop.

    An exception in the middle of an update would lose the training state, because the update has
    already taken over its arrays. So the loop asks `is_requested` after each step. A second signal
    ends the process as it would without this class. Outside the main thread, where Python allows
    no handlers, nothing changes.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._received: int | None = None
        self._handlers: dict[int, Any] = {}

    @property
    def is_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._received is not None

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {n: signal.signal(n, self._remember) for n in self.SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore_handlers()

    def deliver(self) -> None:
        """Lets the signal that arrived, if any, do what it does without this class."""
        if self._received is not None:
            signal.raise_signal(self._received)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGINT:
            postpone_end()
        self._restore_handlers()
        print("stopping: this step is finished and saved first", file=sys.stderr, flush=True)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
