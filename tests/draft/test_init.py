"""What a head's parameters are before training, and what is refused."""

import dataclasses

import designs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from peagle_jax.draft.head import DraftHead
from peagle_jax.draft.init import init_from_head, init_from_target, init_placeholders
from peagle_jax.types import InputError
from peagle_jax.weights import flatten_params

IDENTITY = {"dim": 24, "mlp_dim": 40, "heads": 4, "kv_heads": 2, "head_dim": 12}


def test_a_head_starts_as_its_targets_last_layer():
    target, head = tiny.target(), tiny.head(3, qk_norm=True, **IDENTITY)
    made = init_from_target(head, target)
    last, (first, second) = (
        target.params["blocks"][3],
        (made.params["layers"][0], made.params["layers"][1]),
    )
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(
            first["attn"][name]["kernel"][24:], last["attn"][name]["kernel"]
        )  # the feature half
        np.testing.assert_array_equal(
            first["attn"][name]["kernel"][:24],
            head.params["layers"][0]["attn"][name]["kernel"][:24],
        )
        np.testing.assert_array_equal(second["attn"][name]["kernel"], last["attn"][name]["kernel"])
    for layer in (first, second):
        jax.tree.map(np.testing.assert_array_equal, layer["mlp"], last["mlp"])
        np.testing.assert_array_equal(layer["attn"]["o"]["kernel"], last["attn"]["o"]["kernel"])
    np.testing.assert_array_equal(
        second["attn"]["q_norm"]["scale"], last["attn"]["q_norm"]["scale"]
    )
    np.testing.assert_array_equal(second["input_norm"]["scale"], last["attn_norm"]["scale"])
    np.testing.assert_array_equal(made.params["norm"]["scale"], target.params["norm"]["scale"])
    fc = np.asarray(made.params["fusion"]["fc"]["kernel"]) - 0.1 * np.asarray(
        head.params["fusion"]["fc"]["kernel"]
    )
    np.testing.assert_allclose(fc, np.vstack([np.zeros((48, 24)), np.eye(24)]), atol=1e-6)
    for same in ("mask_hidden", "embed", "lm_head"):
        jax.tree.map(np.testing.assert_array_equal, made.params[same], head.params[same])

    def shapes(m):
        return {path: (x.shape, x.dtype) for path, x in flatten_params(m.params)}

    assert shapes(made) == shapes(head)


def test_injected_keys_and_values_begin_as_the_layers_own():
    """Behind the norm that its keys and values come from, and of no embedding."""
    shape = {"qk_norm": True, **IDENTITY}
    head = tiny.head(3, placeholder_context="injected", **shape)
    target, plain = tiny.target(), tiny.head(8, **shape)
    from_target, from_head = init_from_target(head, target), init_from_head(head, plain, "x")
    for made, norm in (
        (from_target, target.params["blocks"][3]["attn_norm"]),
        (from_head, plain.params["layers"][1]["input_norm"]),
    ):
        first, second = made.params["layers"][0], made.params["layers"][1]
        assert not {"context_norm", "context_token_norm"} & first.keys()
        np.testing.assert_array_equal(second["context_norm"]["scale"], norm["scale"])
        assert not np.asarray(second["context_token_norm"]["scale"]).any()
    # of a head that has such norms they are taken over
    again = init_from_head(tiny.head(5, placeholder_context="injected", **shape), head, "x")
    jax.tree.map(np.testing.assert_array_equal, again.params["layers"], head.params["layers"])


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


