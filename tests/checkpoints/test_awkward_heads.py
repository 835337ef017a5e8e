"""Heads that other projects write and vLLM 0.32 reads in its own way: read as it does, or refused.

What vLLM does was asked of it (scripts/peers/check_matrix.py has the way): with each of these
changes made to the packaged P-EAGLE head it drafted what the comments say.
"""

import json
import shutil

import numpy as np
import pytest
import tiny
from folder_edits import edit, equal

from peagle_jax import weights
from peagle_jax.checkpoints.config_reading import read_config
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.pair import load_pair
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.checkpoints.serving_checks import check_servable
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.decode.generate import generate
from peagle_jax.layers import Rope
from peagle_jax.types import InputError

IDS = "eagle_aux_hidden_state_layer_ids"
THETA = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.fixture
def folder(tmp_path):
    head = tiny.head(vocab=41, draft_vocab=41)
    save_drafter(head, tmp_path / "head")
    return tmp_path / "head"


def refusal(folder):
    with pytest.raises(InputError) as caught:
        read_head(folder)
    return str(caught.value)


def refusal_of_serving(folder):
    with pytest.raises(InputError) as caught:
        check_servable(read_head(folder), folder)
    return str(caught.value)


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    ("parameters", "scaling", "words"),
    [
        (THETA, LINEAR, "about rope_type; got default and linear"),
        (
            {**THETA, "rope_type": "linear", "factor": 2.0},
            {"type": "linear", "factor": 3.0},
            "factor",
        ),
        (
            THETA,
            {"rope_type": "default", "rope_theta": 5.0},
            "about rope_theta; got 10000.0 and 5.0",
        ),
        (THETA | LINEAR, {"rope_type": "linear"}, "about factor; got 2.0 and None"),
    ],
)
def test_two_rotations_that_disagree(folder, tmp_path, parameters, scaling, words):
    """vLLM takes rope_scaling, and other readers rope_parameters."""
    awkward = edit(folder, tmp_path / "out", rope_parameters=parameters, rope_scaling=scaling)
    message = refusal(awkward)
    assert "rope_parameters and rope_scaling must say the same" in message and words in message


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {},
        {"rope_type": "default"},
        {"type": "default", "factor": None},
        {"rope_type": "default", "rope_theta": 10000.0},
    ],
)
def test_two_rotations_that_agree(folder, tmp_path, scaling):
    same = edit(folder, tmp_path / "out", rope_parameters=THETA, rope_scaling=scaling)
    equal(load_drafter(same), load_drafter(edit(folder, tmp_path / "x", rope_parameters=THETA)))


