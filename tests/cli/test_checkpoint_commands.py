"""`peagle inspect`, `peagle convert` and `peagle serve-config`: what they print and write."""

import json
import shlex

import numpy as np
import pytest
from checkpoints.folder_edits import edit

from peagle_jax import weights


def test_inspect(folders, peagle):
    code, out, _ = peagle(f"inspect {folders}/peagle --json")
    facts = json.loads(out)
    assert code == 0 and facts["kind"] == "draft_head"
    assert facts["checkpoint_format"] == "vllm" and facts["mask_token_id"] == 5
    assert facts["aux_hidden_state_layers"] == [1, 2, 3]
    assert not facts["missing_tensors"] and facts["num_depths"] == 6
    assert json.loads(peagle(f"inspect {folders}/target --json")[1])["kind"] == "target"
    assert "one by one (EAGLE-3)" in peagle(f"inspect {folders}/eagle3")[1]


@pytest.mark.parametrize("engine", ["vllm", "sagemaker"])
def test_serve_config(folders, peagle, engine):
    words = shlex.split(peagle(f"serve-config {folders}/peagle --engine {engine} -k 4")[1])
    flags = json.loads(words[-1].removeprefix("SM_VLLM_SPECULATIVE_CONFIG="))
    assert flags == {
        "method": "eagle3",
        "model": str(folders / "peagle"),
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }


def test_serve_config_takes_k_from_the_folder(folders, peagle):
    words = shlex.split(peagle(f"serve-config {folders}/peagle --engine vllm")[1])
    assert json.loads(words[-1])["num_speculative_tokens"] == 6


def test_serve_config_of_a_revision(folders, peagle):
    """vLLM takes it as an option of its own."""
    line = peagle(f"serve-config {folders}/peagle --engine vllm --target owner/name@abc")[1]
    assert line.startswith("vllm serve owner/name --revision abc --speculative-config ")
    _, line, advice = peagle(
        f"serve-config {folders}/peagle --engine sagemaker --target owner/name@abc"
    )
    assert line.startswith("SM_VLLM") and "serve revision abc of owner/name" in advice
    line = peagle(f"serve-config {folders}/peagle --engine vllm --target owner/name")[1]
    assert line.startswith("vllm serve owner/name --speculative-config ")


def test_serve_config_names_what_the_folder_names(folders, peagle, tmp_path):
    line = f"convert {folders}/peagle {tmp_path}/b --to speculators --target {folders}/target"
    assert peagle(line)[0] == 0
    named = peagle(f"serve-config {tmp_path}/b --engine vllm")[1]
    assert f"vllm serve {folders / 'target'} --spec" in named
    chosen = peagle(f"serve-config {tmp_path}/b --engine vllm --target other")[1]
    assert "vllm serve other --spec" in chosen
    _, unnamed, advice = peagle(f"serve-config {folders}/peagle --engine vllm")
    assert "vllm serve TARGET --spec" in unnamed and "in TARGET's place" in advice


def test_speculators_format_without_a_target_is_said(folders, peagle, tmp_path):
    line = f"convert {folders}/peagle {tmp_path}/b --to speculators"
    assert "it names no target" in peagle(line)[1]
    line = f"convert {folders}/peagle {tmp_path}/c --to speculators --target {folders}/target"
    assert "it names no target" not in peagle(line)[1]


def with_identity_d2t(tensors):
    return tensors | {"d2t": np.zeros(len(tensors["embed_tokens.weight"]), np.int64)}


def without_norm(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}


@pytest.mark.parametrize(
    "change, keys, words",
    [
        (with_identity_d2t, {}, "refuses d2t at full vocabulary"),
        (
            None,
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
            "all layers have one sliding window",
        ),
        (without_norm, {}, "missing: norm.weight"),
        (None, {"architectures": ["LlamaEagle3DraftModel"]}, "vllm, speculators; got automodel"),
    ],
)
def test_serve_config_refuses_what_vllm_would(folders, peagle, tmp_path, change, keys, words):
    source = edit(folders / "peagle", tmp_path / "edited", change, **keys)
    code, out, err = peagle(f"serve-config {source} --engine vllm")
    assert code == 2 and words in err and not out, err


@pytest.mark.filterwarnings("ignore::peagle_jax.types.WeightsWarning")  # printed, see below
def test_convert_what_a_folder_leaves_open(folders, peagle, tmp_path):
    """Options for what a config does not say, and a warning of one line for NaN."""

    def damage(tensors):
        norm = tensors["norm.weight"].copy()
        norm[3] = float("nan")
        return with_identity_d2t(tensors) | {"norm.weight": norm}

    edit(folders / "peagle", tmp_path / "a", damage, mask_token_id=..., ptd_token_id=...)
    code, out, err = peagle(
        f"convert {tmp_path}/a {tmp_path}/b --to vllm --mask-token 7 --aux-layer-numbering output "
        "--identity-d2t -k 3"
    )
    assert code == 0 and "-> " in out
    warning = "peagle: warning: model.safetensors: norm.weight holds NaN or infinite numbers\n"
    assert err == warning
    facts = json.loads(peagle(f"inspect {tmp_path}/b --json")[1])
    assert facts["mask_token_id"] == 7 and facts["num_depths"] == 3
    assert facts["aux_hidden_state_layers"] == [2, 3, 4]
    # metadata: the command and the source, without anybody's paths
    metadata = weights.read_metadata(tmp_path / "b")
    assert metadata["command"].startswith("peagle ") and metadata["source"] == "a"
    assert str(tmp_path) not in str(metadata)


def test_convert_a_target(folders, peagle, tmp_path):
    assert peagle(f"convert {folders}/target {tmp_path}/t --to hf --dtype bfloat16")[0] == 0
    facts = json.loads(peagle(f"inspect {tmp_path}/t --json")[1])
    assert facts["dtypes"] == ["bfloat16"] and facts["has_tokenizer"]
