"""A process that has died is named to the others, once, and nobody is named without a reason."""

import threading

import jax
import pytest

from peagle_jax.train import process_watch


class Notes:
    """The common notes of three processes, of which this is the second."""

    def __init__(self, alive: set[int], *, until: int = 10**9) -> None:
        self.alive, self.until, self.kept, self.calls = alive, until, {}, 0

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite and key.endswith("/1")
        self.calls += 1
        if self.calls > self.until:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection lost")
        self.kept[key] = value

    def key_value_try_get(self, key: str) -> str:
        number = int(key.rpartition("/")[2])
        if number not in self.alive and key not in self.kept:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: no such key")
        return str(self.calls) if number in self.alive else self.kept[key]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(process_watch, "BEAT_SECONDS", 0.002)
    monkeypatch.setattr(process_watch, "SILENT_SECONDS", 0.1)


def watch(notes: Notes, seconds: float) -> list[str]:
    """What is said within some seconds."""
    said, ended = [], threading.Event()
    arguments = notes, 1, 3, said.append, ended
    thread = threading.Thread(target=process_watch._watch, args=arguments, daemon=True)
    thread.start()
    thread.join(seconds)
    ended.set()
    thread.join(5)
    assert not thread.is_alive()
    return said


def test_nobody_is_named_while_all_live():
    notes = Notes({0, 2})
    assert watch(notes, 0.5) == [] and notes.calls > 10


@pytest.mark.parametrize("dead", [0, 2])
def test_one_that_is_silent(dead):
    said = watch(Notes({0, 2} - {dead}), 5)
    assert len(said) == 1 and said[0].startswith(f"--process {dead + 1}/3: all processes must live")
    assert "got not heard of for 0 s; look at" in said[0]


def test_the_first_one_is_gone():
    (said,) = watch(Notes({0, 2}, until=3), 5)
    assert said.startswith("--process 1/3: ") and "got not reached, where all" in said


def test_a_process_that_ends_names_nobody():
    assert watch(Notes({0}), 0.02) == []
