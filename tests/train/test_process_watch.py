"""A process that has died is named to the others, once, and nobody is named without a reason."""

import threading

import jax
import pytest

from peagle_jax.train import process_watch
from peagle_jax.train.process_watch import (
    BEATS_TO_NAME,
    FOLDER,
    MOST_FAILURES,
    SILENT_BEATS,
    ProcessDiedError,
    Watch,
)


class Notes:
    """The common notes of three processes, of which this is the second.

    Attributes:
      alive: those of the others that leave signs.
      lost: beats in which nothing can be read.
      changes: beat -> who is alive from then on.
      beat: of this process, from 0.
    """

    def __init__(self, alive, *, lost=(), changes=None):
        self.alive, self.lost, self.changes = alive, lost, changes or {}
        self.beat = -1
        self.kept: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.beat += 1
        self.alive = self.changes.get(self.beat, self.alive)
        if allow_overwrite:
            self.kept[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        self.kept |= {f"{folder}{i}": str(self.beat) for i in self.alive}
        if self.beat in self.lost:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection lost")
        return list(self.kept.items())


def watch(notes: Notes, num_beats: int) -> tuple[Watch, list[str]]:
    """A watch after so many beats, and what was said. Its thread does not run."""
    said: list[str] = []
    one = Watch(notes, 1, 3, said.append)
    for _ in range(num_beats):
        try:
            one._beat()
        except jax.errors.JaxRuntimeError:
            pass
        one._num_beats += 1
    return one, said


def test_nobody_is_named_while_all_live():
    notes = Notes({0, 2})
    one, said = watch(notes, 50)
    assert said == [] and not one.silent and notes.kept[f"{FOLDER}1"] == "49"


@pytest.mark.parametrize("dead", [0, 2])
def test_one_that_is_silent_is_named_once(dead):
    """And this process goes on to leave signs: the others would name it."""
    notes = Notes({0, 2} - {dead})
    one, said = watch(notes, 5 * SILENT_BEATS)
    assert len(said) == 1 and said[0].startswith(f"--process {dead + 1}/3: all processes must live")
    assert "got not heard of for 20 s; look at" in said[0] and one.silent == {dead}
    assert notes.kept[f"{FOLDER}1"] == str(5 * SILENT_BEATS - 1)


def test_one_that_was_slow():
    """Is not named, or no longer silent when it is heard of again, and named again."""
    begun, back = 5, 5 + SILENT_BEATS
    for late, expected in ((0, 0), (1, 1)):
        changes = {begun: {0}, back + late - 1: {0, 2}}
        one, said = watch(Notes({0, 2}, changes=changes), 60)
        assert len(said) == expected and not one.silent
    changes |= {40: {0}}
    one, said = watch(Notes({0, 2}, changes=changes), 60)
    assert len(said) == 2 and one.silent == {2}


def test_signs_that_cannot_be_read_once_say_nothing():
    _, said = watch(Notes({0, 2}, lost=range(5, 5 + SILENT_BEATS)), 60)
    assert said == []


def run_thread(monkeypatch, notes: Notes) -> Watch:
    """A watch whose thread runs, a beat after another."""
    monkeypatch.setattr(process_watch, "BEAT_SECONDS", 0.001)
    one = Watch(notes, 1, 3, lambda line: None)
    one.start()
    return one


def test_the_thread_ends(monkeypatch):
    one = run_thread(monkeypatch, Notes({0, 2}))
    one.stop()
    assert not one._thread.is_alive()
    # by itself, where all signs are lost; and then nobody waits for a name
    one = run_thread(monkeypatch, Notes({0, 2}, lost=range(3, 10**6)))
    assert not one.finds_one_silent()
    assert not one._thread.is_alive() and one._num_beats == 3 + MOST_FAILURES


def test_after_a_failure_some_beats_are_waited_for(monkeypatch):
    one = run_thread(monkeypatch, Notes({0, 2}))
    assert not one.finds_one_silent() and one._num_beats >= BEATS_TO_NAME
    one.stop()
    one = run_thread(monkeypatch, Notes({0}))
    assert one.finds_one_silent() and one.silent == {2}
    one.stop()


@pytest.fixture
def notes(monkeypatch):
    """Of processes that were joined, the third of which is silent."""
    dead = Notes({0})
    state = process_watch.distributed.global_state
    for name, value in (("client", dead), ("process_id", 1), ("num_processes", 3)):
        monkeypatch.setattr(state, name, value)
    monkeypatch.setattr(process_watch, "BEAT_SECONDS", 0.001)
    return dead


def fail(error: BaseException) -> None:
    with process_watch.watched_processes():
        raise error


def test_a_computation_that_fails_waits_for_the_name(notes, capsys):
    lost = jax.errors.JaxRuntimeError("INTERNAL: Connection closed by peer\nand more")
    with pytest.raises(ProcessDiedError):
        fail(lost)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("peagle: --process 3/3: all processes must live")
    assert second == "peagle: INTERNAL: Connection closed by peer"
    notes.alive = {0, 2}
    with pytest.raises(jax.errors.JaxRuntimeError, match="Connection closed"):
        fail(lost)  # nobody has died
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        ValueError("of ours"),
        KeyboardInterrupt(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    ],
)
def test_other_errors_pass_at_once(notes, error):
    with pytest.raises(type(error)) as raised:
        fail(error)
    assert raised.value is error and notes.beat < SILENT_BEATS


def test_alone_nobody_is_watched():
    with process_watch.watched_processes():
        assert not [t for t in threading.enumerate() if t.name == "process watch"]
