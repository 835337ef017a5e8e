"""The command line of the runner: what it lists, what it refuses, and where it writes."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_rows import made

from experiments import folders, run, work
from experiments.jobs import Job
from experiments.registry import EXPERIMENTS
from peagle_jax.types import InputError

WANTED = ["sampling", "hidden_designs", "--only", "0", "1", "last_feature"]
WANTED += ["--seeds", "1", "--budget", "smoke", "--jobs", "2"]


def go(place, *args) -> tuple[int, str]:
    """Exit code and output of the command with a cache and results in `place`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run.main(
            [*map(str, args), "--cache", str(place / "cache"), "--results", str(place / "results")]
        )
    return code, said.getvalue()


def test_list_names_all():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run.main(["--list"]) == 0 and run.main([]) == 2
    columns = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in said.getvalue().splitlines()
        if line.startswith("│")
    ]
    names, questions, variants = (" ".join(cells) for cells in zip(*columns, strict=True))
    for e in EXPERIMENTS.values():
        assert (
            e.name in names.split()
            and f"{e.reference}*" in variants
            and e.question in " ".join(questions.split())
        ), e.name
        assert all(word in variants for name in e.variants for word in name.split()), e.name


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["sampling", "tapes"],
            f"NAME: must be one of all, {', '.join(EXPERIMENTS)}; got tapes; choose one; "
            "--list explains them",
        ),
        (
            ["sampling", "--only", "0.7"],
            "--only: must be variants: 0, 0.5, 1; got 0.7; choose among them",
        ),
        (["aux_layers", "--only", "last", "0.5"], "got 0.5; choose among them"),
        (
            ["sampling", "--seeds", "0"],
            "--seeds: at least one seed is needed; got 0; use --seeds 3",
        ),
        (["sampling", "--seeds", "-3"], "got -3; use --seeds 3"),
        (
            ["sampling", "--jobs", "0"],
            "--jobs: at least one run at a time is needed; got 0; use --jobs 1 or more",
        ),
        (["sampling", "--jobs", "-2"], "got -2; use --jobs 1 or more"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, args, said):
    assert run.main([*args, "--cache", str(tmp_path / "c"), "--results", str(tmp_path / "r")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("which", ["cache", "results"])
def test_a_file_in_the_place_of_a_folder(tmp_path, capsys, which):
    (tmp_path / which).write_text("taken")
    assert go(tmp_path, *WANTED)[0] == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / which}" in error and "must be writable" in error and error.count("\n") == 1
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [
        tmp_path / which
    ]  # it was noticed before anything was made


def test_results_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "results" / "sampling.jsonl").mkdir(parents=True)
    assert go(tmp_path, *WANTED)[0] == 2
    error = capsys.readouterr().err
    assert (
        "sampling.jsonl: results must be readable; got Is a directory" in error
        and error.count("\n") == 1
    )


def test_too_little_room(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Room", (), {"free": 5}))
    for more in ([], ["--dry-run"]):
        assert go(tmp_path, *WANTED, *more)[0] == 2
        error = capsys.readouterr().err
        assert (
            "what is to be cached takes" in error
            and "free some space, or name a folder on another disk with --cache" in error
            and error.count("\n") == 1
        )
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    "words", [["--budget", "large"], ["--seeds", "some"], ["--jobs"], ["--nothing"]]
)
def test_what_the_parser_refuses(capsys, words):
    with pytest.raises(SystemExit) as end:
        run.main(["sampling", *words])
    assert end.value.code == 2 and "error:" in capsys.readouterr().err


def test_seeds_are_outermost_and_names_count_once():
    jobs = run.plan(["sampling", "aux_layers", "sampling"], 2, "smoke", ["0", "1", "last"])
    once = [("sampling", "0"), ("sampling", "1"), ("aux_layers", "last")]
    assert [(j.experiment.name, j.name, j.seed) for j in jobs] == [
        (*one, seed) for seed in (0, 1) for one in once
    ]
    assert len(run.plan(["all", "aux_layers"], 1, "smoke", None)) == sum(
        len(e.variants) for e in EXPERIMENTS.values()
    )


# ---------------------------------------------------------------- where smoke runs write


def test_smoke_runs_write_beside_the_tracked_results():
    options = run._options(["sampling", "--budget", "smoke"])
    assert options.results == folders.SMOKE_RESULTS
    assert options.cache == folders.SMOKE_CACHE.absolute()
    assert folders.SMOKE_RESULTS.parts[:2] == ("runs", "experiments-smoke")
    usual = run._options(["sampling"])
    assert usual.results == folders.RESULTS and usual.cache == folders.CACHE.absolute()