def test_what_we_write_agrees_with_itself(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    head = tiny.head(vocab=41, draft_vocab=41, rope=Rope.from_hf({"rope_parameters": rope}, 10, ""))
    save_drafter(head, tmp_path / "head")
    raw = weights.read_json(tmp_path / "head" / "config.json")
    assert raw["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    equal(load_drafter(tmp_path / "head"), head)


@pytest.mark.parametrize("parameters", [..., {"rope_type": "default"}])
def test_no_theta_is_that_of_the_config_class(folder, tmp_path, parameters):
    """LlamaConfig and Qwen3Config mean 10000.0 by it, and so does vLLM."""
    awkward = edit(folder, tmp_path / "out", rope_parameters=parameters, rope_theta=...)
    plain = edit(folder, tmp_path / "plain", rope_parameters=THETA, rope_theta=...)
    equal(load_drafter(awkward), load_drafter(plain))


def test_descending_ids_are_collected_in_layer_order(folder, tmp_path):
    """vLLM drafts the same with them: hidden states come as the target computes them."""
    raw = weights.read_json(folder / "config.json")
    ids = raw[IDS][::-1]
    assert ids != raw[IDS]
    eagle = {**raw["eagle_config"], IDS: ids}
    equal(
        load_drafter(edit(folder, tmp_path / "out", **{IDS: ids}, eagle_config=eagle)),
        load_drafter(folder),
    )
    # our own format holds heads that nothing else runs, and keeps the order of their training
    own = {**raw, IDS: ids, "eagle_config": eagle, "architectures": ["PeagleJaxDraftHead"]}
    tensors = read_head(folder).tensors
    assert read_config(own, tensors, "own").aux_hidden_state_layers == tuple(ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 2.0}}, "got dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ({"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_rotations_that_are_not_computed_here(folder, tmp_path, changes, words):
    """vLLM serves them; here one line says that they are not read."""
    message = refusal(edit(folder, tmp_path / "out", rope_scaling=..., **changes))
    assert words in message and "\n" not in message


# ---------------------------------------------------------------- tensors


def test_tensors_that_no_head_reads(folder, tmp_path):
    """Saved frequencies, and a second hidden_norm; vLLM reads neither."""
    head = tiny.head(vocab=41, draft_vocab=41, layers=2, windows=(None, None))
    save_drafter(head, tmp_path / "two")
    stray = {
        "midlayer.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "layers.1.hidden_norm.weight": np.full(head.config.dim, 3.0, np.float32),
    }
    awkward = edit(tmp_path / "two", tmp_path / "out", lambda arrays: arrays | stray)
    equal(load_drafter(awkward), load_drafter(tmp_path / "two"))
    state = read_head(awkward)
    assert set(state.left_out) >= {"layers.1.hidden_norm.weight"} and len(state.left_out) == 3
    check_servable(state, awkward)
    # what is left out is said where the head is written again, and is not there any more
    convert(awkward, tmp_path / "again", to="vllm", k=3)
    assert "layers.1.hidden_norm.weight" in weights.read_metadata(tmp_path / "again")["left_out"]
    assert (
        weights.open_folder(tmp_path / "again").keys()
        == weights.open_folder(tmp_path / "two").keys()
    )


def test_the_first_layers_own_norm_is_needed(folder, tmp_path):
    def without(arrays):
        return {name: x for name, x in arrays.items() if "hidden_norm" not in name}

    awkward = edit(folder, tmp_path / "out", without)
    with pytest.raises(InputError, match="missing: layers.0.hidden_norm.weight"):
        read_head(awkward).check()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A target, a head that has the target's lm_head, and the same head without it."""
    root = tmp_path_factory.mktemp("shared")
    target = tiny.target(vocab=41)
    save_target(target, root / "target")
    head = tiny.head(vocab=41, draft_vocab=41, dim=target.config.dim)
    matrix = np.asarray(target.bind(target.params).lm_head_weight()).T
    save_drafter(head, root / "own")
    edit(root / "own", root / "whole", lambda arrays: {**arrays, "lm_head.weight": matrix})
    edit(
        root / "whole",
        root / "without",
        lambda arrays: {name: x for name, x in arrays.items() if name != "lm_head.weight"},
    )
    return root


def test_an_absent_lm_head_is_the_targets(shared, tmp_path):
    target, head = load_pair(shared / "target", shared / "without")
    _, whole = load_pair(shared / "target", shared / "whole")
    equal(head, whole)
    one, other = (generate(target, h, [[1, 2, 3]], k=2, max_new_tokens=6) for h in (head, whole))
    assert one[0].num_accepted_per_pos == other[0].num_accepted_per_pos
    check_servable(read_head(shared / "without"), shared / "without")
    # it stays shared in the vllm format, and the speculators format has no place for that
    convert(shared / "without", tmp_path / "a", to="vllm", k=3)
    assert "lm_head.weight" not in weights.open_folder(tmp_path / "a")
    with pytest.raises(InputError, match="has its own lm_head; got a shared one"):
        convert(shared / "without", tmp_path / "b", to="speculators", k=3, target=shared / "target")


def test_an_absent_lm_head_needs_a_target(shared):
    embedding = np.zeros((41, 24), np.float32)
    with pytest.raises(InputError, match="needs lm_head.weight, or its target's; got neither"):
        load_drafter(shared / "without", embedding=embedding)


def test_a_reduced_vocabulary_shares_no_lm_head(tmp_path):
    save_drafter(tiny.head(vocab=41, draft_vocab=20), tmp_path / "head")

    def without(arrays):
        return {name: x for name, x in arrays.items() if name != "lm_head.weight"}

    awkward = edit(tmp_path / "head", tmp_path / "out", without)
    with pytest.raises(InputError, match="missing: lm_head.weight"):
        read_head(awkward).check()


# ---------------------------------------------------------------- read here, refused by vLLM


def test_the_targets_tensors_are_left_out_and_not_served(folder, tmp_path):
    """vLLM 0.32: "There is no module or parameter named 'verifier_lm_head'"."""
    extra = {"verifier_lm_head.weight": np.ones((41, 24), np.float32)}
    awkward = edit(folder, tmp_path / "out", lambda arrays: arrays | extra)
    equal(load_drafter(awkward), load_drafter(folder))
    message = refusal_of_serving(awkward)
    assert "verifier_lm_head.weight" in message and "peagle convert --to vllm" in message
    convert(awkward, tmp_path / "again", to="vllm", k=3)
    check_servable(read_head(tmp_path / "again"), tmp_path / "again")


def test_an_index_that_names_absent_files(folder, tmp_path):
    """vLLM 0.32: "Weight files referenced in index but missing"."""
    awkward = tmp_path / "out"
    shutil.copytree(folder, awkward)
    weight_map = {name: "model.safetensors" for name in weights.open_folder(folder)}
    index = {"metadata": {}, "weight_map": weight_map | {"x": "model-00002.safetensors"}}
    (awkward / weights.INDEX).write_text(json.dumps(index))
    equal(load_drafter(awkward), load_drafter(folder))
    message = refusal_of_serving(awkward)
    assert "model-00002.safetensors" in message and f"delete {weights.INDEX}" in message
    index["weight_map"].pop("x")
    (awkward / weights.INDEX).write_text(json.dumps(index))
    check_servable(read_head(awkward), awkward)


def test_windows_in_some_layers_are_not_served(tmp_path):
    """vLLM 0.32: "All drafting layers should belong to the same kv cache group"."""
    save_drafter(tiny.head(vocab=41, draft_vocab=41, layers=2, windows=(4, 4)), tmp_path / "head")
    kinds = ["sliding_attention", "full_attention"]
    awkward = edit(tmp_path / "head", tmp_path / "out", layer_types=kinds)
    assert read_head(awkward).config.windows == (4, None)
    assert "vLLM drafts with one cache" in refusal_of_serving(awkward)
