"""A loss that is no number ends a run: it names step and rows, and saves nothing of them."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.checkpoints.orbax_io import Checkpoints
from peagle_jax.train.config import Eagle3Run
from peagle_jax.train.data import pack
from peagle_jax.train.run_folder import check_same_data
from peagle_jax.train.settings import build
from peagle_jax.train.trainer import fit
from peagle_jax.train.update import Objective
from peagle_jax.types import InputError

PARAMS = {"w": jnp.array([[3.0, -2.0]]), "v": {"u": jnp.array([1.0])}}


def run_in(folder, **changes):
    raw = {
        "target": "not read here",
        "out": str(folder),
        "data": {"source": "c.jsonl", "seq_len": 7, "batch_size": 3},
        "optimizer": {"steps": 9, "peak_lr": 0.05, "warmup": 2},
        "save_every": 2,
        "log_every": 3,
    }
    return build(Eagle3Run, raw | changes, "test")


def loss(params, batch, frozen, denominators):
    return jnp.sum((params["w"] - batch) ** 2) + 1e-3 * jnp.sum(params["v"]["u"] ** 2), {}


def objective(loss):
    return Objective(loss, lambda batch: None, lambda sums: sums)


def train(run, bad_step, bad_value=np.nan, rows_at=None):
    def batch_at(step):
        return jnp.array([[bad_value if step + 1 == bad_step else 1.0, 0.5]])

    return fit(run, PARAMS, objective(loss), batch_at, None, say=lambda _: None, rows_at=rows_at)


def saved(folder):
    return sorted(int(p.name) for p in (folder / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize("bad_step, kept", [(1, []), (2, []), (3, [2]), (4, [2]), (9, [6, 8])])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_run_stops(tmp_path, bad_step, kept, value):
    def rows_at(step):
        return [step, 100 + step]

    with pytest.raises(InputError) as caught:
        train(run_in(tmp_path), bad_step, value, rows_at)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: loss and gradients must be finite; got loss ")
    assert f"at step {bad_step}, with the rows {bad_step - 1}, {99 + bad_step} of" in message
    assert "largest: w " in message and ", v.u " in message and "\n" not in message
    assert (f"step {kept[-1]} is kept" if kept else "no checkpoint was written") in message
    assert saved(tmp_path) == kept
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert [row["step"] for row in logged] == [step for step in (3, 6) if step < bad_step]
    assert all(np.isfinite(row["loss"]) and "grad_norms" not in row for row in logged)


def test_the_run_goes_on_from_the_last_good_step(tmp_path):
    with pytest.raises(InputError, match="step 4 is kept"):
        train(run_in(tmp_path / "bad"), 5)
    resumed = train(run_in(tmp_path / "bad"), bad_step=None)
    whole = train(run_in(tmp_path / "good"), bad_step=None)
    assert resumed.step == whole.step == 9
    np.testing.assert_array_equal(resumed.params["w"], whole.params["w"])


def test_a_gradient_alone_stops_it_too(tmp_path):
    def steep(params, batch, frozen, denominators):
        # sqrt has a value at 0, and no slope
        return jnp.sum(jnp.sqrt(jnp.abs(params["w"] - batch))), {}

    def batch_at(step):
        return PARAMS["w"] if step == 0 else PARAMS["w"] + 1

    with pytest.raises(InputError, match="got loss 0, gradient norm inf at step 1"):
        fit(run_in(tmp_path), PARAMS, objective(steep), batch_at, None, say=lambda _: None)


def test_many_rows_are_not_all_named(tmp_path):
    with pytest.raises(InputError, match=r"rows 0, 1, .*, 15 and 24 more of the corpus"):
        train(run_in(tmp_path), 1, rows_at=lambda step: list(range(40)))


def packed(first):
    return pack([(np.arange(first, first + 8, dtype=np.int32), np.ones(8, bool))], 4)


def test_a_run_goes_on_with_the_data_that_it_began_with(tmp_path):
    run = run_in(tmp_path)
    tmp_path.joinpath("checkpoints").mkdir()
    check_same_data(run, packed(1))
    check_same_data(run, packed(2))  # nothing was trained yet
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(3, {"x": jnp.ones(2)})
    checkpoints.close()
    check_same_data(run, packed(2))
    with pytest.raises(InputError, match=r"data that it began with; got 2 other rows.* c\.jsonl"):
        check_same_data(run, packed(3))
    path = tmp_path / "data.json"
    data = json.loads(path.read_text())
    assert data.pop("padding") == 0
    path.write_text(json.dumps(data))  # of a run of a former version
    check_same_data(run, packed(2))
    check_same_data(run, packed(2), "t")  # it did not write the target
    path.unlink()  # of an older one
    check_same_data(run, packed(3))
    checked = dataclasses.replace(run, out=str(tmp_path / "another"))
    tmp_path.joinpath("another").mkdir()
    check_same_data(checked, packed(2), "t")
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "another" / "checkpoints")
    check_same_data(checked, packed(2), "t")
    with pytest.raises(InputError, match="target that it began with; got one with other weights"):
        check_same_data(checked, packed(2), "u")
