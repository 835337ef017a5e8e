"""Ctrl-C ends a program within two seconds, whatever it is doing.

Python runs the handler of a signal between two of its own instructions, and XLA compiles for
minutes inside one of them. What a handler raises inside a library's callback is printed and
forgotten. So a thread, which the operating system's handler wakes at once, ends the process where
the main thread has not done so itself.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

SECONDS = 1.5  # in which the main thread can end the process itself, and remove temporary files
EXIT_CODE = 1

_num_postponed = 0
_last_words = ""


def postpone_end() -> None:
    """Called by a handler that ends the process itself, later: the signal that it has is not due.

    A further signal, if nobody postpones it, ends the process.
    """
    global _num_postponed
    _num_postponed += 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the process at once where a module is being imported, and else unwinds it.

    An exception in the midst of the initialization of an extension in C++ can abort the process.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _end()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end() -> None:
    print(_last_words, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def ends_promptly(last_words: str) -> Iterator[None]:
    """In this block Ctrl-C raises KeyboardInterrupt, and ends the process if that has no effect.

    Where Ctrl-C is ignored, as in a shell's background job, and outside the main thread, nothing
    changes.

    Args:
      last_words: printed on stderr where the process is ended without an exception.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    global _last_words
    _last_words = last_words
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    has_ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(reading, has_ended), daemon=True)
    watch.start()
    former_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        has_ended.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(former_fd)
        os.close(writing)
        watch.join()
        os.close(reading)


def _watch(reading: int, has_ended: threading.Event) -> None:
    """Waits for signals; ends the process where one stays without effect."""
    num_due = _num_postponed
    while received := os.read(reading, 1):
        if received[0] != signal.SIGINT:
            continue
        num_due += 1
        if has_ended.wait(SECONDS):
            return
        # another handler has not run yet, or it ends the process later
        is_ours = signal.getsignal(signal.SIGINT) is _interrupt
        if is_ours and _num_postponed < num_due:
            _end()
