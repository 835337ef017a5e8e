"""Names a process that has died to the others that train with it.

JAX ends the others by itself, after a heartbeat timeout, but names a process as a task that is
counted from 0, and the first one, at which all meet, not at all. So every process leaves a sign of
life every few seconds, and reads those of the others.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # where Orbax and Flax, too, find the processes' common notes

BEAT_SECONDS, SILENT_SECONDS = 2.0, 20.0
NEXT_STEP = "look at what it says, and start all again: they go on from the last checkpoint"


def watch_processes(say: Callable[[str], None] | None = None) -> None:
    """Begins to watch, in a thread, until this process ends.

    Args:
      say: is told of a process that is silent, once; None: a line on stderr.
    """
    ended = threading.Event()
    atexit.register(ended.set)  # before JAX leaves the others, whose signs end then
    client, number, count = (
        distributed.global_state.client,
        jax.process_index(),
        jax.process_count(),
    )
    arguments = client, number, count, say or _say_on_stderr, ended
    threading.Thread(target=_watch, args=arguments, name="process watch", daemon=True).start()


def _say_on_stderr(line: str) -> None:
    print(f"peagle: {line}", file=sys.stderr, flush=True)


def _watch(
    client: Any, number: int, count: int, say: Callable[[str], None], ended: threading.Event
) -> None:
    """Leaves signs and reads those of the others, until `ended` is set or one of them is silent.

    Args:
      client: of the processes' common notes.
      number, count: of this process, from 0, and of all.
    """
    began = time.monotonic()
    others = [i for i in range(count) if i != number]
    last_signs: dict[int, tuple[str, float]] = {i: ("", began) for i in others}
    beat = 0
    while not ended.wait(BEAT_SECONDS):
        beat += 1
        try:
            client.key_value_set(_key(number), str(beat), allow_overwrite=True)
            for i in others:
                sign, now = _read(client, i), time.monotonic()
                if sign != last_signs[i][0]:
                    last_signs[i] = sign, now
                elif now - last_signs[i][1] > SILENT_SECONDS and not ended.is_set():
                    silent = f"not heard of for {now - last_signs[i][1]:.0f} s"
                    say(_line(i, count, silent))
                    return
        except jax.errors.JaxRuntimeError:
            if not ended.is_set():
                say(_line(0, count, "not reached, where all processes meet"))
            return


def _line(number: int, count: int, got: str) -> str:
    name = f"--process {number + 1}/{count}"
    return f"{name}: all processes must live until training ends; got {got}; {NEXT_STEP}"


def _key(number: int) -> str:
    return f"peagle_jax/signs_of_life/{number}"


def _read(client: Any, number: int) -> str:
    """The last sign of a process; empty before its first."""
    try:
        return client.key_value_try_get(_key(number))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return ""
        raise
