"""`peagle extract` from the command line: what it prints, refuses and leaves behind."""

import json
import os
import signal
import tempfile

import pytest
from features import FLAGS, contents

from peagle_jax.cli import main
from peagle_jax.pipelines import extract as room


def command(place, out, **changes):
    flags = (
        {"target": place / "target", "data": place / "corpus.jsonl", "out": out} | FLAGS | changes
    )
    return ["extract", *(str(w) for flag, value in flags.items() for w in (f"--{flag}", value))]


def test_the_command_line(place, tmp_path, capsys):
    out = tmp_path / "o[u]t"
    assert main(command(place, out)) == 0
    said = capsys.readouterr()
    got, want = contents(out), contents(place / "whole")
    index = json.loads(got.pop("index.json"))
    assert got == {name: content for name, content in want.items() if name != "index.json"}
    assert index | {"command": "peagle extract"} == json.loads(want["index.json"])
    assert index["command"].startswith(
        "peagle extract --target target --data corpus.jsonl --out 'o[u]t'"
    )
    table = {
        cells[1].strip(): cells[2].strip()
        for line in said.out.splitlines()
        if len(cells := line.split("│")) == 4
    }
    assert (
        table["rows"] == str(index["rows"])
        and table["shards"] == "5"
        and table["tokens"] == str(index["tokens"])
    )
    assert (
        int(table["bytes"].replace(",", "")) == sum(len(c) for c in contents(out).values())
        and float(table["tokens per second"]) > 0
    )
    assert (
        f"{out}: " in said.out and "bytes to write, in 5 of 5 shards" in said.out and not said.err
    )
    assert main(command(place, out)) == 0 and "all 5 shards are there" in capsys.readouterr().out
    assert main(command(place, out, **{"seq-len": 13})) == 2
    assert capsys.readouterr().err.startswith(f"peagle: {out}/index.json: seq_len was 12 when")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"target": "nowhere"}, "nowhere: this folder must exist"),
        ({"data": "nowhere"}, "nowhere: this file must exist"),
        ({"aux-hidden-state-layers": "1,x"}, "--aux-hidden-state-layers: must be numbers of 0"),
        ({"aux-hidden-state-layers": ""}, "--aux-hidden-state-layers: must be numbers"),
        ({"aux-hidden-state-layers": "0,9"}, "must lie in 0..4"),
        ({"dtype": "float64"}, "float64"),
        ({"compute-dtype": "float16"}, "float16"),
        ({"batch-size": "many"}, "many"),
        ({"batch-size": 0}, "--batch-size: must be 1"),
        ({"held-out": "2"}, "--held-out"),
        ({"max-chars": "0"}, "--max-chars"),
    ],
)
def test_mistakes_are_one_line(changes, words, place, tmp_path, capsys):
    assert main(command(place, tmp_path / "out", **changes)) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith("peagle: ")
        and err.count("\n") == 1
        and words in err
        and not (tmp_path / "out").exists()
    )


def test_what_must_be_named(place, capsys):
    for lacking in ("target", "data", "out"):
        words = {"target": place / "target", "data": place / "corpus.jsonl", "out": place / "never"}
        assert (
            main(
                [
                    "extract",
                    *(str(w) for k, v in words.items() if k != lacking for w in (f"--{k}", v)),
                ]
            )
            == 2
        )
        assert f"--{lacking}" in capsys.readouterr().err


def test_control_c(place, tmp_path, capsys, monkeypatch):
    """Exit code 1; and the same command ends what was begun."""
    real = room.write_shard

    def stop(folder, config, shard, tensors):
        if shard == 2:
            raise KeyboardInterrupt
        real(folder, config, shard, tensors)

    monkeypatch.setattr(room, "write_shard", stop)
    assert main(command(place, tmp_path / "out")) == 1 and "interrupted" in capsys.readouterr().err
    assert sorted(contents(tmp_path / "out")) == [
        "index.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    monkeypatch.setattr(room, "write_shard", real)
    assert (
        main(command(place, tmp_path / "out", **{"aux-hidden-state-layers": "0,3"})) == 2
        and "aux_hidden_state_layers was [1, 3]" in capsys.readouterr().err
    )
    assert main(command(place, tmp_path / "out")) == 0


@pytest.mark.parametrize("kind", ["bad row", "full disk", "sigterm", "ctrl-c", "mistake of ours"])
def test_temporary_files_are_removed(kind, place, tmp_path, capsys, monkeypatch):
    """The corpus is in a folder for temporary files while the command runs; after it, it is not."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    there = []

    def stop(folder, config, shard, tensors):
        there.extend(path.name for path in temporary.rglob("*"))
        if kind == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        error = OSError(28, "No space left on device") if kind == "full disk" else KeyboardInterrupt
        raise RuntimeError if kind == "mistake of ours" else error

    def interrupt(number, frame):
        raise AssertionError("the handler of before")

    monkeypatch.setattr(room, "write_shard", stop)
    changes = {}
    if kind == "bad row":
        (tmp_path / "bad.jsonl").write_text('{"text": "def f(x)"}\n{"text": 5}\n')
        changes["data"] = tmp_path / "bad.jsonl"
    words = command(place, tmp_path / "out", **changes)
    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        if kind == "mistake of ours":
            with pytest.raises(RuntimeError):
                main(words)
        else:
            wanted = 2 if kind in ("bad row", "full disk") else 1
            assert main(words) == wanted and capsys.readouterr().err.count("\n") == 1
        assert signal.getsignal(signal.SIGTERM) is interrupt
    finally:
        signal.signal(signal.SIGTERM, former)
    assert not list(temporary.iterdir())
    assert "tokens.bin" in there or kind == "bad row"
