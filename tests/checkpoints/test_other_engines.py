"""What SGLang and TensorRT-LLM serve of our heads, by the rules of their loaders.

The rules are written down here as their sources had them in November 2026 (sgl-project/sglang
python/sglang/srt/models/llama_eagle3.py, NVIDIA/TensorRT-LLM
tensorrt_llm/_torch/models/modeling_speculative.py); neither was run.
"""

import json
import re
import shlex

import pytest
import tiny

from peagle_jax import weights
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.other_engines import check_servable_by
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.cli import main
from peagle_jax.types import InputError

LAYER = (
    *(f"self_attn.{q}_proj.weight" for q in "qkvo"),
    *(f"mlp.{matrix}_proj.weight" for matrix in ("gate", "up", "down")),
    *("input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"),
)
# SGLang's parameters of a head: a tensor of another name is left out without a word, and a
# parameter without a tensor stays as it was made.
SGLANG = {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight"}
SGLANG |= {f"midlayer.{name}" for name in LAYER}
# TensorRT-LLM's, after its own renaming of layers.0; the embedding is the target's where the
# widths are equal.
TENSORRT_LLM = SGLANG - {"embed_tokens.weight"}
SGLANG_ONE = {"layers": 1, "windows": (None,), "mask_token": None, "dim": 24}
ENGINES = ("sglang", "tensorrt-llm")


def write(path, own_embedding=True, **changes):
    """An EAGLE-3 head of one Llama layer with some changes, in the vllm format."""
    save_drafter(tiny.head(**SGLANG_ONE | changes), path, k=4, own_embedding=own_embedding)
    return path


def refusal(engine, folder):
    with pytest.raises(InputError) as caught:
        check_servable_by(engine, read_head(folder), folder)
    return str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_revision_is_not_dropped(engine, tmp_path):
    head = read_head(write(tmp_path / "head"))
    with pytest.raises(InputError, match="got revision abc; download that revision of org/head"):
        check_servable_by(engine, head, "org/head@abc")


def test_names_and_keys_are_those_that_sglang_reads(tmp_path):
    folder = write(tmp_path / "head")
    assert weights.open_folder(folder).keys() == SGLANG
    config = weights.read_json(folder / "config.json")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 41 and config["tie_word_embeddings"] is False
    assert config["target_hidden_size"] == 24 and config["num_hidden_layers"] == 1
    # fc reads three hidden states of that width
    assert weights.open_folder(folder)["fc.weight"].shape == (24, 3 * 24)
    check_servable_by("sglang", read_head(folder), folder)


def test_a_reduced_vocabulary_is_sglangs(tmp_path):
    """Its hot tokens are d2t + the draft's own number, as we write them."""
    folder = write(tmp_path / "head", draft_vocab=20)
    stored = weights.open_folder(folder)
    assert stored.keys() == SGLANG | {"d2t", "t2d"}
    assert weights.read_json(folder / "config.json")["draft_vocab_size"] == 20
    check_servable_by("sglang", read_head(folder), folder)


def test_names_are_those_that_tensorrt_llm_reads(tmp_path):
    folder = write(tmp_path / "head", own_embedding=False)
    renamed = {re.sub(r"^layers\.0\.", "midlayer.", name) for name in weights.open_folder(folder)}
    assert renamed == TENSORRT_LLM
    config = weights.read_json(folder / "config.json")
    # keys without which it stops
    for key in ("attention_bias", "max_position_embeddings", "num_key_value_heads", "dtype"):
        assert key in config
    check_servable_by("tensorrt-llm", read_head(folder), folder)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token": 5}, "draft in parallel"),
        ({"qk_norm": True}, "norm queries and keys"),
        ({"norm_before_residual": True}, "residual after the norm"),
        ({"layers": 2, "windows": (None, None)}, "2 layers"),
        ({"windows": (8,)}, "sliding windows"),
    ],
)
def test_what_neither_serves(engine, changes, words, tmp_path):
    folder = write(tmp_path / "head", own_embedding=False, **changes)
    message = refusal(engine, folder)
    assert words in message and "serve it with vLLM" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "biases in attention"),
        ({"norm_before_fc": True}, "before fc"),
        ({"fc_norm": True}, "norm each"),
        ({"norm_output": True}, "normed hidden states"),
        ({"aux_hidden_state_layers": (1, 2)}, "read 2 aux hidden states"),
    ],
)
def test_what_only_tensorrt_llm_serves(changes, words, tmp_path):
    folder = write(tmp_path / "head", own_embedding=False, **changes)
    assert words in refusal("sglang", folder)
    check_servable_by("tensorrt-llm", read_head(folder), folder)


