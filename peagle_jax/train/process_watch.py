"""Names a process that has died to the others that train with it.

JAX ends the others by itself, after a heartbeat timeout, but names a process as a task that is
counted from 0; and on a CPU their next computation fails before, with a traceback that names
nobody. So every process leaves a sign of life every few seconds, and reads those of the others.
The loss of the first process, at which all meet, ends the others at once: JAX says that "the leader
task" died, and nobody has time to say more.
"""

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed  # where Orbax and Flax, too, find the processes' common notes

BEAT_SECONDS = 2.0
# A process is silent after so many beats of another one without a new sign. They are counted, and
# no seconds: a machine that stood still, and all processes with it, has missed no beat.
SILENT_BEATS = 10
FOLDER = "peagle_jax/signs_of_life/"
NEXT_STEP = "look at what it says; when all have ended, the same commands go on"


@contextlib.contextmanager
def watched_processes() -> Iterator[None]:
    """Names dead processes meanwhile, in a line on stderr each.

    Where a computation fails because of one, waits until it was named.

    Raises:
      SystemExit: 1, in the place of such a failure.
    """
    state = distributed.global_state
    if state.client is None or state.num_processes < 2:
        yield
        return
    ended, named = threading.Event(), threading.Event()
    atexit.register(ended.set)  # before JAX leaves the others, whose signs end then

    def say(line: str) -> None:
        print(f"peagle: {line}", file=sys.stderr, flush=True)
        named.set()

    arguments = state.client, state.process_id, state.num_processes, say, ended
    threading.Thread(target=_watch, args=arguments, name="process watch", daemon=True).start()
    try:
        yield
    except jax.errors.JaxRuntimeError:
        if named.wait(BEAT_SECONDS * (SILENT_BEATS + 2)):
            raise SystemExit(1) from None
        raise
    finally:
        ended.set()


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
            return  # the first process is gone, and JAX ends this one
        for other in sorted(beats_without):
            key = f"{FOLDER}{other}"
            is_new = newest.get(key) != signs.get(key)
            beats_without[other] = 0 if is_new else beats_without[other] + 1
            if beats_without[other] == SILENT_BEATS and not ended.is_set():
                rule = "all processes must live until training ends"
                got = f"not heard of for {SILENT_BEATS * BEAT_SECONDS:.0f} s"
                say(f"--process {other + 1}/{count}: {rule}; got {got}; {NEXT_STEP}")
        signs = newest
