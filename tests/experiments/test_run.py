"""The runner as a whole on the smoke budget: rows, what is done once, what goes on, what fails, and what it refuses."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from waiting import lines, until

from experiments import report, run, work
from experiments.findings import read_rows
from experiments.registry import EXPERIMENTS
from experiments.stages import ROOT
from experiments.texts import KINDS
from experiments.work import Job
from peagle_jax import corpus

# two decodings of one head, and a head that vLLM cannot serve
WANTED = [
    "sampling",
    "hidden_designs",
    "--only",
    "0",
    "1",
    "last_feature",
    "--seeds",
    "1",
    "--budget",
    "smoke",
    "--jobs",
    "2",
]
GREEDY, SAMPLED, OTHER = (
    Job(EXPERIMENTS[e], v, 0, "smoke")
    for e, v in [("sampling", "0"), ("sampling", "1"), ("hidden_designs", "last_feature")]
)


def go(place, *args) -> tuple[int, str]:
    """(exit code, what was said) of the command with a cache and results in `place`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run.main(
            [*map(str, args), "--cache", str(place / "cache"), "--results", str(place / "results")]
        )
    return code, said.getvalue()


def contents(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")  # not longer: other tests read the whole library
def sooner():
    """A part of the standard library; workers compile a third sooner, without optimising, and keep it where all tests do."""
    root = Path(sysconfig.get_paths()["stdlib"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "peagle_jax" / "xla-tests")
        )
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
        patch.setenv(
            "XLA_FLAGS",
            "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        )
        patch.setattr(corpus, "_standard_library", lambda: corpus._python(root, root.glob("*.py")))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory, sooner):
    """(folder of cache and results, exit code, what was said) of the three runs; the tests only read it."""
    place = tmp_path_factory.mktemp("experiments")
    return place, *go(place, *WANTED)


@pytest.fixture
def stages_only(made, tmp_path):
    """A cache in which everything is made but the heads."""
    shutil.copytree(
        made[0] / "cache",
        tmp_path / "cache",
        ignore=lambda folder, names: {"heads", "jobs"} & set(names),
    )
    return tmp_path


# ---------------------------------------------------------------- three runs


def test_rows(made):
    place, code, said = made
    assert (
        code == 0
        and "3 of 3 runs to do; 2 heads to train" in said
        and "failed" not in said
        and "are left" not in said
    )
    rows, warnings = read_rows(place / "results")
    assert warnings == [] and [
        (r["experiment"], r["variant"]) for r in rows if r["experiment"] == "sampling"
    ] == [("sampling", "0"), ("sampling", "1")]
    by_key = {row["key"]: row for row in rows}
    assert by_key.keys() == {job.key for job in (GREEDY, SAMPLED, OTHER)} and len(rows) == 3
    for job in (GREEDY, SAMPLED, OTHER):
        row, greedy = by_key[job.key], job is not SAMPLED
        assert (
            row["seed"] == 0
            and row["budget"] == "smoke"
            and row["head"] == job.head_key
            and row["changes"] == job.changes()
        )
        assert (
            row["config"]["optimizer"]["steps"] == row["steps"] == 16 == row["curve"][-1]["step"]
            and len(row["curve"]) == 16
        )
        assert (
            row["command"]
            == "python -m experiments.run sampling hidden_designs --seeds 1 --budget smoke --only 0 1 last_feature"
        )
        assert row["stages"] == {s.name: s.key for s in job.stages()[0].all()}
        assert row["train_flops"] > 1e9 and row["parameters"] > 1e5 and row["train_seconds"] > 0
        assert (
            row["train_tokens_per_second"]
            == lines_of(job, place, "result.json")["tokens_per_second"]
        )
        m, *others = row["measured"]
        assert [(o["temperature"], o["sample_drafts"]) for o in others] == (
            [] if greedy else [(1.0, True)]
        ) and not m["sample_drafts"]
        assert (m["k"], m["temperature"], m["new_tokens"]) == (3, 0.0 if greedy else 1.0, 16) and [
            p["kind"] for p in m["prompts"]
        ] == [k for k in KINDS for _ in "12"]
        drafts = sum(p["drafts"] for p in m["prompts"])
        accepted = [sum(p["accepted"][i] for p in m["prompts"]) for i in range(3)]
        assert m["acceptance_length"] == pytest.approx(1 + sum(accepted) / drafts)
        assert m["accepted_per_position"] == pytest.approx([a / drafts for a in accepted], abs=1e-5)
        assert row["exact"]["different"] == 0 and row["exact"]["same"] + row["exact"][
            "near_ties"
        ] == (12 if greedy else 0)
        speed = row["speed"]
        assert (
            speed is None
            if not greedy
            else speed["k"] == 3
            and speed["speedup"]
            == pytest.approx(speed["tokens_per_second"] / speed["plain_tokens_per_second"])
        )
        assert row["export"].startswith("refused: ") == (job is OTHER)


def lines_of(job: Job, place: Path, name: str) -> dict:
    return json.loads((job.head_folder(place / "cache") / name).read_text())


def test_a_head_is_trained_once(made):
    place, *_ = made
    assert {p.name for p in (place / "cache" / "heads").iterdir()} == {
        GREEDY.head_key,
        OTHER.head_key,
    }
    for job in (GREEDY, OTHER):
        assert [
            row["step"] for row in lines(job.head_folder(place / "cache") / "metrics.jsonl")
        ] == list(range(1, 17))
    assert (GREEDY.head_folder(place / "cache") / "head" / "config.json").exists()
    assert not (OTHER.head_folder(place / "cache") / "head").exists()
    jobs = {p.name.split(".", 1)[1] for p in (place / "cache" / "jobs").iterdir()}
    assert jobs == {"spec.json", "log"}  # rows are in the results


def test_the_second_call_does_nothing(made):
    place, *_ = made
    before = contents(place)
    for more in ([], ["--dry-run"], ["--minutes", 0]):
        code, said = go(place, *WANTED, *more)
        assert (
            code == 0
            and "0 of 3 runs to do; 0 heads to train" in said
            and " ".join(said.split()).endswith("before: nothing.")
        )
    assert contents(place) == before


def test_a_dry_run_writes_nothing(made, tmp_path):
    code, said = go(tmp_path, *WANTED, "--dry-run")
    assert (
        code == 0
        and "3 of 3 runs to do; 2 heads to train" in said
        and "placeholder.hidden: shared -> last_feature" in said
    )
    assert all(
        f"{name} (" in said for name in ("text", "target", "answers", "features", "prompts")
    ) and not list(tmp_path.iterdir())
    code, said = go(made[0], "sampling", "--budget", "smoke", "--seeds", "2", "--dry-run")
    assert (
        code == 0 and "4 of 6 runs to do; 1 heads to train" in said
    )  # 0.5 of seed 0 has its head; seed 1 needs one


def test_damaged_results_are_not_fatal(made, tmp_path):
    shutil.copytree(made[0] / "results", tmp_path / "results")
    with (tmp_path / "results" / "sampling.jsonl").open("ab") as file:
        file.write(
            b'\xff\xfe\n[1]\n7\n{"experiment": []}\n'
            + json.dumps(
                dict.fromkeys(["experiment", "variant", "seed", "budget", "key"], [])
            ).encode()
            + b'\n{"experi'
        )
    (tmp_path / "cache").symlink_to(made[0] / "cache")
    code, said = go(tmp_path, *WANTED, "--dry-run")
    assert code == 0 and "0 of 3 runs to do" in said


def test_no_minutes(tmp_path):
    code, said = go(tmp_path, *WANTED, "--minutes", 0)
    assert (
        code == 0
        and "3 runs are left; the same command goes on with them" in said
        and "being made" not in said
    )
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_the_report(made, tmp_path, capsys):
    assert (
        report.main(
            [
                "--results",
                str(made[0] / "results"),
                "--out",
                str(tmp_path / "out"),
                "--budget",
                "smoke",
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert "warning" not in said.err and said.out.strip() == str(tmp_path / "out" / "report.html")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"report.html", "tables.md"} | {
        f"{e}{t}.png" for e in ("sampling", "hidden_designs") for t in ("", "_training")
    }
    assert all(
        (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG"
        for name in names
        if name.endswith(".png")
    )
    text = (tmp_path / "out" / "tables.md").read_text()
    assert (
        "| last_feature |" in text
        and "refused: its placeholders depend on the text" in text
        and "| 2 of 3 |" in text
    )


# ---------------------------------------------------------------- cut short, and failing


def start(place: Path, *args) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "experiments.run",
        *args,
        "--cache",
        str(place / "cache"),
        "--results",
        str(place / "results"),
    ]
    return subprocess.Popen(
        command,
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def workers_of(place: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if "experiments.work" in line and str(place) in line]


def test_cut_short_it_goes_on(stages_only):
    """Ended as a machine ends it, then by Ctrl-C after a checkpoint; what was learned until then is kept, and no row comes twice."""
    place, head = stages_only, GREEDY.head_folder(stages_only / "cache")

    def metrics():
        return lines(head / "metrics.jsonl")

    wanted = ["sampling", "--only", "0", "--seeds", "1", "--budget", "smoke"]

    def saved():
        return any(
            p.name.isdigit() for p in head.glob("checkpoints/*")
        )  # the newest few are kept; the first is of step 2

    for number, begun in ((signal.SIGTERM, lambda: workers_of(place)), (signal.SIGINT, saved)):
        process = start(place, *wanted)
        until(begun)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
        assert (
            process.returncode == 130
            and "stopped; the same command goes on where it was" in " ".join(said.split())
        )
        assert workers_of(place) == [] and not (place / "results" / "sampling.jsonl").exists()
    before = metrics()[:2]
    code, said = go(place, *wanted)
    assert code == 0 and "1 of 1 runs to do" in said
    rows = lines(place / "results" / "sampling.jsonl")
    assert len(rows) == 1 and rows[0]["key"] == GREEDY.key
    assert metrics()[:2] == before and [row["step"] for row in metrics()] == list(range(1, 17))
    seconds = [row["seconds"] for row in metrics()]
    assert (
        seconds == sorted(seconds)
        and rows[0]["train_seconds"] == seconds[-1]
        and rows[0]["train_tokens_per_second"] > 0
    )
    assert "0 of 1 runs to do" in go(place, *wanted)[1]


def test_one_fails_and_the_others_finish(made, stages_only):
    place = stages_only
    shutil.copytree(
        made[0] / "cache" / "heads" / OTHER.head_key, OTHER.head_folder(place / "cache")
    )
    config = OTHER.head_folder(place / "cache") / "config.yaml"
    config.write_text(
        config.read_text().replace(str(made[0]), str(place))
    )  # a head is of its cache
    GREEDY.head_folder(place / "cache").write_text("in the way")
    wanted = [
        "sampling",
        "hidden_designs",
        "--only",
        "0",
        "last_feature",
        "--seeds",
        "1",
        "--budget",
        "smoke",
    ]
    code, said = go(place, *wanted)
    assert code == 1 and "hidden_designs" in said
    [failed] = [line for line in said.splitlines() if line.startswith("failed: ")]
    assert failed.startswith("failed: sampling, 0, seed 0; what it said: ")
    log = Path(failed.split("what it said: ")[1])
    assert (
        "the output folder must be writable" in log.read_text()
        and str(GREEDY.head_folder(place / "cache")) in log.read_text()
    )
    [row] = lines(place / "results" / "hidden_designs.jsonl")
    timed = lines_of(OTHER, made[0], "result.json")["tokens_per_second"]
    assert (
        row["key"] == OTHER.key and row["train_tokens_per_second"] == timed
    )  # found trained: of the session that trained it
    assert not (place / "results" / "sampling.jsonl").exists()
    code, said = go(place, *wanted, "--dry-run")
    assert code == 0 and "1 of 2 runs to do" in said


def test_training_speed_where_nothing_was_timed(tmp_path):
    plain = GREEDY.run(tmp_path)
    GREEDY.head_folder(tmp_path).mkdir(parents=True)
    result, last = GREEDY.head_folder(tmp_path) / "result.json", {"step": 16, "seconds": 4.0}
    result.write_text(json.dumps({"tokens_per_second": 321.5}))
    assert work.training_speed(plain, last) == 321.5
    result.write_text(json.dumps({"tokens_per_second": None}))
    assert work.training_speed(plain, last) == 2 * 64 * 16 / 4


# ---------------------------------------------------------------- words of the command line


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
            f"NAME: must be one of all, {', '.join(EXPERIMENTS)}; got tapes; choose one; --list explains them",
        ),
        (
            ["sampling", "--only", "0.7"],
            "--only: must be variants: 0, 0.5, 1; got 0.7; choose among them",
        ),
        (["taps", "--only", "last", "0.5"], "got 0.5; choose among them"),
        (["sampling", "--seeds", "0"], "--seeds: at least one seed is needed; got 0; raise it"),
        (["sampling", "--seeds", "-3"], "got -3; raise it"),
        (
            ["sampling", "--jobs", "0"],
            "--jobs: at least one run at a time is needed; got 0; raise it",
        ),
        (["sampling", "--jobs", "-2"], "got -2; raise it"),
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
            and "make room, or name another place with --cache" in error
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
    jobs = run.plan(["sampling", "taps", "sampling"], 2, "smoke", ["0", "1", "last"])
    once = [("sampling", "0"), ("sampling", "1"), ("taps", "last")]
    assert [(j.experiment.name, j.name, j.seed) for j in jobs] == [
        (*one, seed) for seed in (0, 1) for one in once
    ]
    assert len(run.plan(["all", "taps"], 1, "smoke", None)) == sum(
        len(e.variants) for e in EXPERIMENTS.values()
    )