def test_tensorrt_llm_takes_the_targets_embedding(tmp_path):
    assert "their own embedding" in refusal("tensorrt-llm", write(tmp_path / "head"))
    # of another width it has its own
    narrow = write(tmp_path / "narrow", dim=20)
    check_servable_by("tensorrt-llm", read_head(narrow), narrow)


def test_eagle1_is_neithers(tmp_path):
    save_drafter(tiny.head(**tiny.EAGLE), tmp_path / "head", k=4)
    for engine in ENGINES:
        assert "EAGLE-1" in refusal(engine, tmp_path / "head")


# ---------------------------------------------------------------- the command


def serve(capsys, folder, engine, *options):
    code = main(["serve-config", str(folder), "--engine", engine, *options])
    captured = capsys.readouterr()
    return code, captured.out.strip(), captured.err


def test_sglangs_line(tmp_path, capsys):
    folder = write(tmp_path / "head")
    code, out, err = serve(capsys, folder, "sglang", "--target", "T", "-k", "3")
    words = shlex.split(out)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert code == 0 and words[:3] == ["python", "-m", "sglang.launch_server"]
    assert options["--model-path"] == "T" and options["--speculative-algorithm"] == "EAGLE3"
    assert options["--speculative-draft-model-path"] == str(folder)
    # a chain: three steps, and the last token beside their drafts
    assert options["--speculative-num-steps"] == "3" and options["--speculative-eagle-topk"] == "1"
    assert options["--speculative-num-draft-tokens"] == "4"
    ids = [i - 1 for i in read_head(folder).config.aux_hidden_state_layers]
    assert f"write {ids} as eagle_aux_hidden_state_layer_ids" in err


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_that_the_head_does_not_name_are_the_targets(engine, tmp_path, capsys):
    """vLLM's choice for so many layers; without the target nobody can say it."""
    folder = write(tmp_path / "head", own_embedding=engine == "sglang")
    where = folder / "config.json"
    raw = json.loads(where.read_text())
    del raw["eagle_aux_hidden_state_layer_ids"]
    raw.get("eagle_config", {}).pop("eagle_aux_hidden_state_layer_ids", None)
    where.write_text(json.dumps(raw))
    save_target(tiny.target(layers=11, windows=(None,) * 11), tmp_path / "target")
    code, out, err = serve(capsys, folder, engine, "--target", str(tmp_path / "target"))
    assert code == 0 and "[1, 4, 7]" in out + err
    code, _, err = serve(capsys, folder, engine)
    assert code == 2 and err.count("\n") == 1 and "give --target" in err


def test_tensorrt_llms_line(tmp_path, capsys):
    folder = write(tmp_path / "head", own_embedding=False)
    code, out, err = serve(capsys, folder, "tensorrt-llm")
    [options] = json.loads(out).values()
    ids = [i - 1 for i in read_head(folder).config.aux_hidden_state_layers]
    assert code == 0 and options["eagle3_layers_to_capture"] == ids
    assert options["decoding_type"] == "Eagle3" and options["max_draft_len"] == 4
    assert options["speculative_model"] == str(folder)
    assert "put its folder or hub id in TARGET's place" in err and "trtllm-serve TARGET" in err


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parallel_head_is_refused_in_one_line(engine, tmp_path, capsys):
    folder = write(tmp_path / "head", mask_token=5)
    code, out, err = serve(capsys, folder, engine)
    assert code == 2 and not out and err.count("\n") == 1 and "P-EAGLE" in err


# ---------------------------------------------------------------- vLLM's options


def test_what_else_vllm_decides(tmp_path, capsys):
    parallel = write(tmp_path / "parallel", mask_token=5)
    code, out, err = serve(capsys, parallel, "vllm", "--target", "T")
    assert code == 0 and "V1 model runner alone" in err and "VLLM_USE_V2_MODEL_RUNNER=1" in err
    assert '"draft_sample_method": "probabilistic"' in err and "max_position" not in err
    one_by_one = write(tmp_path / "one")
    assert "V1 and V2" in serve(capsys, one_by_one, "vllm", "--target", "T")[2]


@pytest.mark.parametrize(("context", "is_said"), [(97, True), (96, False)])
@pytest.mark.parametrize("key", [None, "text_config"])
def test_a_head_with_a_shorter_context_is_said(context, is_said, key, tmp_path, capsys):
    """vLLM 0.32 drafts nothing beyond it: 81 accepted drafts of 171 steps, for 164 of 99."""
    shape = {"max_position_embeddings": context}
    (tmp_path / "config.json").write_text(json.dumps({key: shape} if key else shape))
    folder = write(tmp_path / "head", mask_token=5)
    err = serve(capsys, folder, "vllm", "--target", str(tmp_path))[2]
    words = "vLLM drafts nothing in texts of more than 96 tokens"
    assert (words in err) == is_said
