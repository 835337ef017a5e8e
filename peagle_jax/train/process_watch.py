"""Names a process that has died to the others that train with it.

JAX ends the others by itself, after a heartbeat timeout, but names a process as a task that is
counted from 0; and on a CPU their next computation fails before, with a traceback that names
nobody. So every process leaves a sign of life every few seconds, and reads those of the others.
The loss of the first process, at which all meet, ends the others at once: JAX says that "the leader
task" died, and nobody has time to say more.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed  # where Orbax and Flax, too, find the processes' common notes

from peagle_jax.free_memory import is_out_of_memory

BEAT_SECONDS = 2.0
# A process is silent after so many beats of another one without a new sign. They are counted, and
# no seconds: a machine that stood still, and all processes with it, has missed no beat.
SILENT_BEATS = 10
# Beats in which one is named after a computation has failed, and beats in a row whose signs cannot
# be read before nobody is watched any more.
BEATS_TO_NAME, MOST_FAILURES = SILENT_BEATS + 5, 3
FOLDER = "peagle_jax/signs_of_life/"
NEXT_STEP = "look at what it says; when all have ended, the same commands go on"


class ProcessDiedError(Exception):
    """A computation failed, and a process was not heard of that took part in it."""


@contextlib.contextmanager
def watched_processes() -> Iterator[None]:
    """Names silent processes meanwhile, in a line on stderr each.

    Raises:
      ProcessDiedError: in the place of the error of a computation, where one is silent then. That
        is waited for, and said.
    """
    state = distributed.global_state
    if state.client is None or state.num_processes < 2:
        yield
        return
    watch = Watch(state.client, state.process_id, state.num_processes, _say_on_stderr)
    watch.start()
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error) or not watch.finds_one_silent():
            raise
        _say_on_stderr(str(error).partition("\n")[0])
        raise ProcessDiedError from None
    finally:
        watch.stop()


def _say_on_stderr(line: str) -> None:
    print(f"peagle: {line}", file=sys.stderr, flush=True)


class Watch:
    """Leaves signs of life in a thread, and reads those of the others.

    Args:
      client: of the processes' common notes.
      number, count: of this process, from 0, and of all.
      say: is told of a process that becomes silent.

    Attributes:
      silent: processes that are not heard of now.
    """

    def __init__(self, client: Any, number: int, count: int, say: Callable[[str], None]) -> None:
        self._client, self._number, self._count, self._say = client, number, count, say
        self.silent: set[int] = set()
        self._beats_without = dict.fromkeys(set(range(count)) - {number}, 0)
        self._signs: dict[str, str] = {}
        self._num_beats = 0
        self._ended = threading.Event()
        self._after_beat = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="process watch", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it. JAX may leave the others then."""
        self._ended.set()
        self._thread.join(5 * BEAT_SECONDS)

    def finds_one_silent(self) -> bool:
        """Whether a process is silent, or becomes so within some beats, which are waited for."""
        with self._after_beat:
            until = self._num_beats + BEATS_TO_NAME
            while not self.silent and self._num_beats < until and self._thread.is_alive():
                self._after_beat.wait(BEAT_SECONDS)
            return bool(self.silent)

    def _run(self) -> None:
        num_failures = 0
        while num_failures < MOST_FAILURES and not self._ended.wait(BEAT_SECONDS):
            try:
                self._beat()
                num_failures = 0
            except jax.errors.JaxRuntimeError:
                num_failures += 1  # of the first process JAX itself says that it is gone
            with self._after_beat:
                self._num_beats += 1
                self._after_beat.notify_all()

    def _beat(self) -> None:
        """Leaves a sign, and looks for new ones."""
        sign = str(self._num_beats)
        self._client.key_value_set(f"{FOLDER}{self._number}", sign, allow_overwrite=True)
        newest = dict(self._client.key_value_dir_get(FOLDER))
        for other in sorted(self._beats_without):
            key = f"{FOLDER}{other}"
            if newest.get(key) != self._signs.get(key):
                self._beats_without[other] = 0
                self.silent.discard(other)
                continue
            self._beats_without[other] += 1
            if self._beats_without[other] == SILENT_BEATS and not self._ended.is_set():
                rule = "all processes must live until training ends"
                got = f"not heard of for {SILENT_BEATS * BEAT_SECONDS:.0f} s"
                self._say(f"--process {other + 1}/{self._count}: {rule}; got {got}; {NEXT_STEP}")
                self.silent.add(other)
        self._signs = newest
