"""Folders that vLLM 0.32 would refuse, or would draft wrongly with and say nothing: refused here.

Each is a folder that is served, but for one change. What vLLM does was read in its source; the
functions are named in peagle_jax/checkpoints/serving_checks.py.
"""

import dataclasses
import json

import numpy as np
import pytest
import tiny
from folder_edits import edit

from peagle_jax import weights
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.serving_checks import check_servable
from peagle_jax.types import InputError

IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA = {"vocab": 41, "draft_vocab": 41, "heads": 4, "kv_heads": 2, "head_dim": 10}
EAGLE3 = {"mask_token": None}
WIDER = {"target_dim": 32}


@pytest.fixture
def served(tmp_path):
    """Makes a folder of a head with some changes, which is served as it is."""

    def make(checkpoint_format="vllm", **changes):
        folder = tmp_path / f"head{len(list(tmp_path.iterdir()))}"
        head = tiny.head(**LLAMA | changes)
        save_drafter(head, folder, checkpoint_format, k=5, target="x/y")
        check_servable(read_head(folder), folder)
        return folder

    return make


def refusal(folder) -> str:
    with pytest.raises(InputError) as caught:
        check_servable(read_head(folder), folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def without(*parts):
    """An edit that removes the tensors whose names have one of these parts."""

    def change(tensors):
        return {n: x for n, x in tensors.items() if not any(part in n for part in parts)}

    return change


@pytest.mark.parametrize("checkpoint_format", ["vllm", "speculators"])
@pytest.mark.parametrize(
    ("gone", "said"),
    [(["o_proj.bias"], "layers.0.self_attn.o_proj.bias"), ([".bias"], "self_attn.q_proj.bias")],
)
def test_biases_that_the_config_promises(served, tmp_path, checkpoint_format, gone, said):
    """vLLM draws them from memory that nobody has written: acceptance falls to zero."""
    folder = served(checkpoint_format, attention_bias=True)
    awkward = edit(folder, tmp_path / "out", without(*gone))
    message = refusal(awkward)
    assert f"got no {said}" in message or said in message
    convert(awkward, tmp_path / "again", to="vllm", k=5)
    check_servable(read_head(tmp_path / "again"), tmp_path / "again")


def test_biases_that_the_config_denies(served, tmp_path):
    """vLLM leaves them out."""
    awkward = edit(served(attention_bias=True), tmp_path / "out", attention_bias=False)
    with pytest.raises(InputError, match="must be true where the weights have biases; got layers"):
        read_head(awkward)
    awkward = edit(served(attention_bias=True), tmp_path / "less", attention_bias=...)
    with pytest.raises(InputError, match="attention_bias must be true"):
        read_head(awkward)

    def zeros(tensors):
        return {n: np.zeros_like(x) if n.endswith(".bias") else x for n, x in tensors.items()}

    check = edit(awkward, tmp_path / "zeros", zeros)  # nothing is lost
    check_servable(read_head(check), check)


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_a_bias_of_the_output_beside_norms_of_queries(tmp_path, to):
    """vLLM's Qwen3 layers have none, and its loader passes over biases that it has no place for."""
    head = tiny.head(**LLAMA, attention_bias=True, qk_norm=True)
    with pytest.raises(InputError, match="have no bias of the output.*got layers.0.self_attn.o_pr"):
        save_drafter(head, tmp_path / "a", to, k=5, target="x/y")
    flat = {
        path: 0 * x if path.endswith("attn.o.bias") else x
        for path, x in weights.flatten_params(head.params)
    }
    head = dataclasses.replace(head, params=weights.unflatten_params(flat))
    save_drafter(head, tmp_path / "b", to, k=5, target="x/y")
    check_servable(read_head(tmp_path / "b"), tmp_path / "b")

    def biased(tensors):
        return {n: x + ("o_proj.bias" in n) for n, x in tensors.items()}

    assert "have no bias of the output" in refusal(edit(tmp_path / "b", tmp_path / "c", biased))


@pytest.mark.parametrize("checkpoint_format", ["vllm", "speculators"])
def test_a_qwen3_head_without_norms(served, tmp_path, checkpoint_format):
    """vLLM's norms are then as they begin, all ones."""
    folder = served(checkpoint_format, qk_norm=True)
    awkward = edit(folder, tmp_path / "out", without("q_norm", "k_norm"))
    with pytest.raises(InputError, match="has norms of queries and keys; got no layers.0"):
        read_head(awkward)


def test_layers_that_one_model_runner_does_not_find(served, tmp_path):
    """V2 looks at top level alone, and takes layers 2, L/2 and L - 3 where it finds nothing."""
    awkward = edit(served(**EAGLE3), tmp_path / "out", **{IDS: ...})
    message = refusal(awkward)
    assert f"reads the {IDS} of such a head at top level alone" in message
    convert(awkward, tmp_path / "again", to="vllm", k=5)
    check_servable(read_head(tmp_path / "again"), tmp_path / "again")
    # parallel heads are V1's, which reads both
    parallel = edit(served(), tmp_path / "parallel", **{IDS: ...})
    check_servable(read_head(parallel), parallel)
    # of speculators' format no runner looks below the top
    folder = served("speculators")
    ids = weights.read_json(folder / "config.json")[IDS]
    nested = edit(folder, tmp_path / "nested", **{IDS: ..., "eagle_config": {IDS: ids}})
    assert "at top level alone" in refusal(nested)


def test_other_engines_read_in_their_own_way(served, tmp_path):
    """SGLang's own layout has ids in `eagle_config` alone."""
    awkward = edit(served(**EAGLE3), tmp_path / "out", **{IDS: ...})
    check_servable(read_head(awkward), awkward, by_vllm=False)
    extra = {"verifier_norm.weight": np.ones(24, np.float32)}
    foreign = edit(served(**EAGLE3), tmp_path / "foreign", lambda tensors: tensors | extra)
    with pytest.raises(InputError, match="tensors that are the target's"):
        check_servable(read_head(foreign), foreign, by_vllm=False)


def test_llamas_layers_have_no_norms_of_queries(served, tmp_path):
    folder = served(qk_norm=True)
    awkward = edit(folder, tmp_path / "out", architectures=["LlamaForCausalLMEagle3"])
    assert "makes Llama's layers of LlamaForCausalLMEagle3, which have no norms" in refusal(awkward)


@pytest.mark.parametrize("key", ["bias", "qkv_bias"])
def test_other_names_of_the_key_of_biases(served, tmp_path, key):
    """As vLLM's llama.py knows them."""
    folder = served(attention_bias=True)
    read_head(edit(folder, tmp_path / "out", **{"attention_bias": False, key: True}))


def test_a_kind_of_layers_that_is_no_word(served, tmp_path):
    folder = served("speculators")
    shape = weights.read_json(folder / "config.json")["transformer_layer_config"]
    awkward = edit(folder, tmp_path / "out", transformer_layer_config=shape | {"model_type": [1]})
    with pytest.raises(InputError, match="model_type must be"):
        read_head(awkward)


def test_how_many_hidden_states_are_counted(served, tmp_path):
    """In `eagle_config`, or three; a Qwen3 head counts those at top level, too."""
    four = {"aux_hidden_state_layers": (1, 2, 3, 4)}
    awkward = edit(served(**four), tmp_path / "a", eagle_config=..., num_aux_hidden_states=...)
    message = refusal(awkward)
    assert "vLLM would count 3 aux hidden states; got 4" in message
    qwen3 = edit(
        served(**four, qk_norm=True), tmp_path / "b", eagle_config=..., num_aux_hidden_states=...
    )
    check_servable(read_head(qwen3), qwen3)
    qwen3 = edit(served(**four, qk_norm=True), tmp_path / "d", num_aux_layers=3)
    assert "vLLM would count 3" in refusal(qwen3)
    nested = edit(served(**four), tmp_path / "c", num_aux_hidden_states=...)
    check_servable(read_head(nested), nested)


@pytest.mark.parametrize("value", [..., None])
def test_the_width_of_hidden_states(served, tmp_path, value):
    awkward = edit(served(**WIDER), tmp_path / "out", target_hidden_size=value)
    message = refusal(awkward)
    assert "vLLM would read aux hidden states of width" in message and "got 32" in message
    # in speculators' format null is the head's own width
    folder = edit(served("speculators", target_dim=20), tmp_path / "null", target_hidden_size=None)
    check_servable(read_head(folder), folder)


def test_the_targets_tensors_in_any_format(served, tmp_path):
    for checkpoint_format in ("vllm", "speculators"):
        extra = {"verifier_norm.weight": np.ones(24, np.float32)}
        awkward = edit(
            served(checkpoint_format), tmp_path / checkpoint_format, lambda t, e=extra: t | e
        )
        assert "tensors that are the target's; got verifier_norm.weight" in refusal(awkward)


def test_a_speculators_folder_that_shares_the_targets_matrices(served, tmp_path):
    """It cannot be written so, because speculators would read zeros; vLLM takes the target's."""
    shared = edit(
        served("speculators"), tmp_path / "out", without("embed_tokens.weight", "lm_head.weight")
    )
    check_servable(read_head(shared), shared)


def test_eagle1(tmp_path):
    """vLLM finds no layer_types of its layers, whose numbers begin behind the target's."""
    head = tiny.head(**tiny.EAGLE)
    save_drafter(head, tmp_path / "a")
    check_servable(read_head(tmp_path / "a"), tmp_path / "a")
    layers = head.config.layers
    kinds = edit(tmp_path / "a", tmp_path / "b", layer_types=["full_attention"] * layers)
    assert "does not start with layer_types" in refusal(kinds)
    qwen3 = edit(tmp_path / "a", tmp_path / "qwen3", model_type="qwen3")
    assert "got those of model_type qwen3" in refusal(qwen3)
    matrix = {"lm_head.weight": np.ones((41, 24), np.float32)}
    own = edit(tmp_path / "a", tmp_path / "c", lambda tensors: tensors | matrix)
    assert "refuses an EAGLE-1 head's output matrix" in refusal(own)
    windows = tiny.head(**tiny.EAGLE, windows=(4,) * layers)
    with pytest.raises(InputError, match="EAGLE-1 heads have no sliding window"):
        save_drafter(windows, tmp_path / "d")


def test_an_index_of_other_files_beside_the_weights(served, tmp_path):
    """vLLM reads the files that an index names, transformers model.safetensors."""
    folder = served()
    names = list(weights.open_folder(folder))
    other = served(qk_norm=True)
    (folder / "old-1.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "old-1.safetensors")}
    (folder / weights.INDEX).write_text(json.dumps(index))
    check_servable(read_head(folder), folder)  # the same weights twice, as some repositories have
    (folder / "old-1.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"weights must be model.safetensors, or the files that"):
        read_head(folder)
    index["weight_map"] = dict.fromkeys(names, "model.safetensors")
    (folder / weights.INDEX).write_text(json.dumps(index))
    check_servable(read_head(folder), folder)
    (folder / weights.INDEX).write_text("{")
    assert weights.open_folder(folder).keys() == set(names)
