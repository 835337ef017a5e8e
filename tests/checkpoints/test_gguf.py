"""EAGLE-3 heads as GGUF files, read back by llama.cpp's own library for Python.

What llama.cpp reads is written down here as src/models/eagle3.cpp had it in October 2026;
tests/peers/test_llama_cpp.py shows files to it.
"""

import dataclasses
import sys
from pathlib import Path

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

from peagle_jax import weights
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.gguf_writing import check_llama_cpp, rope_factors
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import from_model, save_drafter
from peagle_jax.checkpoints.inspect import describe, printable_rows
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.cli import main
from peagle_jax.layers import Rope
from peagle_jax.types import InputError

ONE = {"layers": 1, "windows": (None,), "mask_token": None, "dim": 24}
# ours -> llama.cpp's; queries and keys apart, whose rows change places
SAME = {
    "embed_tokens": "token_embd",
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
}
ROTATED = {
    "midlayer.self_attn.q_proj": ("blk.0.attn_q", "heads"),
    "midlayer.self_attn.k_proj": ("blk.0.attn_k", "kv_heads"),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 3.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 96,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}


def written(tmp_path: Path, dtype: str | None = None, **changes) -> tuple[Path, Path]:
    """An EAGLE-3 head of one Llama layer with some changes, as a folder and as a GGUF file."""
    folder, file = tmp_path / "head", tmp_path / "head.gguf"
    save_drafter(tiny.head(**ONE | changes), folder, k=4)
    convert(folder, file, to="gguf", dtype=dtype)
    return folder, file


