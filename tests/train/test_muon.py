"""Muon: its steps are torch's, and only matrices between hidden states take them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from peagle_jax.train.recipe_sections import OptimizerConfig
from peagle_jax.train.update import make_optimizer, muon_or_adamw
from peagle_jax.weights import flatten_params

torch = pytest.importorskip("torch")
STEPS, LR, DECAY = 4, 0.03, 0.3
CONFIG = OptimizerConfig(
    name="muon", steps=STEPS, peak_lr=LR, warmup=0, weight_decay=DECAY, max_grad_norm=1e9
)


def cosine(step):
    """The learning rate: from its peak to a tenth of it."""
    return LR * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * step / STEPS)))


@pytest.mark.parametrize("shape", [(6, 10), (11, 5)])
def test_the_first_step_is_torchs(shape):
    """Of the later ones Optax's differ: its momentum has Adam's correction of the first steps.

    torch's Newton-Schulz iterations are in bfloat16, hence the tolerance.
    """
    rng = np.random.default_rng(3)
    weight, gradient = rng.normal(size=(2, *shape)).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(weight))
    theirs.grad = torch.tensor(gradient)
    torch.optim.Muon(
        [theirs], lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    ).step()
    params = {"fusion": {"fc": {"kernel": jnp.asarray(weight)}}}
    optimizer = make_optimizer(CONFIG)
    grads = {"fusion": {"fc": {"kernel": jnp.asarray(gradient)}}}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    ours = np.asarray(optax.apply_updates(params, updates)["fusion"]["fc"]["kernel"])
    step = np.abs(weight * LR * DECAY - weight + theirs.detach().numpy()).max()
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=0.05 * step)
    rms = np.sqrt(np.mean((ours - weight * (1 - LR * DECAY)) ** 2)) / LR
    assert 0.1 < rms < 0.3  # the size of AdamW's steps


def test_everything_else_takes_adamws_steps():
    shape = {"dim": 48, "heads": 6, "kv_heads": 3, "head_dim": 8}
    head = tiny.head(**shape, placeholder_hidden="per_depth", markov_rank=4, confidence=True)
    labels = dict(flatten_params(muon_or_adamw(head.params)))
    sizes = dict(flatten_params(head.params))
    with_muon = {path for path, label in labels.items() if label == "muon"}
    tables = {"lm_head.kernel", "markov.w2.kernel", "confidence.kernel"}
    assert with_muon == {path for path in sizes if path.endswith(".kernel")} - tables
    assert {"fusion.fc.kernel", "layers.0.mlp.down.kernel"} <= with_muon

    rng = np.random.default_rng(5)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), head.params)
    after = {}
    for name in ("muon", "adamw"):
        config = OptimizerConfig(**(vars(CONFIG) | {"name": name}))
        optimizer, params = make_optimizer(config), head.params
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        after[name] = dict(flatten_params(params))
    for path in sizes:
        same = np.array_equal(after["muon"][path], after["adamw"][path])
        assert same == (path not in with_muon), path


def test_each_expert_is_a_matrix_of_its_own():
    rng = np.random.default_rng(7)
    gradient = jnp.asarray(rng.normal(size=(3, 6, 4)), jnp.float32)
    params = {"experts": {"kernel": jnp.zeros_like(gradient)}}
    optimizer = make_optimizer(CONFIG)
    updates, _ = optimizer.update({"experts": {"kernel": gradient}}, optimizer.init(params), params)
    for i in range(3):
        alone = {"kernel": jnp.zeros((6, 4))}
        one, _ = optimizer.update({"kernel": gradient[i]}, optimizer.init(alone), alone)
        np.testing.assert_allclose(updates["experts"]["kernel"][i], one["kernel"], atol=1e-6)
