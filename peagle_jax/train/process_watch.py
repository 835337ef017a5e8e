"""Names a process that has died to the others that train with it.

JAX ends the others by itself, after a heartbeat timeout, but names a process as a task that is
counted from 0, and the first one, at which all meet, not at all. So every process leaves a sign of
life every few seconds, and reads those of the others.
"""

import atexit
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # where Orbax and Flax, too, find the processes' common notes

BEAT_SECONDS = 2.0
# A process is silent after so many beats of another one without a new sign. They are counted, and
# no seconds: a machine that stood still, and all processes with it, has missed no beat.
SILENT_BEATS = 10
FOLDER = "peagle_jax/signs_of_life/"
NEXT_STEP = "look at what it says; when all have ended, the same commands go on"


def watch_processes() -> None:
    """Begins to watch, in a thread, until this process ends. JAX's processes have joined before."""
    state = distributed.global_state
    ended = threading.Event()
    atexit.register(ended.set)  # before JAX leaves the others, whose signs end then
    arguments = state.client, state.process_id, state.num_processes, _say_on_stderr, ended
    threading.Thread(target=_watch, args=arguments, name="process watch", daemon=True).start()


def _say_on_stderr(line: str) -> None:
    print(f"peagle: {line}", file=sys.stderr, flush=True)


def _watch(
    client: Any, number: int, count: int, say: Callable[[str], None], ended: threading.Event
) -> None:
    """Leaves signs and reads those of the others, until `ended` is set. Names each at most once.

    Args:
      client: of the processes' common notes.
      number, count: of this process, from 0, and of all.
    """
    signs: dict[str, str] = {}
    beats_without = dict.fromkeys(set(range(count)) - {number}, 0)
    beat = 0
    while not ended.wait(BEAT_SECONDS):
        beat += 1
        try:
            client.key_value_set(f"{FOLDER}{number}", str(beat), allow_overwrite=True)
            newest = dict(client.key_value_dir_get(FOLDER))
        except jax.errors.JaxRuntimeError:
            if not ended.is_set():
                say(_line(0, count, "not reached, where all processes meet"))
            return
        for other in sorted(beats_without):
            key = f"{FOLDER}{other}"
            is_new = newest.get(key) != signs.get(key)
            beats_without[other] = 0 if is_new else beats_without[other] + 1
            if beats_without[other] == SILENT_BEATS and not ended.is_set():
                seconds = SILENT_BEATS * BEAT_SECONDS
                say(_line(other, count, f"not heard of for {seconds:.0f} s"))
        signs = newest


def _line(number: int, count: int, got: str) -> str:
    rule = "all processes must live until training ends"
    return f"--process {number + 1}/{count}: {rule}; got {got}; {NEXT_STEP}"
