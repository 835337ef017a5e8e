"""The runner as a whole on the smoke budget: rows, what is done once, what resumes, what fails."""

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
import tiny
from waiting import lines, until

from experiments import report, run, work
from experiments.folders import ROOT
from experiments.jobs import Job
from experiments.registry import EXPERIMENTS
from experiments.rows import read_rows, rounded
from experiments.texts import KINDS
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
    """Exit code and output of the command with a cache and results in `place`."""
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
    """A part of the standard library. Workers compile without optimizing, a third sooner, and share
    the compilation cache of all tests."""
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
    """Folder of cache and results, exit code and output of the three runs; tests only read it."""
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
            and row["head_key"] == job.head_key
            and row["changes"] == job.changes()
        )
        assert (
            row["config"]["optimizer"]["steps"] == row["steps"] == 16 == row["curve"][-1]["step"]
            and len(row["curve"]) == 16
        )
        assert (
            row["command"]
            == "python -m experiments.run sampling hidden_designs --seeds 1 --budget smoke "
            "--only 0 1 last_feature"
        )
        assert row["stages"] == {s.name: s.key for s in job.stages()[0].with_parents()}
        assert row["train_flops"] > 1e9 and row["num_parameters"] > 1e5 and row["train_seconds"] > 0
        timed = lines_of(job, place, "result.json")["tokens_per_second"]
        assert row["train_tokens_per_second"] == rounded(timed, work.DIGITS)
        m, *others = row["measurements"]
        assert len(row["target_digest"]) == len(m["prompts_digest"]) == 16
        assert all(prompt["module"].endswith(".py") for prompt in m["prompts"])
        assert [(o["temperature"], o["sample_drafts"]) for o in others] == (
            [] if greedy else [(1.0, True)]
        ) and not m["sample_drafts"]
        assert (m["k"], m["temperature"], m["max_new_tokens"]) == (
            3,
            0.0 if greedy else 1.0,
            16,
        ) and [p["kind"] for p in m["prompts"]] == [k for k in KINDS for _ in "12"]
        drafts = sum(p["num_drafts"] for p in m["prompts"])
        accepted = [sum(p["num_accepted_per_pos"][i] for p in m["prompts"]) for i in range(3)]
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
        f"{name} (" in said for name in ("text", "target", "answers", "hidden_states", "prompts")
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
        and "3 runs are left; the same command continues with them" in said
        and "making it" not in said
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


def test_cut_short_it_continues(stages_only):
    """Ended by SIGTERM, then by Ctrl-C after a checkpoint: no step is lost, and one row comes."""
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
            and "stopped; the same command continues where it was" in " ".join(said.split())
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
    assert failed.startswith("failed: sampling, 0, seed 0; its log: ")
    log = Path(failed.split("its log: ")[1])
    assert (
        "the output folder must be writable" in log.read_text()
        and str(GREEDY.head_folder(place / "cache")) in log.read_text()
    )
    [row] = lines(place / "results" / "hidden_designs.jsonl")
    timed = lines_of(OTHER, made[0], "result.json")["tokens_per_second"]
    assert row["key"] == OTHER.key and row["train_tokens_per_second"] == rounded(
        timed, work.DIGITS
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


def test_a_head_that_vllm_has_no_place_for_is_not_called_exported():
    run = Job(EXPERIMENTS["sequential_head"], "with a Markov head", 0, "smoke").plain_run()
    status = work._export_status(run, tiny.head(markov_rank=3).config)
    assert status == "refused: vLLM has no Markov head and no confidence head"
