"""The best evaluation: its head is kept, training ends when none is better, and all resumes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.checkpoints.orbax_io import Checkpoints, newest
from peagle_jax.train.config import Eagle3Run
from peagle_jax.train.settings import build
from peagle_jax.train.trainer import Evaluation, fit
from peagle_jax.train.update import Objective
from peagle_jax.types import InputError

STEPS = 12
# acceptance length by step; every second is measured
LENGTHS = {2: 1.5, 4: 2.5, 6: 2.25, 8: None, 10: 2.5, 12: 2.0}


def loss(params, batch, frozen, denominators):
    return jnp.sum((params["w"] - batch) ** 2), {}


def train(
    folder,
    keeps_best=True,
    patience=None,
    stop_after=None,
    said=None,
    patience_from=0,
    error=KeyboardInterrupt,
    **changes,
):
    raw = {
        "target": "not read here",
        "out": str(folder),
        "data": {"source": "not read here", "seq_len": 7, "batch_size": 3},
        "optimizer": {"steps": STEPS, "peak_lr": 0.05, "warmup": 2},
        "save_every": 5,
        "log_every": 3,
    }
    seen = []

    def measure(step, params):
        if step == stop_after:
            raise error  # a KeyboardInterrupt as a kill: nothing of this step is saved
        seen.append(step)
        return {"acceptance_length": LENGTHS[step]} if step in LENGTHS else None

    fitted = fit(
        build(Eagle3Run, raw | changes, "test"),
        {"w": jnp.array([[3.0, -2.0]])},
        Objective(loss, lambda batch: None, lambda sums: sums),
        lambda step: jnp.array([[1.0 + step, 0.5]]),
        None,
        Evaluation(measure, keeps_best, patience, patience_from),
        (said if said is not None else []).append,
    )
    return fitted, seen


def params_at(folder, step):
    """The parameters after a step of a run that keeps the last."""
    return train(folder, keeps_best=False, optimizer=OPTIMIZER | {"steps": step})[0].params["w"]


OPTIMIZER = {"steps": STEPS, "peak_lr": 0.05, "warmup": 2}


def steps_saved(folder):
    return sorted(int(p.name) for p in (folder / "checkpoints").glob("[0-9]*"))


def test_the_best_is_returned_and_its_checkpoint_stays(tmp_path):
    said = []
    best, _ = train(tmp_path / "best", said=said)
    last, _ = train(tmp_path / "last", keeps_best=False)
    assert (best.step, best.kept_step, best.stopped_early) == (12, 4, False)
    assert (last.step, last.kept_step) == (12, 12)
    assert not np.array_equal(best.params["w"], last.params["w"])
    assert steps_saved(tmp_path / "best") == [4, 10, 12]  # the best, and the newest two
    assert steps_saved(tmp_path / "last") == [10, 12]
    assert "the head of step 4 is kept: its acceptance length, 2.50," in said[-1]
    kept = Checkpoints(tmp_path / "best" / "checkpoints").manager.restore(4)
    np.testing.assert_array_equal(kept["params"]["w"], best.params["w"])
    assert newest(tmp_path / "best" / "checkpoints").parent.name == "12"


@pytest.mark.parametrize("start, end", [(5, 6), (6, 10), (9, 10), (10, 12)])
def test_patience_waits_for_the_last_depths(tmp_path, start, end):
    fitted, _ = train(tmp_path, patience=1, patience_from=start)
    assert (fitted.step, fitted.stopped_early, fitted.kept_step) == (end, True, 4)


@pytest.mark.parametrize("patience, end", [(1, 6), (2, 10), (3, 12)])
def test_patience_ends_the_run(tmp_path, patience, end):
    """A step at which nothing was drafted is no evaluation."""
    fitted, _ = train(tmp_path, patience=patience)
    assert (fitted.step, fitted.stopped_early, fitted.kept_step) == (end, patience < 4, 4)
    again, seen = train(tmp_path, patience=patience)
    assert (again.step, again.stopped_early, again.kept_step, seen) == (end, True, 4, [])
    np.testing.assert_array_equal(again.params["w"], fitted.params["w"])


def test_patience_without_keeping_the_best(tmp_path):
    fitted, _ = train(tmp_path, keeps_best=False, patience=1)
    assert (fitted.step, fitted.kept_step, fitted.stopped_early) == (6, 6, True)


@pytest.mark.parametrize("killed_at", [3, 4, 5, 7, 11])
def test_a_killed_run_decides_the_same(tmp_path, killed_at):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, patience=3, stop_after=killed_at)
    resumed, _ = train(tmp_path, patience=3)
    whole, _ = train(tmp_path / "whole", patience=3)
    assert (resumed.kept_step, resumed.step) == (whole.kept_step, whole.step) == (4, 12)
    np.testing.assert_array_equal(resumed.params["w"], whole.params["w"])
    assert 4 in steps_saved(tmp_path)


def test_a_number_of_checkpoints_is_kept(tmp_path):
    train(tmp_path / "a", keeps_best=False, save_every=2, keep_checkpoints=3)
    assert steps_saved(tmp_path / "a") == [8, 10, 12]
    train(tmp_path / "b", keeps_best=False, save_every=3, keep_checkpoints=None)
    assert steps_saved(tmp_path / "b") == [3, 6, 9, 12]


def test_a_run_can_be_extended(tmp_path):
    train(tmp_path, keeps_best=False, optimizer=OPTIMIZER | {"steps": 7}, log_every=2)
    longer = {"optimizer": OPTIMIZER | {"steps": 9}, "save_every": 1, "max_seconds": 900.5}
    fitted, seen = train(tmp_path, keeps_best=False, **longer)
    assert fitted.step == 9 and seen == [8, 9]
    config = (tmp_path / "config.yaml").read_text()
    assert "steps: 9" in config and "max_seconds: 900.5" in config and "log_every: 3" in config
    with pytest.raises(InputError, match=r"began with; got optimizer\.warmup 3, was 2; restore"):
        train(tmp_path, optimizer=OPTIMIZER | {"steps": 20, "warmup": 3})


@pytest.mark.parametrize(
    "section, message",
    [
        ({"patience": 0}, r"eval\.patience: must be 1 or more, or null; got 0; use 5"),
        ({"keep": "first"}, r"eval\.keep: must be one of last, best; got 'first'; use last"),
        ({"keep": "best", "every": None}, r"eval\.keep: must be last where every is null"),
        ({"patience": 3, "every": None}, r"eval\.patience: must be null where every is null"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, section, message):
    with pytest.raises(InputError, match=message):
        train(tmp_path, eval=section)
    with pytest.raises(InputError, match="keep_checkpoints: must be 1 or more, or null; got 0"):
        train(tmp_path, keep_checkpoints=0)


def test_rows_of_metrics_are_not_repeated(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, stop_after=9)
    train(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row["step"] for row in rows if "acceptance_length" in row]
    assert evaluated == list(LENGTHS)


def test_an_evaluation_that_fails_loses_no_steps(tmp_path):
    """It would fail again at each start, where init-config evaluates as often as it saves."""
    error = InputError("eval", "must fit the memory", "more", "lower it")
    with pytest.raises(InputError, match="eval: must fit the memory"):
        train(tmp_path / "a", keeps_best=False, stop_after=4, error=error)
    assert steps_saved(tmp_path / "a") == [4]
    # the next session goes on behind that evaluation
    again, seen = train(tmp_path / "a", keeps_best=False)
    whole, all_seen = train(tmp_path / "b", keeps_best=False)
    assert seen == [step for step in all_seen if step > 4]
    np.testing.assert_array_equal(again.params["w"], whole.params["w"])
