"""Output into a pipe: plain text, results on stdout, everything else on stderr."""

import argparse
import os
import subprocess
import sys

import pytest
from rich.table import Table

from peagle_jax.cli import output

PROGRAM = [sys.executable, "-m", "peagle_jax.cli"]


def test_the_help_does_not_import_jax():
    code = (
        "import sys; from peagle_jax.cli.commands import make_parser; make_parser().format_help(); "
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_mistake_as_a_program():
    """A process of its own, as the installed entry point."""
    words = ["generate", "--target", "nowhere", "--prompt", "x"]
    done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_table_in_a_pipe(folders):
    """No escape codes, and lines that are not broken at 80 columns."""
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    words = ["inspect", str(folders / "peagle")]
    done = subprocess.run([*PROGRAM, *words], capture_output=True, env=environment)
    assert done.returncode == 0 and not done.stderr
    assert b"\x1b" not in done.stdout
    lines = done.stdout.decode().splitlines()
    assert len({len(line) for line in lines}) == 1, "a table has lines of one length"
    assert 80 < len(lines[0]) <= output.PIPE_WIDTH


def test_a_reader_that_goes_away(folders):
    """`peagle inspect DIR | head -1` ends quietly."""
    reading, writing = os.pipe()
    os.close(reading)
    words = ["inspect", str(folders / "peagle")]
    done = subprocess.run([*PROGRAM, *words], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_wide_table_in_a_pipe_is_not_cut(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("method", *("accepted per position",) * 5)
    table.add_row("P-EAGLE", *("100 93 81 70 61 52",) * 5)
    output.print_marked(table)
    out = capsys.readouterr().out
    assert "…" not in out and out.count("accepted per position") == 5


def test_lines_are_text_and_not_markup(capsys):
    output.say("runs/o[u]t: [bold]3[/bold]")
    assert capsys.readouterr().out == "runs/o[u]t: [bold]3[/bold]\n"


@pytest.mark.parametrize(
    "value, text",
    [
        (0.123456789, "0.1235"),
        (2 / 3, "0.6667"),
        (12345.678, "12345.7"),
        (1_234_567, "1,234,567"),
        (2048, "2048"),
        ([0.51234567, 3], "0.5123, 3"),
        (True, "True"),
        (None, "None"),
        ("a", "a"),
    ],
)
def test_facts_are_rounded(value, text):
    assert output.fact_text(value) == text


@pytest.mark.parametrize(
    "words, advice",
    [
        ("inspect x", ""),
        ("train x.yaml", "; the same command goes on from what is saved"),
        ("demo --out x", "; the same command goes on from what is saved"),
    ],
)
def test_interrupted(words, advice, monkeypatch, capsys):
    from peagle_jax import cli

    def interrupt(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_command", interrupt)
    assert cli.main(words.split()) == 1
    assert capsys.readouterr().err == f"peagle: interrupted{advice}\n"


@pytest.mark.parametrize("platform, lines", [("gpu", 1), ("cpu", 0)])
def test_the_kernels_in_use_are_named_on_a_gpu(platform, lines, peagle, capsys, monkeypatch):
    from peagle_jax.kernels import choose, launch

    peagle("inspect nowhere")  # sets the log up
    monkeypatch.setattr(launch, "platform", lambda: platform)
    monkeypatch.setattr(choose, "_reported", set())
    for _ in range(2):  # the second time there is nothing new
        choose.choose("attention", "auto", ("reference", "triton"), "they are tired")
    err = capsys.readouterr().err
    assert err.count("\n") == err.count("peagle: kernels: ") == lines
