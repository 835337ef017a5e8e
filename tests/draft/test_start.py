"""Where a head's training starts: what is taken from the target or from another head, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.draft.start import start_from_head, start_from_target
from peagle_jax.types import InputError
from peagle_jax.weights import flat
from tests import tiny

SAME = {"dim": 24, "mlp_dim": 40, "heads": 4, "kv_heads": 2, "head_dim": 12}


def test_a_head_starts_as_its_targets_last_layer():
    target, head = tiny.target(), tiny.head(3, qk_norm=True, **SAME)
    taps = jnp.arange(72.0)
    made = start_from_target(head, target, taps)
    last, (first, second) = target.params["blocks"][3], (made.params["layers"][0], made.params["layers"][1])
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(first["attn"][name]["kernel"][24:], last["attn"][name]["kernel"])  # the feature half
        np.testing.assert_array_equal(first["attn"][name]["kernel"][:24], head.params["layers"][0]["attn"][name]["kernel"][:24])
        np.testing.assert_array_equal(second["attn"][name]["kernel"], last["attn"][name]["kernel"])
    for layer in (first, second):
        jax.tree.map(np.testing.assert_array_equal, layer["mlp"], last["mlp"])
        np.testing.assert_array_equal(layer["attn"]["o"]["kernel"], last["attn"]["o"]["kernel"])
    np.testing.assert_array_equal(second["attn"]["q_norm"]["scale"], last["attn"]["q_norm"]["scale"])
    np.testing.assert_array_equal(second["input_norm"]["scale"], last["attn_norm"]["scale"])
    np.testing.assert_array_equal(made.params["norm"]["scale"], target.params["norm"]["scale"])
    np.testing.assert_array_equal(made.params["mask_hidden"], taps)
    fc = np.asarray(made.params["fusion"]["fc"]["kernel"]) - 0.1 * np.asarray(head.params["fusion"]["fc"]["kernel"])
    np.testing.assert_allclose(fc, np.vstack([np.zeros((48, 24)), np.eye(24)]), atol=1e-6)
    table = np.asarray(head.params["embed"]["table"])
    np.testing.assert_allclose(made.params["embed"]["table"][5], table.mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(np.delete(made.params["embed"]["table"], 5, axis=0), np.delete(table, 5, axis=0))
    shapes = lambda m: {path: (x.shape, x.dtype) for path, x in flat(m.params)}  # noqa: E731
    assert shapes(made) == shapes(head)


def test_the_head_given_is_left_alone():
    head = tiny.head(4, qk_norm=True, **SAME)
    before = jax.tree.map(np.array, head.params)
    start_from_target(head, tiny.target(), jnp.zeros(72))
    jax.tree.map(np.testing.assert_array_equal, before, head.params)


def test_a_narrower_mlp_gets_the_neurons_of_largest_weights():
    """Neurons 3 and 17 are made small in one vector each: they are what a head of two neurons fewer goes without."""
    target = tiny.target()
    mlp = jax.tree.map(np.array, target.params["blocks"][3]["mlp"])
    mlp["up"]["kernel"][:, 3] *= 0.01
    mlp["down"]["kernel"][17] *= 0.01
    blocks = {**target.params["blocks"], 3: {**target.params["blocks"][3], "mlp": mlp}}
    target = dataclasses.replace(target, params={**target.params, "blocks": blocks})
    made = start_from_target(tiny.head(3, **{**SAME, "mlp_dim": 38}), target, jnp.zeros(72))
    for layer in made.params["layers"].values():
        np.testing.assert_array_equal(layer["mlp"]["gate"]["kernel"], np.delete(mlp["gate"]["kernel"], [3, 17], axis=1))
        np.testing.assert_array_equal(layer["mlp"]["up"]["kernel"], np.delete(mlp["up"]["kernel"], [3, 17], axis=1))
        np.testing.assert_array_equal(layer["mlp"]["down"]["kernel"], np.delete(mlp["down"]["kernel"], [3, 17], axis=0))


@pytest.mark.parametrize("changes", [{"dim": 20}, {"mlp_dim": 44}, {"heads": 2}, {"head_dim": 10}])
def test_other_shapes_are_refused(changes):
    with pytest.raises(InputError, match=f"head's {next(iter(changes))} must be (at most )?the target's"):
        start_from_target(tiny.head(3, **{**SAME, **changes}), tiny.target(), jnp.zeros(72))


def test_another_heads_parameters_are_taken_over():
    """An EAGLE-3 head of one layer into a P-EAGLE head of two: the second layer and the placeholder stay."""
    old, new = tiny.head(1, layers=1, mask_token=None, windows=(None,)), tiny.head(2)
    made = dict(flat(start_from_head(new, old, "x").params))
    for path, _ in flat(new.params):
        source = dict(flat(new.params)) if path.startswith("layers.1.") or path == "mask_hidden" else dict(flat(old.params))
        np.testing.assert_array_equal(made[path], source[path], err_msg=path)
    with pytest.raises(InputError, match="must read the taps"):
        start_from_head(new, tiny.head(1, taps=(0, 1, 2)), "x")
