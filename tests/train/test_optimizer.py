"""AdamW's steps: clipping, warm-up, cosine decay and weight decay, against formulas in NumPy."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from peagle_jax.train.recipe_sections import OptimizerConfig
from peagle_jax.train.update import make_optimizer

STEPS, WARMUP, PEAK, DECAY, LIMIT = 9, 4, 0.1, 0.3, 1.5
B1, B2, EPS = 0.9, 0.95, 1e-8


def rate(step: int) -> float:
    """From 0 in a straight line, then along half a cosine to a tenth."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    return PEAK * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * share)))


def test_steps_are_those_of_the_formulas():
    """Norms of gradients lie below the limit and far above it, in turns."""
    rng = np.random.default_rng(2)
    params = {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=5)}
    config = OptimizerConfig(
        steps=STEPS, peak_lr=PEAK, warmup=WARMUP, weight_decay=DECAY, max_grad_norm=LIMIT
    )
    optimizer = make_optimizer(config)
    ours = {name: jnp.asarray(x, jnp.float32) for name, x in params.items()}
    state = optimizer.init(ours)
    moments = {name: (np.zeros_like(x), np.zeros_like(x)) for name, x in params.items()}
    norms = []
    for step in range(STEPS):
        scale = (0.1, 5.0, 40.0)[step % 3]
        grads = {name: rng.normal(size=x.shape) * scale for name, x in params.items()}
        norms.append(np.sqrt(sum((g**2).sum() for g in grads.values())))
        clip = min(1, LIMIT / norms[-1])
        for name, grad in grads.items():
            m, v = moments[name]
            m, v = B1 * m + (1 - B1) * clip * grad, B2 * v + (1 - B2) * (clip * grad) ** 2
            moments[name] = m, v
            update = m / (1 - B1 ** (step + 1)) / (np.sqrt(v / (1 - B2 ** (step + 1))) + EPS)
            if name == "w":  # vectors have no weight decay
                update = update + DECAY * params[name]
            params[name] = params[name] - rate(step) * update
        given = {name: jnp.asarray(x, jnp.float32) for name, x in grads.items()}
        updates, state = optimizer.update(given, state, ours)
        ours = optax.apply_updates(ours, updates)
        for name, want in params.items():
            np.testing.assert_allclose(ours[name], want, rtol=1e-4, atol=1e-6)
    assert min(norms) < LIMIT < max(norms)


@pytest.mark.parametrize("steps, warmup", [(1, 300), (5, 300), (5, 0)])
def test_runs_shorter_than_their_warm_up_learn(steps, warmup):
    """The last of several steps is not of rate 0."""
    optimizer = make_optimizer(OptimizerConfig(steps=steps, peak_lr=0.1, warmup=warmup))
    params = {"w": jnp.ones((2, 2))}
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update({"w": jnp.ones((2, 2))}, state, params)
    assert jnp.abs(updates["w"]).max() > 1e-3
