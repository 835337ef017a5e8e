"""A training step that does not fit the memory is refused, with sizes, before anything is done."""

import jax.numpy as jnp
import pytest
from test_divergence import objective, run_in, saved

from peagle_jax.train import step_memory
from peagle_jax.train.trainer import fit
from peagle_jax.types import InputError

SIZE = 12_000  # of a loss that sorts so many times so many numbers, 576 MB


def loss(params, batch, frozen, denominators):
    numbers = params["w"] * jnp.arange(SIZE * SIZE, dtype=jnp.float32)
    return jnp.sum(jnp.sort(numbers * batch)[:: SIZE - 1] ** 2), {}


def train(run):
    params = {"w": jnp.array([0.5])}
    return fit(run, params, objective(loss), lambda step: jnp.ones(1), None, say=lambda _: None)


def test_a_step_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(step_memory, "free_bytes", lambda: 480_000_000)
    with pytest.raises(InputError) as caught:
        train(run_in(tmp_path))
    message = str(caught.value)
    assert "beside parameters and optimizer; got 0.48 GB free; raise gradient_accum" in message
    taken = float(message.split("takes ")[1].split(" GB")[0])
    assert 0.57 < taken < 4
    assert saved(tmp_path) == [] and (tmp_path / "metrics.jsonl").read_text() == ""


def test_where_nothing_is_known_a_step_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(step_memory, "free_bytes", lambda: None)
    monkeypatch.setattr("test_step_memory.SIZE", 10)
    assert train(run_in(tmp_path)).step == 9