def test_a_smoke_run_without_results_does_not_touch_tracked_rows(tmp_path, monkeypatch):
    """The whole command, without the runs themselves."""
    monkeypatch.chdir(tmp_path)
    code = run.main(["sampling", "--budget", "smoke", "--minutes", "0"])
    assert code == 0 and {p.name for p in tmp_path.iterdir()} == {"runs"}
    assert (tmp_path / "runs" / "experiments-smoke" / "results").is_dir()
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"experiments-smoke"}


@pytest.mark.parametrize("results", ["results/experiments", "results/../results/experiments/"])
def test_smoke_rows_are_refused_among_the_tracked_ones(monkeypatch, capsys, results):
    monkeypatch.chdir(folders.ROOT)
    assert run.main(["sampling", "--budget", "smoke", "--results", results]) == 2
    error = capsys.readouterr().err
    assert "smoke rows must not mix with the results that git tracks" in error
    assert "leave --results out" in error and error.count("\n") == 1


# ---------------------------------------------------------------- former names


def test_former_names_of_experiments_and_variants_are_understood():
    options = run._options(["taps", "regularisation", "taps", "--only", "a norm per tap", "none"])
    assert options.names == ("aux_layers", "regularization")
    assert options.only == ("a norm per aux layer", "none")
    jobs = run.plan(options.names, 1, "smoke", options.only)
    names = [("aux_layers", "a norm per aux layer"), ("regularization", "none")]
    assert [(job.experiment.name, job.name) for job in jobs] == names
    every = run._options(["all", "--only", "r 1"])  # without an experiment to which it belongs
    with pytest.raises(InputError, match="got r 1; choose among them"):
        run.plan(every.names, 1, "smoke", every.only)


def write_row(path, **changes):
    facts = {"experiment": "taps", "variant": "a norm per tap"} | changes
    row = made(np.random.default_rng(0), seed=0, **facts)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_finished_rows_under_former_names_are_found(tmp_path):
    write_row(tmp_path / "taps.jsonl", key="3f")
    assert set(run.finished(tmp_path)) == {("aux_layers", "a norm per aux layer", 0, "small", "3f")}


def test_finished_is_what_a_report_would_show(tmp_path):
    """A row that a later one replaces is run again, and so is one that the report leaves out."""
    write_row(tmp_path / "taps.jsonl", key="3f")
    write_row(tmp_path / "taps.jsonl", key="4a")
    assert {key for *_, key in run.finished(tmp_path)} == {"4a"}
    write_row(tmp_path / "taps.jsonl", key="3f")
    assert {key for *_, key in run.finished(tmp_path)} == {"3f"}
    (tmp_path / "taps.jsonl").rename(tmp_path / "taps_old.jsonl")
    assert run.finished(tmp_path) == {}


def test_a_row_of_another_target_is_made_anew(tmp_path):
    """A checkout's rows count as finished until this machine has a target with other weights."""
    job = Job(EXPERIMENTS["sampling"], "0", 0, "small")
    wanted = {"experiment": "sampling", "variant": "0"}
    write_row(tmp_path / "sampling.jsonl", key=job.key, target_digest="5a", **wanted)
    cache = tmp_path / "cache"
    assert run.to_do([job], tmp_path, cache) == []
    model = Path(job.run(cache).target)
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    assert run.to_do([job], tmp_path, cache) == [job]
    digest = work.target_digest(job, cache)
    write_row(tmp_path / "sampling.jsonl", key=job.key, target_digest=digest, **wanted)
    assert run.to_do([job], tmp_path, cache) == []


def test_variants_without_their_reference(tmp_path):
    jobs = run.plan(["losses", "sampling"], 1, "small", ["cross_entropy", "1"])
    said = run._without_reference(jobs, tmp_path)
    assert [line.split(",")[0] for line in said] == [
        "losses: without forward_kl",
        "sampling: without 0",
    ]
    write_row(tmp_path / "sampling.jsonl", key="5a", experiment="sampling", variant="0")
    jobs = run.plan(["losses", "sampling"], 1, "small", ["forward_kl", "1"])
    assert run._without_reference(jobs, tmp_path) == []
    jobs = run.plan(["sampling"], 1, "sampled", ["1"])  # the row is of another budget
    assert len(run._without_reference(jobs, tmp_path)) == 1
