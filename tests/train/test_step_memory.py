"""A training step that does not fit the memory is refused, with sizes, before anything is done."""

import jax.numpy as jnp
import pytest
from test_divergence import objective, run_in, saved

from peagle_jax.train import step_memory, trainer
from peagle_jax.train.trainer import fit
from peagle_jax.types import InputError

SIZE = 12_000  # of a loss that sorts so many times so many numbers, 576 MB


def loss(params, batch, frozen, denominators):
    numbers = params["w"] * jnp.arange(SIZE * SIZE, dtype=jnp.float32)
    return jnp.sum(jnp.sort(numbers * batch)[:: SIZE - 1] ** 2), {}


def train(run, batch_at=lambda step: jnp.ones(1)):
    params = {"w": jnp.array([0.5])}
    return fit(run, params, objective(loss), batch_at, None, say=lambda _: None)


def test_a_step_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(step_memory, "free_bytes", lambda: 480_000_000)
    with pytest.raises(InputError) as caught:
        train(run_in(tmp_path))
    message = str(caught.value)
    assert "beside parameters and optimizer, in every process; got 0.48 GB free" in message
    taken = float(message.split("takes ")[1].split(" GB")[0])
    assert 0.57 < taken < 4
    assert saved(tmp_path) == [] and (tmp_path / "metrics.jsonl").read_text() == ""


def test_where_nothing_is_known_a_step_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(step_memory, "free_bytes", lambda: None)
    monkeypatch.setattr("test_step_memory.SIZE", 10)
    assert train(run_in(tmp_path)).step == 9


def test_the_steps_before_one_that_does_not_fit_are_saved(tmp_path, monkeypatch):
    """As where a depth schedule goes on to more depths. No step is saved by save_every."""
    monkeypatch.setattr("test_step_memory.SIZE", 10)
    seen = []

    def lacks_memory(program):
        seen.append(program)
        return len(seen) == 2

    monkeypatch.setattr(trainer, "lacks_memory", lacks_memory)
    run = run_in(tmp_path, save_every=100)
    with pytest.raises(InputError, match="a training step takes"):
        train(run, lambda step: jnp.ones(1) if step < 3 else jnp.ones(1, jnp.int32))
    assert saved(tmp_path) == [3]
    forms = [jnp.ones(1), jnp.ones(1, jnp.int32)]
    assert train(run, lambda step: forms[step % 2]).step == 9
    assert len(seen) == 4, "a form that was seen before is not compiled again"
