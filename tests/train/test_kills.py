"""SIGKILL while a run trains: the same command ends it with the bits of an undisturbed run."""

import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_runs
from test_runs import config, rows, same, write

from peagle_jax.cli import main

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure" / "kills.py"
STEPS = 120  # of one process: long enough to be caught in the middle
corpus, target = test_runs.corpus, test_runs.target  # fixtures


@pytest.mark.slow
def test_two_processes_with_shards_and_accumulation(tmp_path, capsys):
    """Killed at a random moment, and while they start; the script does it twenty times."""
    script = runpy.run_path(str(SCRIPT))
    row = script["compare"](tmp_path, kills=2, seed=1, steps=60, start_every=2)
    assert row["equal_weights"] and row["equal_metrics"], row
    assert row["shards"] >= 3 and row["processes"] == 2 and row["kills"] == 2
    # A run that is killed while it starts has dropped what was logged behind its checkpoint.
    assert all(0 < moment["step"] < 60 for moment in row["moments"]), row["moments"]
    assert all(moment["step"] >= moment["asked"] for moment in row["moments"]), row["moments"]
    assert {moment["asked"] > 0 for moment in row["moments"]} == {True, False}, row["moments"]
    # the comparison is of something
    head, other = tmp_path / "killed" / "head", tmp_path / "other"
    assert script["same_weights"](head, tmp_path / "whole" / "head")
    content = bytearray((head / "model.safetensors").read_bytes())
    content[-1] ^= 1
    other.mkdir()
    (other / "model.safetensors").write_bytes(content)
    assert not script["same_weights"](head, other)
    (log,) = tmp_path.glob("killed/metrics.jsonl")
    assert [r["step"] for r in rows(log.parent) if "loss" in r] == list(range(1, 61))


@pytest.mark.long
def test_one_of_two_processes_dies(tmp_path):
    """The other ends within a minute, and the same commands go on as if nothing had been."""
    script = runpy.run_path(str(SCRIPT))
    models, recipes = script["write_models"](tmp_path), {}
    for name in ("whole", "broken"):
        raw = script["recipe_of_head"](*models, tmp_path / name, 60)
        recipes[name] = write(tmp_path / f"{name}.yaml", raw)
    survivor, dying = script["start"](recipes["broken"])
    began = time.monotonic()
    while script["last_step"](tmp_path / "broken") < 10 and time.monotonic() < began + 300:
        time.sleep(0.02)
    dying.send_signal(signal.SIGKILL)
    dying.communicate()
    died = time.monotonic()
    _, said = survivor.communicate(timeout=100)
    assert time.monotonic() < died + 60 and survivor.returncode not in (0, None)
    assert said.strip(), "it says why"
    assert 10 <= script["last_step"](tmp_path / "broken") < 60
    for recipe in recipes.values():
        script["session"](recipe)
    heads = [tmp_path / name / "head" for name in recipes]
    assert script["same_weights"](*heads)


@pytest.mark.long
@pytest.mark.parametrize("task", ["peagle", "eagle3"])
def test_one_process_with_evaluations(task, corpus, target, tmp_path):
    """SIGKILL while it trains, twice; then the same command finishes it.

    Weights are the same to the bit, and metrics are the same.
    """

    def run_file(name: str) -> Path:
        raw = config(task, corpus, tmp_path / name, target)
        raw["optimizer"]["steps"] = STEPS
        raw["eval"] |= {"every": 30, "num_prompts": 2, "max_new_tokens": 6}
        raw["depth_schedule"] = [
            {"until": 10, "num_depths": 1},
            {"until": 60, "num_depths": 2},
        ]
        return write(tmp_path / f"{name}.yaml", raw)

    assert main(["train", str(run_file("whole"))]) == 0
    killed = run_file("killed")
    log = tmp_path / "killed" / "metrics.jsonl"
    # rows of metrics when it is killed, at steps 8 and 40; it saves every 4 steps
    for least in (4, 20):
        process = subprocess.Popen(
            [sys.executable, "-m", "peagle_jax.cli", "train", str(killed)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and not (
            log.exists() and len(log.read_text().splitlines()) >= least
        ):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    saved = [
        int(p.name)
        for p in (tmp_path / "killed" / "checkpoints").glob("[0-9]*")
        if p.name.isdigit()
    ]
    assert saved and max(saved) < STEPS
    assert main(["train", str(killed)]) == 0
    assert same(tmp_path / "killed" / "head", tmp_path / "whole" / "head")

    def strip(out):
        return [{k: v for k, v in r.items() if k != "seconds"} for r in rows(out)]

    assert strip(tmp_path / "killed") == strip(tmp_path / "whole")
    assert [r["step"] for r in rows(tmp_path / "whole") if "loss" in r] == list(
        range(2, STEPS + 1, 2)
    )
    num_depths = {
        r["step"]: len(r["accuracy"]) for r in rows(tmp_path / "whole") if "accuracy" in r
    }
    assert (num_depths[10], num_depths[12], num_depths[60], num_depths[62]) == (1, 2, 2, 3)
    measured = [r for r in rows(tmp_path / "whole") if "acceptance_length" in r]
    assert [r["step"] for r in measured] == [30, 60, 90, 120] and len(
        measured[0]["accepted_per_position"]
    ) == 3
    for name in ("whole", "killed"):  # time goes on where it stopped
        seconds = [r["seconds"] for r in rows(tmp_path / name)]
        assert seconds == sorted(seconds)
    result = json.loads((tmp_path / "killed" / "result.json").read_text())
    assert (
        result["step"] == STEPS and result["acceptance_length"] == measured[-1]["acceptance_length"]
    )
