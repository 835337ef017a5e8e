"""What a target's folder may hold: quantizations, tied matrices, experts stored together."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))
import torch  # noqa: E402
import transformers  # noqa: E402
from families import make, truth  # noqa: E402
from test_formats import TOLERANCE, edit, logits  # noqa: E402

from peagle_jax import weights  # noqa: E402
from peagle_jax.checkpoints.convert import convert  # noqa: E402
from peagle_jax.checkpoints.target_io import (  # noqa: E402
    load_embedding,
    load_lm_head,
    load_target,
    save_target,
)
from peagle_jax.checkpoints.target_tensors import stored_format  # noqa: E402
from peagle_jax.types import InputError  # noqa: E402

GROUP = {"weights": {"type": "float", "num_bits": 8}}
QUARK = {"weight": {"dtype": "fp8_e4m3"}}


@pytest.mark.parametrize(
    "quantization, stored",
    [
        (None, "plain"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": GROUP}}, "fp8"),
        # a group without weights is of keys and values
        ({"quant_method": "compressed_tensors", "config_groups": {"a": GROUP, "b": {}}}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"b": {"weights": None}}}, None),
        ({"quant_method": "modelopt", "quant_algo": "fp8_per_channel_per_token"}, "fp8"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "quark", "global_quant_config": QUARK}, "fp8"),
        (
            {
                "quant_method": "quark",
                "global_quant_config": QUARK,
                "layer_quant_config": {"lm_head": {"weight": {"dtype": "int4"}}},
            },
            None,
        ),
        ({"quant_method": "torchao"}, None),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "dense"}}, "plain"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "24"}}, None),
        ({"quant_method": "compressed-tensors"}, None),
        ({"quant_method": "awq", "bits": 4}, None),
        ({"quant_method": "bitnet"}, None),
        ("fp8", None),
    ],
)
def test_quantizations_are_known_or_not(quantization, stored):
    assert stored_format({"quantization_config": quantization}) == stored
    assert stored_format({"text_config": {"compression_config": quantization}}) == stored


def test_a_quantization_that_looks_plain_is_refused(tmp_path):
    """BitNet's matrices are bfloat16, which transformers quantizes in every forward."""
    said = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    folder = edit("llama", tmp_path / "bitnet", quantization_config=said)
    with pytest.raises(InputError, match=r"may be stored plain.*quantization_config of bitnet"):
        load_target(folder)


def test_a_quantization_that_is_gone_is_not_written(tmp_path):
    """Under any of its names: vLLM would look for scales."""
    said = {"quant_method": "fp8"}
    folder = edit("llama", tmp_path / "fp8", compression_config=said, text_config={"x": 1})
    convert(folder, tmp_path / "plain", to="hf", dtype="float32")
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "compression_config" not in raw and raw["text_config"] == {"x": 1}


def test_the_embedding_of_an_untied_target_is_never_its_output_matrix(tmp_path):
    def change(tensors):
        del tensors["model.embed_tokens.weight"]

    with pytest.raises(InputError, match="the target must hold model.embed_tokens.weight"):
        load_embedding(edit("llama", tmp_path / "cut", change))


def tie(tensors, change) -> None:
    tensors["lm_head.weight"] = np.array(tensors["model.embed_tokens.weight"])
    change(tensors)