def read(file: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Keys and tensors of a GGUF file, tensors in the shape of NumPy."""
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            data = data.view(ml_dtypes.bfloat16)
        tensors[tensor.name] = data.reshape([int(size) for size in reversed(tensor.shape)])
    return keys, tensors


def names(*more: str) -> set[str]:
    """Names of all tensors of a head, and others."""
    return {f"{name}.weight" for name in [*SAME.values(), "blk.0.attn_q", "blk.0.attn_k"]} | {*more}


def refusal(tmp_path: Path, dtype: str | None = None, **changes) -> str:
    with pytest.raises(InputError) as caught:
        check_llama_cpp(from_model(tiny.head(**ONE | changes)), tmp_path / "x.gguf", dtype)
    return str(caught.value)


# ---------------------------------------------------------------- the file


def test_tensors_are_the_heads(tmp_path):
    folder, file = written(tmp_path)
    stored, (_, tensors) = weights.open_folder(folder), read(file)
    assert tensors.keys() == names()
    for ours, theirs in SAME.items():
        tensor = np.asarray(stored[f"{ours}.weight"])
        np.testing.assert_array_equal(tensors[f"{theirs}.weight"], tensor, err_msg=ours)
    config = read_head(folder).config
    for ours, (theirs, heads) in ROTATED.items():
        # row i of a head's first half becomes row 2 i, row i of its second half 2 i + 1
        rows = np.asarray(stored[f"{ours}.weight"]).reshape(getattr(config, heads), 10, 48)
        got = tensors[f"{theirs}.weight"].reshape(rows.shape)
        np.testing.assert_array_equal(got[:, 0::2], rows[:, :5])
        np.testing.assert_array_equal(got[:, 1::2], rows[:, 5:])


def test_keys_are_those_that_llama_cpp_reads(tmp_path):
    _, file = written(tmp_path, norm_before_residual=True, aux_hidden_state_layers=(0, 2, 3))
    keys, _ = read(file)
    ours = {name: value for name, value in keys.items() if name.startswith("eagle3.")}
    epsilon = ours.pop("eagle3.attention.layer_norm_rms_epsilon")
    assert ours == {
        "eagle3.context_length": 96,
        "eagle3.embedding_length": 24,
        "eagle3.block_count": 1,
        "eagle3.feed_forward_length": 36,
        "eagle3.attention.head_count": 4,
        "eagle3.attention.head_count_kv": 2,
        "eagle3.attention.key_length": 10,
        "eagle3.attention.value_length": 10,
        "eagle3.rope.dimension_count": 10,
        "eagle3.rope.freq_base": 555.0,
        "eagle3.target_layers": [0, 2, 3],
        "eagle3.target_hidden_size": 24,
        "eagle3.norm_before_residual": True,
        "eagle3.norm_before_fc": False,
        "eagle3.vocab_size": 41,
    }
    assert epsilon == pytest.approx(2e-3)
    assert keys["general.architecture"] == "eagle3"
    # ids are all that a head reads; llama.cpp makes so many dummy tokens of it
    assert keys["tokenizer.ggml.model"] == "no_vocab"
    assert "peagle_jax" in keys["peagle_jax.writer"]


def test_a_file_does_not_say_where_its_target_lies(tmp_path):
    folder, file = tmp_path / "head", tmp_path / "head.gguf"
    target = tmp_path / "somebody" / "the-target"
    target.mkdir(parents=True)
    save_drafter(tiny.head(**ONE), folder, k=4, target=str(target))
    convert(folder, file, to="gguf")
    assert read(file)[0]["general.base_model.0.name"] == "the-target"
    assert b"somebody" not in file.read_bytes()


def test_neighbors_rotate_as_halves_did(tmp_path):
    """Scores of queries and keys, with llama.cpp's rotation of its file and ours of the folder."""
    folder, file = written(tmp_path)
    stored, (_, tensors) = weights.open_folder(folder), read(file)
    rope, positions = read_head(folder).config.rope, np.arange(7)
    x = np.random.default_rng(0).normal(size=(7, 48)).astype(np.float32)

    def ours(name, heads):
        y = x @ np.asarray(stored[f"midlayer.self_attn.{name}_proj.weight"]).T
        return np.asarray(
            rope(jnp.asarray(y.reshape(1, 7, heads, 10)), jnp.asarray(positions[None]))
        )[0]

    def theirs(name, heads):
        pairs = (x @ tensors[f"blk.0.attn_{name}.weight"].T).reshape(7, heads, 5, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(
            1j * positions[:, None, None] * np.asarray(rope.frequencies)
        )
        return np.stack([turned.real, turned.imag], -1).reshape(7, heads, 10)

    scores = [
        np.einsum("qghd,kgd->ghqk", read_by("q", 4).reshape(7, 2, 2, 10), read_by("k", 2))
        for read_by in (ours, theirs)
    ]
    np.testing.assert_allclose(*scores, rtol=2e-4, atol=2e-4 * np.abs(scores[0]).max())


def test_a_reduced_vocabulary_names_the_targets_ids(tmp_path):
    folder, file = written(tmp_path, draft_vocab=20)
    keys, tensors = read(file)
    assert tensors.keys() == names("d2t")
    table = np.asarray(weights.open_folder(folder)["d2t"])
    assert tensors["d2t"].dtype == np.int64 and np.any(table)
    np.testing.assert_array_equal(tensors["d2t"], table + np.arange(20))
    assert tensors["output.weight"].shape == (20, 24) and keys["eagle3.vocab_size"] == 41
    assert tensors["token_embd.weight"].shape == (41, 24)


def test_a_norm_before_fc_is_the_encoders(tmp_path):
    folder, file = written(tmp_path, norm_before_fc=True)
    keys, tensors = read(file)
    assert keys["eagle3.norm_before_fc"] is True
    assert tensors.keys() == names("enc.output_norm.weight")
    stored = np.asarray(weights.open_folder(folder)["input_norm.weight"])
    np.testing.assert_array_equal(tensors["enc.output_norm.weight"], stored)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_are_rounded_once_and_norms_are_float32(dtype, tmp_path):
    folder, file = written(tmp_path, dtype=dtype)
    stored, (_, tensors) = weights.open_folder(folder), read(file)
    for ours, theirs in SAME.items():
        got, tensor = tensors[f"{theirs}.weight"], np.asarray(stored[f"{ours}.weight"])
        assert got.dtype == (np.float32 if tensor.ndim == 1 else dtype), ours
        np.testing.assert_array_equal(got, tensor.astype(got.dtype), err_msg=ours)


def test_a_head_keeps_its_own_dtype(tmp_path):
    save_drafter(tiny.head(**ONE), tmp_path / "head", k=4, dtype="bfloat16")
    facts = describe(tmp_path / "head")
    assert printable_rows(facts)["for llama.cpp (GGUF)"] == "as it is"
    of_fp8 = printable_rows(facts | {"num_fp8_matrices": 4})["for llama.cpp (GGUF)"]
    assert of_fp8 == "with --dtype bfloat16 or float32"
    convert(tmp_path / "head", tmp_path / "head.gguf", to="gguf")
    _, tensors = read(tmp_path / "head.gguf")
    assert tensors["fc.weight"].dtype == "bfloat16"
    assert tensors["output_norm.weight"].dtype == np.float32
    fc = np.asarray(weights.open_folder(tmp_path / "head")["fc.weight"])
    np.testing.assert_array_equal(tensors["fc.weight"], fc)


@pytest.mark.parametrize("kind", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_other_rotations_are_factors_of_the_plain_one(kind, tmp_path):
    rope = Rope.from_hf({"rope_parameters": kind | {"rope_theta": 555.0}}, 10, "")
    _, file = written(tmp_path, rope=rope)
    keys, tensors = read(file)
    assert tensors.keys() == names("rope_freqs.weight")
    plain = 555.0 ** (-np.arange(0, 10, 2) / 10)
    np.testing.assert_allclose(plain / tensors["rope_freqs.weight"], rope.frequencies, rtol=1e-6)
    scale = keys.get("eagle3.rope.scaling.attn_factor", 1.0)
    assert scale == pytest.approx(rope.scale) and (scale != 1) == (kind is YARN)


def test_the_plain_rotation_has_no_factors():
    assert rope_factors(Rope.from_hf({"rope_theta": 1e6}, 64, ""), 64) is None


def test_what_the_target_shares_is_left_out(tmp_path):
    folder = tmp_path / "head"
    save_drafter(tiny.head(**ONE), folder, k=4, own_embedding=False)
    stored = {name: np.asarray(t) for name, t in weights.open_folder(folder).items()}
    del stored["lm_head.weight"]
    (tmp_path / "shared").mkdir()
    config = weights.read_json(folder / "config.json")
    weights.write_folder(tmp_path / "shared", config, stored, {})
    convert(tmp_path / "shared", tmp_path / "head.gguf", to="gguf")
    _, tensors = read(tmp_path / "head.gguf")
    assert tensors.keys() == names() - {"token_embd.weight", "output.weight"}


def test_share_embedding_leaves_out_the_targets_alone(tmp_path):
    target, head = tiny.target(), tiny.head(**ONE)
    save_target(target, tmp_path / "target")
    save_drafter(head, tmp_path / "own", k=4)
    options: dict = {"to": "gguf", "target": tmp_path / "target", "share_embedding": True}
    with pytest.raises(InputError, match="whose embedding is the target's"):
        convert(tmp_path / "own", tmp_path / "head.gguf", **options)
    assert not (tmp_path / "head.gguf").exists()
    same = head.params | {"embed": {"table": target.params["embed"]["table"]}}
    save_drafter(dataclasses.replace(head, params=same), tmp_path / "same", k=4)
    convert(tmp_path / "same", tmp_path / "head.gguf", **options)
    assert read(tmp_path / "head.gguf")[1].keys() == names() - {"token_embd.weight"}


# ---------------------------------------------------------------- heads that it cannot serve


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token": 5}, "draft in parallel (P-EAGLE)"),
        (tiny.EAGLE, "draft from the final hidden state (EAGLE-1)"),
        (
            {"qk_norm": True},
            "norm queries and keys; serve it with vLLM: peagle convert --to vllm, or train one "
            "with head.qk_norm false",
        ),
        ({"attention_bias": True}, "biases in attention"),
        ({"fc_norm": True}, "norm each aux hidden state"),
        ({"norm_output": True}, "hand on normed hidden states"),
        (
            {"mask_token": 5, "markov_rank": 2},
            "have a Markov head; serve it with vLLM: peagle convert --to vllm --drop-markov",
        ),
        (
            {"mask_token": 5, "confidence": True},
            "have a confidence head; serve it with vLLM: peagle convert --to vllm --drop-confid",
        ),
        ({"layers": 2, "windows": (None, None)}, "have 2 layers"),
        ({"windows": (8,)}, "have sliding windows"),
        ({"aux_hidden_state_layers": (1, 2)}, "read 2 aux hidden states"),
    ],
)
def test_what_llama_cpp_has_no_place_for(changes, words, tmp_path):
    message = refusal(tmp_path, **changes)
    assert words in message and "; serve it with vLLM: peagle convert --to vllm" in message
    assert ("head.qk_norm false" in message) == (changes == {"qk_norm": True})


def test_an_fp8_head_needs_a_dtype(tmp_path):
    head = dataclasses.replace(from_model(tiny.head(**ONE)), quantized=True)
    with pytest.raises(InputError, match="an FP8 head is written in a dtype of your choice"):
        check_llama_cpp(head, tmp_path, None)
    check_llama_cpp(head, tmp_path, "bfloat16")


@pytest.mark.parametrize("option", ["-k 4", "--max-shard-size 5MB", "--identity-d2t"])
def test_options_without_use(option, tmp_path, capsys):
    save_drafter(tiny.head(**ONE), tmp_path / "head", k=4)
    words = ["convert", str(tmp_path / "head"), str(tmp_path / "x.gguf"), "--to", "gguf"]
    assert main([*words, *option.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--to gguf has no use for it" in error


def test_a_parallel_head_is_refused_in_one_line(tmp_path, capsys):
    save_drafter(tiny.head(**ONE | {"mask_token": 5}), tmp_path / "head", k=4)
    assert main(["convert", str(tmp_path / "head"), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "P-EAGLE" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"]


def test_without_the_library(tmp_path, monkeypatch, capsys):
    save_drafter(tiny.head(**ONE), tmp_path / "head", k=4)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["convert", str(tmp_path / "head"), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install 'peagle-jax[gguf]'" in error


# ---------------------------------------------------------------- what is there already


def test_only_our_own_files_are_replaced(tmp_path):
    folder, file = written(tmp_path)
    first = file.read_bytes()
    convert(folder, file, to="gguf", dtype="bfloat16")
    assert file.read_bytes() != first and len(file.read_bytes()) < len(first)
    other = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_ti_data_to_file()
    other.close()
    (tmp_path / "text.gguf").write_text("mine")
    (tmp_path / "dir.gguf").mkdir()
    for name, words in (
        ("other.gguf", "only a file that peagle wrote is replaced"),
        ("text.gguf", "only a file that peagle wrote is replaced"),
        ("dir.gguf", "the output must be a file; got a folder"),
    ):
        before = sorted(p.name for p in tmp_path.iterdir())
        with pytest.raises(InputError, match=words):
            convert(folder, tmp_path / name, to="gguf")
        assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert (tmp_path / "text.gguf").read_text() == "mine"


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    folder, file = written(tmp_path)
    first = file.read_bytes()
    written_tensors = []

    def write(self, tensor):
        written_tensors.append(tensor)
        if len(written_tensors) == 3:
            raise OSError(28, "No space left on device")
        return real(self, tensor)

    real = gguf.GGUFWriter.write_tensor_data
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", write)
    with pytest.raises(InputError, match="No space left on device; make room"):
        convert(folder, file, to="gguf", dtype="bfloat16")
    assert file.read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "head.gguf"]


def test_one_process_at_a_time_and_none_from_before(tmp_path):
    folder, file = written(tmp_path)
    with weights.new_file(file, lambda path: True) as temporary:
        temporary.write_text("half")
        with pytest.raises(InputError, match="one process writes a file at a time"):
            convert(folder, file, to="gguf")
        temporary.write_text("whole")
    assert file.read_text() == "whole"
    # as a killed process leaves it
    left = tmp_path / ".head.gguf.peagle-new.abc"
    left.mkdir()
    (left / "head.gguf").write_text("half")
    file.unlink()
    convert(folder, file, to="gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "head.gguf"]


def test_bytes_are_reported_up_to_all(tmp_path):
    save_drafter(tiny.head(**ONE), tmp_path / "head", k=4)
    seen = []
    convert(
        *(tmp_path / "head", tmp_path / "x.gguf"),
        to="gguf",
        on_bytes=lambda done, total: seen.append((done, total)),
    )
    assert (
        seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in read(tmp_path / "x.gguf")[1].values())
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and len(seen) == len(
        names()
    )
