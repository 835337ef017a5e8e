"""The safetensors reader and the folder writer: every dtype, shards, damage, and nothing half-written."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from peagle_jax import weights
from peagle_jax.types import InputError


def container(header, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_every_dtype_and_no_copy(tmp_path):
    tensors = {"f32": np.arange(6, dtype=np.float32).reshape(2, 3), "i64": np.array([2**40]), "bool": np.array([True, False]),
               "bf16": np.arange(4).astype(ml_dtypes.bfloat16), "f8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
               "scalar": np.array(3.5, np.float16), "empty": np.zeros((0, 4), np.float32)}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    read = weights.open_folder(tmp_path)
    for name, want in tensors.items():
        assert read[name].dtype == want.dtype and read[name].shape == want.shape and read[name].tobytes() == want.tobytes()
    assert isinstance(read["f32"].base, np.memmap)


def test_shards(tmp_path):
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "x-1.safetensors")
    save_file({"b": np.zeros(2, np.int64)}, tmp_path / "x-2.safetensors")
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    assert {n: t.tolist() for n, t in weights.open_folder(tmp_path).items()} == {"a": [1, 1, 1], "b": [0, 0]}
    for where, words in (
        ("../x", "lie in the folder itself"),
        ("x-3.safetensors", "this file must exist"),
        ("x-1.safetensors", "must hold b"),
    ):
        (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": {"a": "x-1.safetensors", "b": where}}))
        with pytest.raises(InputError, match=words):
            weights.open_folder(tmp_path)


SPEC = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("content, words", [
    (b"", "header must fit"), (b"\x05\0\0\0\0\0\0\0{}", "header must fit"), ((2**60).to_bytes(8, "little") + b"{}", "header must fit"),
    (container({"a": SPEC}), "truncated or damaged"), (container({"a": SPEC}, b"\0" * 7), "needs 8 of the 7 bytes"),
    (container({"a": {**SPEC, "shape": [3]}}, b"\0" * 8), "needs 12 of the 8"), (container({"a": {**SPEC, "dtype": "F31"}}, b"\0" * 8), "got F31"),
    (container({"a": {**SPEC, "data_offsets": [4, -4]}}, b"\0" * 8), "truncated or damaged"), (container({"a": {"dtype": "F32"}}), "needs dtype, shape"),
    ((8).to_bytes(8, "little") + b"not json", "must be UTF-8 JSON"),
    (container([1]), "header must be a JSON object"),
    (container({"a": {**SPEC, "shape": [-1, -2]}}, b"\0" * 8), "needs dtype, shape"),
])  # fmt: skip
def test_damage(content, words, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        weights.open_folder(tmp_path)
    assert "model.safetensors" in str(error.value) and "\n" not in str(error.value)


def test_missing_and_pickles(tmp_path):
    with pytest.raises(InputError, match="must hold model.safetensors"):
        weights.open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="pickles can run code"):
        weights.open_folder(tmp_path)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "deep" / "out"
    with weights.new_folder(out) as work:
        (work / "config.json").write_text("1")
        assert not out.exists()
    with pytest.raises(RuntimeError), weights.new_folder(out) as work:
        (work / "b").write_text("2")
        raise RuntimeError
    assert [p.name for p in out.iterdir()] == ["config.json"] and [p.name for p in out.parent.iterdir()] == ["out"]
    with weights.new_folder(out) as work:
        (work / "c").write_text("3")
    assert [p.name for p in out.iterdir()] == ["c"] and [p.name for p in out.parent.iterdir()] == ["out"]


def test_only_a_checkpoint_folder_is_replaced(tmp_path):
    """A mistyped output must not cost a training run or a folder of runs."""
    (tmp_path / "runs" / "peagle").mkdir(parents=True)
    with (
        pytest.raises(InputError, match="only a checkpoint folder is replaced; got one that holds peagle"),
        weights.new_folder(tmp_path / "runs"),
    ):
        pass
    assert (tmp_path / "runs" / "peagle").is_dir() and len(list(tmp_path.iterdir())) == 1


def test_output_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(InputError, match="output"), weights.new_folder(bad):
            pass
    assert os.listdir(tmp_path) == ["file"]


def test_shards_of_a_limited_size_are_read_back(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.normal(size=(n, 100)).astype(np.float32) for i, n in enumerate((10, 40, 1, 200, 30))}  # 4, 16, 0.4, 80, 12 kB
    weights.write_folder(tmp_path, {}, tensors, {"source": "x"}, max_shard_bytes=30_000)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)] and len(files) > 2
    sizes = {file: (tmp_path / file).stat().st_size for file in files}
    where = json.loads((tmp_path / weights.INDEX).read_text())
    assert all(size <= 30_000 for file, size in sizes.items() if file != where["weight_map"]["t3"])  # one tensor alone is larger
    assert [file for file in where["weight_map"].values()].count(where["weight_map"]["t3"]) == 1
    assert where["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    read = weights.open_folder(tmp_path)
    assert list(read) == list(tensors) and all(np.array_equal(read[n], tensors[n]) for n in tensors)
    whole = tmp_path / "whole"
    whole.mkdir()
    weights.write_folder(whole, {}, tensors, {}, max_shard_bytes=10**9)
    assert (whole / "model.safetensors").exists() and not (whole / weights.INDEX).exists()


@pytest.mark.parametrize("name", ["nowhere", "/not/here", "nobody/no-such-model", "no/my model"])
def test_folders_that_are_not_there(name):
    with pytest.raises(InputError, match="must (exist|be a local folder)"):
        weights.find_folder(name)
