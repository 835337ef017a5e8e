"""A process that has died is named to the others, once, and nobody is named without a reason."""

import threading

import jax
import pytest

from peagle_jax.train import process_watch
from peagle_jax.train.process_watch import FOLDER, SILENT_BEATS


class Notes:
    """The common notes of three processes, of which this is the second, and the thread's event.

    Args:
      alive: those of the others that leave signs.
      beats: of this process, after which the watch is ended.
      lost_after: beats after which nothing can be read any more.
      returns_at: the beat from which on all leave signs.
      ends_itself: the process ends while it waits for the notes.
    """

    def __init__(self, alive, beats, *, lost_after=10**9, returns_at=10**9, ends_itself=False):
        self.alive, self.beats, self.lost_after = alive, beats, lost_after
        self.returns_at, self.ends_itself = returns_at, ends_itself
        self.kept: dict[str, str] = {}
        self.ended = threading.Event()
        self.beat = 0

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite and key == f"{FOLDER}1"
        self.kept[key], self.beat = value, int(value)

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        assert folder == FOLDER
        alive = {0, 2} if self.beat >= self.returns_at else self.alive
        self.kept |= {f"{FOLDER}{i}": str(self.beat) for i in alive}
        if self.ends_itself and self.beat >= self.beats:
            self.ended.set()
        if self.beat > self.lost_after:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection lost")
        if self.beat > self.beats:
            self.ended.set()
        return list(self.kept.items())


def watch(notes: Notes) -> list[str]:
    said: list[str] = []
    process_watch._watch(notes, 1, 3, said.append, notes.ended)
    return said


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(process_watch, "BEAT_SECONDS", 0.0)


def test_nobody_is_named_while_all_live():
    notes = Notes({0, 2}, 50)
    assert watch(notes) == [] and notes.kept[f"{FOLDER}1"] == "51"


@pytest.mark.parametrize("dead", [0, 2])
def test_one_that_is_silent_is_named_once(dead, monkeypatch):
    """And this process goes on to leave signs: the others would name it."""
    monkeypatch.setattr(process_watch, "BEAT_SECONDS", 0.001)
    notes = Notes({0, 2} - {dead}, 5 * SILENT_BEATS)
    said = watch(notes)
    assert len(said) == 1 and said[0].startswith(f"--process {dead + 1}/3: all processes must live")
    assert "got not heard of for 0 s; look at" in said[0]
    assert notes.beat == 5 * SILENT_BEATS + 1


def test_one_that_was_slow_is_not_named():
    assert watch(Notes({0}, 40, returns_at=SILENT_BEATS)) == []
    assert len(watch(Notes({0}, 40, returns_at=SILENT_BEATS + 1))) == 1


def test_without_the_first_one_nothing_is_said():
    """JAX has ended this process then."""
    notes = Notes({0, 2}, 50, lost_after=3)
    assert watch(notes) == [] and notes.beat == 4


def lose(monkeypatch, alive: set[int], error: Exception) -> None:
    """A computation that fails, with a watch of which the third process may be silent."""
    state = process_watch.distributed.global_state
    notes = Notes(alive, 10**6)
    for name, value in (("client", notes), ("process_id", 1), ("num_processes", 3)):
        monkeypatch.setattr(state, name, value)
    monkeypatch.setattr(process_watch, "BEAT_SECONDS", 0.01)
    try:
        with process_watch.watched_processes():
            raise error
    finally:
        notes.ended.set()


def test_a_computation_that_fails_waits_for_the_name(monkeypatch, capsys):
    lost = jax.errors.JaxRuntimeError("INTERNAL: Connection closed by peer")
    with pytest.raises(SystemExit) as end:
        lose(monkeypatch, {0}, lost)
    said = capsys.readouterr().err
    assert end.value.code == 1 and said.startswith("peagle: --process 3/3: ") and "\n" in said
    with pytest.raises(jax.errors.JaxRuntimeError, match="Connection closed"):
        lose(monkeypatch, {0, 2}, lost)  # nobody has died
    with pytest.raises(ValueError, match="of ours"):
        lose(monkeypatch, {0}, ValueError("of ours"))
    assert not capsys.readouterr().err


def test_alone_nobody_is_watched():
    with process_watch.watched_processes():
        assert not [t for t in threading.enumerate() if t.name == "process watch" and t.is_alive()]


def test_a_process_that_ends_names_nobody():
    assert watch(Notes({0}, SILENT_BEATS, ends_itself=True)) == []
