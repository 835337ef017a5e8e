"""Ctrl-C and SIGTERM during training: the step is saved, and the run goes on from it."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import pytest

from peagle_jax.train.config import Eagle3Run
from peagle_jax.train.run_folder import read_result, write_result
from peagle_jax.train.settings import build
from peagle_jax.train.trainer import Evaluation, fit
from peagle_jax.train.update import Objective

STEPS = 9


def run_in(folder, steps=STEPS):
    raw = {
        "target": "not read here",
        "out": str(folder),
        "data": {"source": "not read here", "seq_len": 7, "batch_size": 3},
        "optimizer": {"steps": steps, "peak_lr": 0.05, "warmup": 2},
        "save_every": 4,
        "log_every": 2,
    }
    return build(Eagle3Run, raw, "test")


def loss(params, batch, frozen, denominators):
    error = params["w"] - batch
    return jnp.sum(error**2), {}


OBJECTIVE = Objective(loss, lambda batch: None, lambda sums: sums)


def fitted(folder, eval_fn=None, said=None):
    return fit(
        run_in(folder),
        {"w": jnp.array([[3.0, -2.0]])},
        OBJECTIVE,
        lambda step: jnp.array([[1.0 + step, 0.5]]),
        None,
        None if eval_fn is None else Evaluation(eval_fn),
        (said if said is not None else []).append,
    )


def steps_saved(folder):
    return sorted(int(p.name) for p in (folder / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_step_is_saved_and_the_run_goes_on_from_it(number, tmp_path, capfd):
    """Step 6 is none that `save_every` would have saved."""
    arrived = []

    def on_signal(received, frame):
        arrived.append(received)

    def stop_at_6(step, params):
        if step == 6:
            signal.raise_signal(number)

    before = signal.signal(number, on_signal)
    try:
        fitted(tmp_path / "stopped", stop_at_6)
        assert signal.getsignal(number) is on_signal
    finally:
        signal.signal(number, before)
    assert arrived == [number]  # the handler that was there before has had it, at the end
    assert "stopping: this step is finished and saved first" in capfd.readouterr().err
    assert steps_saved(tmp_path / "stopped") == [4, 6]

    said = []
    resumed, whole = fitted(tmp_path / "stopped", None, said), fitted(tmp_path / "whole")
    assert said == [f"resumed from the checkpoint of step 6 in {tmp_path / 'stopped'}"]
    assert resumed.step == whole.step == STEPS
    assert (resumed.params["w"] == whole.params["w"]).all()


def test_a_second_signal_is_not_waited_for(tmp_path):
    def insist(step, params):
        if step == 6:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, insist)
    assert not list((tmp_path / "checkpoints").glob("6*"))


def test_outside_the_main_thread(tmp_path):
    """Python allows handlers in the main thread only; training works in any."""
    results = []
    thread = threading.Thread(target=lambda: results.append(fitted(tmp_path)))
    thread.start()
    thread.join()
    assert results[0].step == STEPS


def test_a_finished_run_is_not_measured_again(tmp_path):
    @dataclasses.dataclass
    class Result:
        folder: object
        step: int
        tokens_per_second: float | None

    run = run_in(tmp_path)
    assert read_result(run, Result) is None
    write_result(run, {"folder": tmp_path / "head", "step": STEPS, "tokens_per_second": 2.5})
    assert read_result(run, Result) is None  # the folder is missing
    (tmp_path / "head").mkdir()
    assert read_result(run, Result) == Result(tmp_path / "head", STEPS, 2.5)
    assert read_result(run_in(tmp_path, STEPS + 1), Result) is None  # stopped by a time limit
    (tmp_path / "result.json").write_text(json.dumps({"folder": "x", "step": STEPS}))
    assert read_result(run, Result) is None  # another version's
    for damaged in ("{", "[]"):
        (tmp_path / "result.json").write_text(damaged)
        assert read_result(run, Result) is None


PROGRAM = """
import signal, sys
from pathlib import Path
from test_interruption import fitted

def stop_at_3(step, params):
    if step == 3:
        signal.raise_signal(signal.SIGTERM)

fitted(Path(sys.argv[1]), stop_at_3)
"""


def test_a_process_that_is_terminated_saves_first(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=Path(__file__).parent)
    assert done.returncode == -signal.SIGTERM and steps_saved(tmp_path) == [3]
