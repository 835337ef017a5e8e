"""What goes wrong while a command runs and is not its own mistake: one line, exit code 2."""

import errno

import jax
import pytest

from peagle_jax import cli


@pytest.mark.parametrize(
    "error, words",
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes."),
            ["memory: arrays must fit", "allocating 7 bytes", "use smaller batches"],
        ),
        (MemoryError("Unable to allocate 3 GiB"), ["memory", "allocate 3 GiB"]),
        (MemoryError(), ["memory", "got no memory"]),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "corpus/a.jsonl"),
            ["corpus/a.jsonl: must stay where it is", "No such file", "(test_bad_days.py, line "],
        ),
        (OSError(errno.ESTALE, "Stale file handle", "shard"), ["shard: must stay", "Stale"]),
        (OSError(errno.ENOSPC, "No space left on device", "out"), ["out: must have room"]),
    ],
)
def test_one_line(error, words, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "run_command", fail)
    assert cli.main(["inspect", "x"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said


@pytest.mark.parametrize("error", [ValueError("a mistake"), OSError(errno.EIO, "I/O", "x")])
def test_a_mistake_of_ours_is_shown_with_its_place(error, monkeypatch):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "run_command", fail)
    with pytest.raises(type(error)):
        cli.main(["inspect", "x"])