@pytest.mark.parametrize("name", designs.ALL)
def test_placeholders_start_as_what_is_most_ordinary(name):
    """Each design has its own form of that.

    The hidden side begins as the mean aux hidden states, the token side as the mean embedding or
    the target's row.
    """
    head = tiny.head(3, **designs.ALL[name])
    hidden, token = head.config.placeholder_hidden, head.config.placeholder_token
    aux_hidden_states = np.linspace(-1, 2, 72).astype(np.float32)
    fuse = jax.jit(lambda x: head.bind(head.params).fuse(x))
    made = init_placeholders(head, jnp.asarray(aux_hidden_states), seed=4)
    table = np.asarray(head.params["embed"]["table"])
    last = np.full(20, 3.0, np.float32)
    for depth in (1, 5):
        got = designs.fused(made, depth, last, fuse)
        mean = np.asarray(fuse(aux_hidden_states[None]))[0]
        want = {"last_feature": last, "zero": 0 * last, "gated": (last + mean) / 2}.get(
            hidden, mean
        )
        if hidden == "frozen_random":
            vector = np.asarray(made.params["mask_hidden"])
            assert 0.7 < rms(vector) / rms(aux_hidden_states) < 1.4
            assert abs(np.corrcoef(vector, aux_hidden_states)[0, 1]) < 0.3
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    want = {
        "mask": table.mean(axis=0),
        "mean": table.mean(axis=0),
        "frozen": table[5],
        "last_token": last,
        "zero": 0 * last,
    }[token]
    np.testing.assert_allclose(designs.embedding(made, last), want, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(
        np.delete(made.params["embed"]["table"], 5, axis=0), np.delete(table, 5, axis=0)
    )
    if token != "mask":
        np.testing.assert_array_equal(made.params["embed"]["table"], table)
    assert {p: (x.shape, x.dtype) for p, x in flatten_params(made.params)} == {
        p: (x.shape, x.dtype) for p, x in flatten_params(head.params)
    }
    small = init_placeholders(head, None, seed=4)
    if "mask_hidden" in small.params and hidden != "frozen_random":
        assert 0.01 < np.std(small.params["mask_hidden"]) < 0.03


def _layers(config):
    state = nnx.to_pure_dict(nnx.state(DraftHead(config, rngs=nnx.Rngs(6))))
    return list(flatten_params({name: state[name] for name in ("layers", "lm_head", "fusion")}))


def test_layers_begin_alike_whatever_the_placeholder():
    """One seed, any design or none: comparisons are paired by it."""
    plain = _layers(tiny.head_config())
    for changes in (*designs.ALL.values(), {"mask_token": None}):
        for (path, a), (_, b) in zip(plain, _layers(tiny.head_config(**changes)), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{path} {changes}")


def test_the_head_given_is_left_alone():
    head = tiny.head(4, qk_norm=True, **IDENTITY)
    before = jax.tree.map(np.array, head.params)
    init_from_target(head, tiny.target())
    init_placeholders(head, jnp.zeros(72), seed=0)
    jax.tree.map(np.testing.assert_array_equal, before, head.params)


def test_a_narrower_mlp_gets_the_neurons_of_largest_weights():
    """Neurons 3 and 17 are made small, in one vector each; the head has two neurons fewer."""
    target = tiny.target()
    mlp = jax.tree.map(np.array, target.params["blocks"][3]["mlp"])
    mlp["up"]["kernel"][:, 3] *= 0.01
    mlp["down"]["kernel"][17] *= 0.01
    blocks = {**target.params["blocks"], 3: {**target.params["blocks"][3], "mlp": mlp}}
    target = dataclasses.replace(target, params={**target.params, "blocks": blocks})
    made = init_from_target(tiny.head(3, qk_norm=True, **{**IDENTITY, "mlp_dim": 38}), target)
    for layer in made.params["layers"].values():
        np.testing.assert_array_equal(
            layer["mlp"]["gate"]["kernel"], np.delete(mlp["gate"]["kernel"], [3, 17], axis=1)
        )
        np.testing.assert_array_equal(
            layer["mlp"]["up"]["kernel"], np.delete(mlp["up"]["kernel"], [3, 17], axis=1)
        )
        np.testing.assert_array_equal(
            layer["mlp"]["down"]["kernel"], np.delete(mlp["down"]["kernel"], [3, 17], axis=0)
        )


@pytest.mark.parametrize("changes", [{"dim": 20}, {"mlp_dim": 44}, {"heads": 2}, {"head_dim": 10}])
def test_other_shapes_are_refused(changes):
    key = next(iter(changes))
    message = f"^init: target, head.{key}: the head's {key} must be (at most )?the target's"
    with pytest.raises(InputError, match=message):
        init_from_target(tiny.head(3, **{**IDENTITY, **changes}), tiny.target())


@pytest.mark.parametrize("qk_norm", [False, True])
def test_norms_of_queries_and_keys_are_the_targets(qk_norm):
    """Queries and keys that were trained in front of norms have any size."""
    target = tiny.target()
    if qk_norm:  # a target without
        last = target.params["blocks"][3]
        attention = {name: x for name, x in last["attn"].items() if not name.endswith("_norm")}
        blocks = {**target.params["blocks"], 3: {**last, "attn": attention}}
        target = dataclasses.replace(target, params={**target.params, "blocks": blocks})
    right = str(not qk_norm).lower()
    with pytest.raises(InputError, match=f"got {qk_norm}; set head.qk_norm: {right}, or"):
        init_from_target(tiny.head(3, qk_norm=qk_norm, **IDENTITY), target)


def test_a_draft_vocabulary_goes_with_its_output_matrix():
    """Of a head of another width, whose tokens are others than the new one's."""
    vocab = {"vocab": 48, "draft_vocab": 20}
    new, old = tiny.head(2, **vocab), tiny.head(1, dim=24, **vocab)
    old_ids, new_ids = (jnp.arange(20) % n for n in (7, 3))
    old = dataclasses.replace(old, params={**old.params, "d2t": old_ids})
    new = dataclasses.replace(new, params={**new.params, "d2t": new_ids})
    made = init_from_head(new, old, "x").params
    np.testing.assert_array_equal(made["d2t"], new_ids)
    np.testing.assert_array_equal(made["lm_head"]["kernel"], new.params["lm_head"]["kernel"])
    alike = tiny.head(1, **vocab)
    alike = dataclasses.replace(alike, params={**alike.params, "d2t": old_ids})
    made = init_from_head(new, alike, "x").params
    np.testing.assert_array_equal(made["d2t"], old_ids)
    np.testing.assert_array_equal(made["lm_head"]["kernel"], alike.params["lm_head"]["kernel"])


def test_another_heads_parameters_are_taken_over():
    """An EAGLE-3 head of one layer into a P-EAGLE head of two.

    The second layer and the placeholder stay.
    """
    old, new = tiny.head(1, layers=1, mask_token=None, windows=(None,)), tiny.head(2)
    made = dict(flatten_params(init_from_head(new, old, "x").params))
    old_params, new_params = dict(flatten_params(old.params)), dict(flatten_params(new.params))
    for path in new_params:
        stays = path.startswith("layers.1.") or path == "mask_hidden"
        source = new_params if stays else old_params
        np.testing.assert_array_equal(made[path], source[path], err_msg=path)
    with pytest.raises(InputError, match="must read the aux hidden states of layers"):
        init_from_head(new, tiny.head(1, aux_hidden_state_layers=(0, 1, 2)), "x")