def test_two_matrices_that_differ_are_both_used(tmp_path):
    """As by transformers 5.24 and vLLM 0.32, whatever tie_word_embeddings says."""

    def change(tensors):
        tensors["lm_head.weight"][:] *= 3

    folder = edit("llama_tied", tmp_path / "two", lambda tensors: tie(tensors, change))
    tokens, want, _ = truth("llama_tied")
    stored = np.asarray(weights.open_folder(folder)["lm_head.weight"])
    np.testing.assert_array_equal(np.asarray(load_lm_head(folder)), stored)
    convert(folder, tmp_path / "again", to="hf")
    target = load_target(folder, aux_hidden_state_layers=(0, 1, 2))
    save_target(target, tmp_path / "saved")
    for path in (folder, tmp_path / "again", tmp_path / "saved"):
        target = load_target(path, aux_hidden_state_layers=(0, 1, 2))
        assert not target.config.tied_embeddings
        np.testing.assert_allclose(logits(target, tokens), 3 * want, atol=3 * TOLERANCE, rtol=0)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
        got = theirs(torch.from_numpy(np.array(tokens))).logits.detach().numpy()
        np.testing.assert_allclose(got, 3 * want, atol=3 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("kept", ["both", "lm_head.weight"])
def test_a_tied_matrix_may_stand_under_either_name(tmp_path, kept):
    def change(tensors):
        if kept != "both":
            del tensors["model.embed_tokens.weight"]

    folder = edit("llama_tied", tmp_path / "tied", lambda tensors: tie(tensors, change))
    tokens, want, _ = truth("llama_tied")
    target = load_target(folder, aux_hidden_state_layers=(0, 1, 2))
    np.testing.assert_allclose(logits(target, tokens), want, atol=TOLERANCE, rtol=0)
    for load in (load_lm_head, load_embedding):
        assert np.asarray(load(folder)).shape == (target.config.vocab, target.config.dim)
    convert(folder, tmp_path / "again", to="hf")
    assert "lm_head.weight" not in weights.open_folder(tmp_path / "again")
    target = load_target(tmp_path / "again", aux_hidden_state_layers=(0, 1, 2))
    np.testing.assert_allclose(logits(target, tokens), want, atol=TOLERANCE, rtol=0)


def fuse(tensors) -> None:
    """As transformers 5 has them in memory: all experts of a layer in two tensors."""
    for layer in range(99):
        experts = f"model.layers.{layer}.mlp.experts"
        count = sum(name.startswith(f"{experts}.") for name in tensors) // 3
        if not count:
            continue
        parts = {
            part: np.stack([tensors.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(count)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{experts}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{experts}.down_proj"] = parts["down"]


def test_experts_that_are_stored_together(tmp_path):
    folder = edit("qwen3_moe", tmp_path / "fused", fuse)
    assert any(name.endswith("experts.gate_up_proj") for name in weights.open_folder(folder))
    tokens, want, _ = truth("qwen3_moe")
    target = load_target(folder, aux_hidden_state_layers=(0, 1, 2))
    np.testing.assert_allclose(logits(target, tokens), want, atol=TOLERANCE, rtol=0)
    convert(folder, tmp_path / "half", to="hf", dtype="bfloat16")
    target = load_target(tmp_path / "half", aux_hidden_state_layers=(0, 1, 2))
    np.testing.assert_allclose(logits(target, tokens), want, atol=0.1, rtol=0)


@pytest.mark.parametrize("wrong", ["odd", "none of many", "twice"])
def test_fused_experts_that_do_not_fit_are_refused(tmp_path, wrong):
    def change(tensors):
        single = {name: x for name, x in tensors.items() if ".experts." in name}
        fuse(tensors)
        name = next(name for name in tensors if name.endswith("gate_up_proj"))
        if wrong == "odd":
            tensors[name] = np.array(tensors[name][:, 1:])
        elif wrong == "none of many":  # no bytes, and a loop without an end
            tensors[name] = np.zeros((2**20, 0, 2), np.float32)
        else:
            tensors |= single

    folder = edit("qwen3_moe", tmp_path / "odd", change)
    with pytest.raises(InputError, match="save the experts one by one"):
        load_target(folder)


def test_generation_config_decides_where_texts_end(tmp_path):
    """As in transformers. Where it names none, config.json's ids count."""
    folder = edit("llama", tmp_path / "target", eos_token_id=[3, 4])
    assert load_target(folder).config.stop_ids == (3, 4)
    path = folder / "generation_config.json"
    for said, ids in ({"eos_token_id": [5, 3]}, (5, 3)), ({"eos_token_id": 4}, (4,)), ({}, (3, 4)):
        path.write_text(json.dumps(said))
        target = load_target(folder)
        assert target.config.stop_ids == ids
        # a folder that is written without that file ends texts where this one does
        save_target(target, tmp_path / f"again{len(ids)}{ids[0]}")
        again = load_target(tmp_path / f"again{len(ids)}{ids[0]}")
        assert again.config.stop_ids == ids


def test_a_family_without_ties_keeps_its_output_matrix(tmp_path):
    raw = json.loads((make("llama")[1] / "config.json").read_text())
    assert not raw["tie_word_embeddings"]
    folder = edit("llama", tmp_path / "target")
    stored = weights.open_folder(folder)["lm_head.weight"]
    np.testing.assert_array_equal(np.asarray(load_lm_head(folder)), np.asarray(stored))
