"""The queue, with workers that do nothing: which job waits for which, and what becomes of rows."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from waiting import lines, until

from experiments import queue, watch, work
from experiments.jobs import CODE_HAS_CHANGED, Job
from experiments.queue import Queue
from experiments.registry import EXPERIMENTS
from peagle_jax.types import InputError

WORKER = """
import json, os, sys, time
spec = json.load(open(sys.argv[1]))
begin = time.time()
time.sleep(0.4)
outcome = json.load(open(os.path.join(spec["cache"], "outcomes.json"))).get(spec["variant"])
if outcome == "fails":
    sys.exit("no luck")
if outcome == "changed":
    sys.exit(3)
row = {k: spec[k] for k in ("experiment", "variant", "seed")} | {
    "exact": {"same": 1, "near_ties": 0, "different": 0},
    "export": "as it is",
    "cores": sorted(os.sched_getaffinity(0)),
    "begin": begin,
    "end": time.time(),
    "measurements": [{"acceptance_length": 2.5, "accepted_per_position": [0.5]}],
    "train_seconds": 60,
}
text = "{torn" if outcome == "torn" else json.dumps(row)
open(spec["out"], "w").write(text)
"""


@pytest.fixture
def line(tmp_path, monkeypatch):
    """Makes a queue of (experiment, variant, seed).

    Its workers take 0.4 s and write a row, fail, or write half of a row.
    """
    real, begun, processes = subprocess.Popen, [], []

    def popen(command, **options):
        assert command[1:3] == ["-m", "experiments.work"]
        begun.append(json.loads(Path(command[3]).read_text())["variant"])
        processes.append(real([sys.executable, "-c", WORKER, command[3]], **options))
        return processes[-1]

    monkeypatch.setattr(queue.subprocess, "Popen", popen)

    def make(*wanted, most=2, minutes=None, **outcomes) -> Queue:
        jobs = [Job(EXPERIMENTS[e], v, seed, "smoke") for e, v, seed in wanted]
        made = Queue(jobs, tmp_path / "cache", tmp_path / "results", "a command", most, minutes)
        (tmp_path / "cache" / "outcomes.json").write_text(json.dumps(outcomes))
        made.begun = begun
        return made

    yield make
    for process in processes:  # also those whose queue was left behind
        process.wait(30)


def finish(q: Queue) -> list[dict]:
    until(lambda: not q.step(), 30)
    return q.rows


def overlap(a: dict, b: dict) -> bool:
    return a["begin"] < b["end"] and b["begin"] < a["end"]


def test_runs_that_share_a_head_wait_for_each_other(line):
    rows = finish(
        line(
            ("sampling", "0", 0),
            ("sampling", "1", 0),
            ("hidden_designs", "gated", 0),
            ("aux_layers", "last", 0),
        )
    )
    assert [r["variant"] for r in sorted(rows, key=lambda r: r["begin"])][2:] != [] and len(
        rows
    ) == 4
    by = {r["variant"]: r for r in rows}
    assert not overlap(by["0"], by["1"]) and overlap(by["0"], by["gated"])
    assert (
        max(sum(overlap(a, b) for b in rows) for a in rows) <= 3
    )  # itself, one beside it, and the one after that


def test_a_warm_start_waits_for_the_head_that_it_starts_from(line):
    rows = finish(
        line(
            ("warm_start", "EAGLE-3 head", 0),
            ("warm_start", "the EAGLE-3 head itself", 0),
            ("warm_start", "random", 0),
        )
    )
    by = {r["variant"]: r for r in rows}
    assert not overlap(by["EAGLE-3 head"], by["the EAGLE-3 head itself"]) and overlap(
        by["EAGLE-3 head"], by["random"]
    )


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores",
)
def test_each_on_its_own_core(line):
    cores = sorted(os.sched_getaffinity(0))
    rows = finish(line(("sampling", "0", 0), ("aux_layers", "last", 0)))
    assert sorted(r["cores"] for r in rows) == [[cores[0]], [cores[1]]] and overlap(*rows)
    alone = finish(line(("sampling", "0", 0), most=1))
    assert (
        alone[0]["cores"] == cores and sorted(os.sched_getaffinity(0)) == cores
    )  # one at a time may use all


def test_rows_end_in_their_file_and_are_told_once(line, tmp_path):
    q = line(("sampling", "0", 0), ("sampling", "0", 1), ("aux_layers", "last", 0))
    finish(q)
    assert {r["seed"] for r in lines(tmp_path / "results" / "sampling.jsonl")} == {0, 1} and len(
        lines(tmp_path / "results" / "aux_layers.jsonl")
    ) == 1
    told = q.news()
    assert (
        len(told) == 3
        and "aux_layers, last, seed 0: acceptance length 2.500, 1.0 minutes of training" in told
        and q.news() == []
    )
    assert {p.name.split(".", 1)[1] for p in (tmp_path / "cache" / "jobs").iterdir()} == {
        "spec.json",
        "log",
    }


def test_a_row_begins_a_line_of_its_own(line, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "sampling.jsonl").write_text(
        '{"experiment": "sam'
    )  # a machine stopped here
    finish(line(("sampling", "0", 0)))
    first, second = (tmp_path / "results" / "sampling.jsonl").read_text().splitlines()
    assert first == '{"experiment": "sam' and json.loads(second)["variant"] == "0"
    finish(line(("sampling", "1", 0)))
    assert len((tmp_path / "results" / "sampling.jsonl").read_text().splitlines()) == 3


def test_failures_are_kept_with_their_logs(line):
    q = line(
        ("sampling", "0", 0),
        ("sampling", "0.5", 0),
        ("aux_layers", "last", 0),
        ("aux_layers", "low", 0),
        **{"0": "fails", "last": "torn"},
    )
    assert {r["variant"] for r in finish(q)} == {"0.5", "low"}
    assert {(job.name, "no luck" in log.read_text()) for job, log in q.failed} == {
        ("0", True),
        ("last", False),
    }
    assert not q.running and not q.waiting and len(q.free_cores) == 2


def test_what_ended_after_its_parent_did_is_kept(line, tmp_path):
    q = line(("sampling", "0", 0))
    while not q.running:
        q.step()
    out = q.running[0].out
    until(out.exists)  # nobody collects it
    del q  # with its lock, as if its process had ended
    again = line(("sampling", "0", 0))
    assert (
        finish(again)
        and len(again.begun) == 1
        and len(lines(tmp_path / "results" / "sampling.jsonl")) == 1
        and not out.exists()
    )
    out.write_text("{torn")
    del again
    third = line(("sampling", "0", 0))
    assert finish(third) and len(third.begun) == 2


def test_runs_that_are_equal_under_a_budget_keep_their_names(line):
    """EAGLE-3 of the smoke budget has as many layers as its parallel head."""
    rows = finish(
        line(("against_eagle3", "EAGLE-3", 0), ("against_eagle3", "EAGLE-3 of equal parameters", 0))
    )
    assert [r["variant"] for r in rows] == ["EAGLE-3", "EAGLE-3 of equal parameters"]
    first = line(("against_eagle3", "EAGLE-3", 0))
    first.step()
    until(first.running[0].out.exists)
    del first
    assert (
        finish(line(("against_eagle3", "EAGLE-3 of equal parameters", 0)))[0]["variant"]
        == "EAGLE-3 of equal parameters"
    )


def test_no_run_begins_late_and_those_that_began_end(line):
    q = line(*(("sampling", "0", seed) for seed in range(5)), minutes=0.3 / 60)
    assert q.step() and len(q.running) == 2
    assert len(finish(q)) == 2 and len(q.waiting) == 3 and q.is_late


def test_no_run_begins_after_the_code_has_changed(line, tmp_path, capsys):
    """Its keys would be those of other code, and its stages not there."""
    wanted = [("sampling", "0", 0), ("sampling", "1", 0), ("sampling", "0.5", 0)]
    q = line(*wanted, most=1, **{"1": "changed"})
    spec = json.loads(next(iter(q_specs(q, tmp_path))).read_text())
    assert spec["key"] == Job(EXPERIMENTS["sampling"], "0", 0, "smoke").key
    assert watch.follow(q, Console(width=200)) == 1
    assert [row["variant"] for row in q.rows] == ["0"] and q.failed == []
    assert [job.name for job in q.waiting] == ["1", "0.5"]
    said = capsys.readouterr().out
    assert "the code has changed since this command began" in said and "2 runs are left" in said


def q_specs(q: Queue, place: Path):
    q.step()
    return (place / "cache" / "jobs").glob("*.spec.json")


def test_a_worker_refuses_a_job_of_other_code(tmp_path, capsys):
    spec = {"experiment": "sampling", "variant": "0", "seed": 0, "budget": "smoke", "key": "5a"}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    assert work.main([str(tmp_path / "spec.json")]) == CODE_HAS_CHANGED == 3
    assert "made by the code that its command began with; got other" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers outlive a killed command")
def test_a_killed_command_ends_its_workers(tmp_path):
    worker = (
        "import time; from experiments.work import end_with_parent\n"
        f"end_with_parent(); open({str(tmp_path / 'ready')!r}, 'w').close(); time.sleep(100)"
    )
    command = (
        "import subprocess, sys, time\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}])\n"
        "print(worker.pid, flush=True); worker.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        until((tmp_path / "ready").exists)
        parent.kill()
    until(lambda: is_gone(child), 10)


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_stopping_leaves_nobody(line):
    q = line(("sampling", "0", 0), ("aux_layers", "last", 0))
    q.step()
    processes = [r.process for r in q.running]
    q.stop()
    assert (
        len(processes) == 2
        and all(p.returncode == -signal.SIGTERM for p in processes)
        and q.running == []
        and q.rows == []
    )


def test_the_newest_step_of_a_run(tmp_path):
    running = queue.Running(
        Job(EXPERIMENTS["sampling"], "0", 0, "smoke"),
        None,
        None,
        tmp_path / "o",
        tmp_path / "l",
        tmp_path,
        0.0,
    )
    assert running.last_logged() == {}
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n'
        '{"step": 2, "acceptance_length": 1.5}\n'
    )
    assert running.last_logged() == {"step": 2, "loss": 2.0}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert running.last_logged() == {}  # until the line is whole


def test_ctrl_c_while_a_worker_begins_waits_until_it_is_known(line, monkeypatch):
    q, plain = line(("sampling", "0", 0)), queue.subprocess.Popen

    def interrupted(*args, **options):
        process = plain(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(queue.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        q.step()
    [running] = q.running
    q.stop()
    assert (
        running.process.returncode == -signal.SIGTERM
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def test_a_second_queue_on_a_cache_is_refused(line):
    first = line(("sampling", "0", 0))
    with pytest.raises(InputError, match=r"cache: one command fills a cache at a time"):
        line(("sampling", "0", 0))
    del first
    line(("sampling", "0", 0))
