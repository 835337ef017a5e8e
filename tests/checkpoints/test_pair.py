"""A target and its head, loaded so that they fit; and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoints.folder_edits import equal

import peagle_jax
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.pair import check_fit, load_drafter_for
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.layers.fp8 import Fp8Linear
from peagle_jax.targets.sharding import make_mesh
from peagle_jax.types import InputError

AUX_LAYERS = (1, 2, 4)  # not what a target gives unless it is told to


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a head of its width with its embedding, and the same head without it."""
    root = tmp_path_factory.mktemp("pair")
    save_target(tiny.target(), root / "target")
    save_drafter(head(), root / "head")
    save_drafter(head(), root / "shared", own_embedding=False)
    return root


def head():
    model = tiny.head(dim=24, aux_hidden_state_layers=AUX_LAYERS)
    embed = {"table": tiny.target().params["embed"]["table"]}
    return dataclasses.replace(model, params={**model.params, "embed": embed})


def generated(target, drafter):
    answers = peagle_jax.generate(target, drafter, [[7, 30, 2]], k=3, max_new_tokens=8, stop_ids=())
    return answers[0].output_token_ids


@pytest.mark.parametrize("name", ["head", "shared"])
def test_the_head_and_what_it_needs_of_its_target(name, folders):
    target, drafter = peagle_jax.load_pair(folders / "target", folders / name)
    assert target.config.aux_hidden_state_layers == AUX_LAYERS
    equal(drafter, head())
    assert generated(target, drafter) == tiny.greedy((7, 30, 2), 8)


def test_a_head_that_does_not_name_its_layers(folders, tmp_path):
    """The target's number of layers says which hidden states vLLM would take."""
    save_target(tiny.target(layers=9, windows=(None,) * 9), tmp_path / "target")
    save_drafter(tiny.head(), tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    config.write_text(config.read_text().replace("eagle_aux_hidden_state_layer_ids", "nothing"))
    target, drafter = peagle_jax.load_pair(tmp_path / "target", tmp_path / "head")
    assert target.config.aux_hidden_state_layers == (2, 4, 6)
    assert drafter.config.aux_hidden_state_layers == (2, 4, 6)


def test_precision(folders):
    target, drafter = peagle_jax.load_pair(
        folders / "target",
        folders / "shared",
        dtype=jnp.bfloat16,
        fp8=True,
        kv_cache_dtype=jnp.float8_e4m3fn,
    )
    assert target.config.dtype == drafter.config.dtype == jnp.bfloat16
    assert target.config.cache_dtype == jnp.dtype(jnp.float8_e4m3fn)
    assert target.params["blocks"][0]["mlp"]["up"]["values"].dtype == jnp.float8_e4m3fn
    assert isinstance(drafter.bind(drafter.params).lm_head, Fp8Linear)


def test_on_a_mesh(folders):
    """The target is spread; the head takes a copy of its embedding. Decoding: tests/targets."""
    mesh = make_mesh(jax.devices()[:1])
    target, drafter = peagle_jax.load_pair(folders / "target", folders / "shared", mesh=mesh)
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(target.params))
    equal(drafter, head())


def test_a_further_head(folders):
    """Of a target that is loaded already; it takes the target's dtype and embedding."""
    target, _ = peagle_jax.load_pair(folders / "target", folders / "head", dtype=jnp.bfloat16)
    drafter = load_drafter_for(target, folders / "shared")
    assert drafter.config.dtype == jnp.bfloat16
    table = np.asarray(target.params["embed"]["table"])
    np.testing.assert_array_equal(drafter.params["embed"]["table"], table)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target_dim": 22}, "the target's width 24; got 22"),
        ({"vocab": 43, "draft_vocab": 43}, "vocabulary of 41 tokens; got 43"),
        (
            {"aux_hidden_state_layers": (0, 1, 2, 9)},
            r"the target's layers 0\.\.4; got \[9\]; use the target that the head was trained on",
        ),
    ],
)
def test_a_head_of_another_target(changes, message, folders, tmp_path):
    """Wherever the two meet, and before the weights of either are read."""
    head, target = tmp_path / "other", tmp_path / "target"
    save_drafter(tiny.head(**changes), head)
    target.mkdir()
    (target / "config.json").write_bytes((folders / "target" / "config.json").read_bytes())
    with pytest.raises(InputError, match=message):
        peagle_jax.load_pair(target, head)
    with pytest.raises(InputError, match=message):
        load_drafter_for(tiny.target(), head)
    for to in ("speculators", "vllm"):
        with pytest.raises(InputError, match=message):
            peagle_jax.convert(head, tmp_path / to, to=to, target=target)
        assert not (tmp_path / to).exists()


def test_layers_that_the_target_does_not_give(folders):
    with pytest.raises(InputError, match=r"aux_hidden_state_layers \[1, 2, 4\]; got \[1, 2, 3\]"):
        load_drafter_for(tiny.target(), folders / "head")
    with pytest.raises(InputError, match=r"\[1, 2, 4\]; got \[1, 2, 3\]; load both with load_pair"):
        check_fit(tiny.target(), head())


def test_a_target_in_the_place_of_a_head(folders):
    with pytest.raises(InputError, match="name a head, not a target"):
        peagle_jax.load_pair(folders / "target", folders / "target")
