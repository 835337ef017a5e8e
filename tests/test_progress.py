"""Progress where nobody sees a bar: lines, not too many, with what is left."""

import sys
import time

import pytest

from peagle_jax import progress
from peagle_jax.progress import ProgressReport


class Clock:
    """Stands in for `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(progress.time, "monotonic", fake)
    return fake


def test_a_line_every_half_minute_where_stderr_is_no_terminal(clock, capsys):
    with ProgressReport("train peagle", 1000, completed=400, unit="steps") as report:
        for step in range(401, 461):  # one step a second
            clock.now += 1.0
            report.update(step, note=f"loss {step / 100:.2f}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train peagle: 430 of 1,000 steps, loss 4.30, about 10 minutes left",
        "train peagle: 460 of 1,000 steps, loss 4.60, about 9 minutes left",
    ]


def test_work_whose_size_becomes_known_later(clock, capsys):
    with ProgressReport("rows", None) as report:
        clock.now += 31.0
        report.update(7)
        clock.now += 31.0
        report.update(14, total=28)
    assert capsys.readouterr().err.splitlines() == [
        "rows: 7",
        "rows: 14 of 28, about 62 seconds left",
    ]


def test_lines_go_on_while_nothing_is_updated(monkeypatch, capsys):
    """A compilation takes minutes, and no step ends in them."""
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    with ProgressReport("train peagle", 10, unit="steps") as report:
        report.update(3, note="loss 2.00")
        capsys.readouterr()
        time.sleep(0.4)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2 and all(line.startswith("train peagle: 3 of 10 steps") for line in lines)
    time.sleep(0.15)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.2, "0 seconds"),
        (1.0, "1 second"),
        (89.0, "89 seconds"),
        (95.0, "2 minutes"),
        (3600.0, "60 minutes"),
    ],
)
def test_durations_are_rounded(seconds, text):
    assert progress.duration(seconds) == text


def test_a_bar_on_a_terminal_prints_no_lines(clock, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with ProgressReport("rows", 3) as report:
        clock.now += 100.0
        report.update(3, note="all there")
        assert report._bar is not None and report._bar.tasks[0].completed == 3
    assert "minutes left" not in capsys.readouterr().err


def test_a_bar_leaves_a_piped_stdout_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with ProgressReport("rows", 3):
        print("a result")
    assert capsys.readouterr().out == "a result\n"
