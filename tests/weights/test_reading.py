"""The safetensors reader: every dtype, shards, and every kind of damage.

Each kind of damage is one line that names the file, the rule, the value and what to do.
"""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from weights.files import container, f32

from peagle_jax import weights
from peagle_jax.types import InputError
from peagle_jax.weights.reading import MAX_HEADER


def test_every_dtype_and_no_copy(tmp_path):
    tensors = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "i64": np.array([2**40]),
        "bool": np.array([True, False]),
        "bf16": np.arange(4).astype(ml_dtypes.bfloat16),
        "f8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        "u16": np.array([65535], np.uint16),
        "scalar": np.array(3.5, np.float16),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "who": "me"})
    read = weights.open_folder(tmp_path)
    for name, want in tensors.items():
        assert read[name].dtype == want.dtype and read[name].shape == want.shape
        assert read[name].tobytes() == want.tobytes()
    assert isinstance(read["f32"].base, np.memmap)
    assert weights.read_metadata(tmp_path) == {"format": "pt", "who": "me"}


def test_an_empty_file_has_no_tensors(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(container({}))
    assert weights.open_folder(tmp_path) == {} and weights.read_metadata(tmp_path) == {}


def test_shards_that_an_index_names_and_that_are_not_there(tmp_path):
    """vLLM refuses such a folder, although its model.safetensors has everything."""
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert weights.absent_shards(tmp_path) == []
    shards = {"a": "model.safetensors", "b": "two.safetensors", "c": "one.safetensors"}
    index = tmp_path / weights.INDEX
    index.write_text(json.dumps({"weight_map": shards | {"d": "two.safetensors"}}))
    assert weights.absent_shards(tmp_path) == ["one.safetensors", "two.safetensors"]
    index.write_text("{}")
    with pytest.raises(InputError, match="weight_map must name the shard of each tensor"):
        weights.absent_shards(tmp_path)


GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:5a\nsize 28000000\n"
ONE_F32 = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "header must fit"),
        (b"\x05\0\0\0\0\0\0\0{}", "header must fit"),
        ((2**60).to_bytes(8, "little") + b"{}", "header must fit"),
        (container({"a": f32(0, 8)}), "needs 8 of the 0 bytes"),
        (container({"a": f32(0, 8)}, b"\0" * 7), "needs 8 of the 7 bytes"),
        (container({"a": f32(0, 8, shape=[3])}, b"\0" * 8), "needs 12 of the 8"),
        (container({"a": f32(0, 8, shape=[2**62, 2])}, b"\0" * 8), "axes of a must be below"),
        (container({"a": f32(0, 8, shape=[10**3000] * 2)}, b"\0" * 8), "axes of a must be below"),
        (container({"a": f32(0, 8, dtype="F31")}, b"\0" * 8), "got F31"),
        (container({"a": f32(0, 8, data_offsets=[4, -4])}, b"\0" * 8), "needs dtype, shape"),
        (container({"a": f32(0, 8, data_offsets=[8, 0])}, b"\0" * 8), "truncated or damaged"),
        (container({"a": f32(0, 8, data_offsets=[0.0, 8.0])}, b"\0" * 8), "needs dtype, shape"),
        (container({"a": f32(0, 4, shape=[True])}, b"\0" * 4), "needs dtype, shape"),
        (container({"a": f32(0, 8, shape=2)}, b"\0" * 8), "needs dtype, shape"),
        (container({"a": {"dtype": "F32"}}), "needs dtype, shape"),
        (container({"a": [1]}), "printable name and an object"),
        (container({"a\x1b[31m": f32(0, 8)}, b"\0" * 8), "printable name"),
        (container(b"not json"), r"must begin with \{"),
        (container(b"{not json}"), "must be JSON"),
        (container(b'{"a": \xff}'), "must be JSON"),
        (container([1]), r"must begin with \{"),
        (container(b'{"a": ' + b"[" * 100_000), "must be JSON"),
        (container(b'{"a": ' + b"9" * 5000 + b"}"), "must be JSON"),
        (container({"a": f32(0, 8, shape=[-1, -2])}, b"\0" * 8), "needs dtype, shape"),
        (container({"a": f32(0, 4, shape=[1] * 33)}, b"\0" * 4), "at most 32 axes"),
        (container({"a": f32(0, 0, shape=[0, 2**70])}), "axes of a must be below"),
        (container({"a": f32(0, 0, shape=[0, 2**61])}), "shape that an array can have"),
        (
            container({"a": f32(0, 8), "b": f32(4, 12)}, b"\0" * 12),
            "an overlap between a and b, at byte 4",
        ),
        (
            container({"a": f32(0, 4), "b": f32(8, 12)}, b"\0" * 12),
            "a hole between a and b, at byte 4",
        ),
        (container({"a": f32(4, 8)}, b"\0" * 8), "a hole between the header and a"),
        (
            container({"a": f32(0, 4)}, b"\0" * 8),
            "must fill the 8 bytes.*; download it again, or save it",
        ),
        (container(b'{"a": ' + ONE_F32 + b', "a": ' + ONE_F32 + b"}", b"\0" * 4), "'a' twice"),
        (
            container(
                b'{"a": {"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', b"\0" * 4
            ),
            "'shape' twice",
        ),
        (container({"a": f32(0, 4, more=float("inf"))}, b"\0" * 4), "got the number Infinity"),
        (container({"a": f32(0, 4, more=[float("nan")])}, b"\0" * 4), "got the number NaN"),
        (container({"__metadata__": {"a": 1}}), "must name strings"),
        (container({"__metadata__": [1]}), "must name strings"),
        (container({"__metadata__": {"a": "\udc00"}}), "must name strings"),
        (container({"__metadata__": {"\udc00": "a"}}), "must name strings"),
        (container({"a": f32(0, 4) | {"\udc00": 1}}, b"\0" * 4), "a printable name and an object"),
        (b"PK\x03\x04" + b"\0" * 60, r"must fit|must begin"),
        (GIT_LFS_POINTER, "got a git-lfs pointer to them; run git lfs pull --include model.saf"),
    ],
)
def test_damage(content, words, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        weights.open_folder(tmp_path)
    message = str(error.value)
    assert "model.safetensors" in message and message.isprintable() and len(message) < 1500


def test_a_pointer_in_the_place_of_json(tmp_path):
    """Repositories may keep tokenizer.json and an index in git-lfs as well."""
    (tmp_path / "model.safetensors.index.json").write_bytes(GIT_LFS_POINTER)
    with pytest.raises(InputError, match="index.json: .*got a git-lfs pointer to them"):
        weights.open_folder(tmp_path)


def test_a_single_file_that_is_a_link(tmp_path):
    """Within the folder it is followed; out of it, it is refused as a shard's is."""
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "checkpoint"
    folder.mkdir()
    for path in (outside, folder / "real.safetensors"):
        save_file({"a": np.ones(3, np.float32)}, path, {"who": "me"})
    link = folder / "model.safetensors"
    link.symlink_to("real.safetensors")
    assert weights.open_folder(folder).keys() == {"a"}
    link.unlink()
    link.symlink_to("../outside.safetensors")
    for read in (weights.open_folder, weights.read_metadata):
        with pytest.raises(InputError, match="model.safetensors, a link to elsewhere; copy model"):
            read(folder)


@pytest.mark.parametrize("length", [100_000_000, MAX_HEADER + 1])
def test_a_header_of_a_hundred_megabytes(length, tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{}")
        file.truncate(8 + length)
    with pytest.raises(InputError, match="a header of at most 33,554,432 bytes is read"):
        weights.open_folder(tmp_path)


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="this file must exist; got no file"):
        weights.open_folder(tmp_path)


def test_missing_and_pickles(tmp_path):
    with pytest.raises(InputError, match="must hold model.safetensors"):
        weights.open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="pickles can run code.*; load it where you trust it"):
        weights.open_folder(tmp_path)


# ---------------------------------------------------------------- shards


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"a": np.ones(3, np.float32)}, folder / "x-1.safetensors", metadata={"who": "me"})
    save_file({"b": np.zeros(2, np.int64)}, folder / "x-2.safetensors")
    save_file({"c": np.zeros(2, np.int64)}, tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "loop.safetensors").symlink_to(folder / "loop.safetensors")
    (folder / "alias.safetensors").symlink_to(folder / "x-2.safetensors")
    return folder


def index(folder, weight_map):
    (folder / weights.INDEX).write_text(
        weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    )


def test_shards(shards):
    # a link inside the folder is a file like another
    for second in ("x-2.safetensors", "alias.safetensors"):
        index(shards, {"a": "x-1.safetensors", "b": second})
        assert {n: t.tolist() for n, t in weights.open_folder(shards).items()} == {
            "a": [1, 1, 1],
            "b": [0, 0],
        }
    assert weights.read_metadata(shards) in ({"who": "me"}, {})


@pytest.mark.parametrize(
    "weight_map, words",
    [
        ({"a": "x-1.safetensors", "b": "../outside.safetensors"}, "lie in the folder itself"),
        ({"a": "/etc/passwd"}, "lie in the folder itself"),
        ({"a": ""}, "lie in the folder|must be safetensors"),
        ({"a": "."}, "lie in the folder"),
        ({"a": ".."}, "must be safetensors"),
        ({"a": "x\0.safetensors"}, "lie in the folder"),
        ({"a": "x-1.safetensors", "c": "link.safetensors"}, "a link to elsewhere"),
        ({"a": "loop.safetensors"}, "a link to elsewhere|must exist"),
        ({"a": "x-1.safetensors", "b": "x-3.safetensors"}, "this file must exist"),
        ({"a": "x-1.safetensors", "b": "x-1.safetensors"}, "must hold b"),
        (
            {"a": "x-1.safetensors", "c": "x-2.safetensors"},
            "b is in x-2.safetensors.*got no such tensor",
        ),
        ({"a": "x-2.safetensors", "b": "x-2.safetensors"}, "must hold a"),
        ({"a": "pytorch_model-1.bin"}, "pickles can run code"),
        ({}, "must name the shard.*; download model.safetensors.index.json again"),
        ({"a": 3}, "must name the shard"),
        ([], "must name the shard"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' twice"),
        ("[]", "must be a JSON object"),
        ('{"weight_map": 1', "must be JSON"),
    ],
)
def test_bad_indices(weight_map, words, shards):
    index(shards, weight_map)
    with pytest.raises(InputError, match=words):
        weights.open_folder(shards)


def test_a_tensor_in_two_shards(shards):
    save_file({"a": np.ones(3, np.float32), "b": np.zeros(2, np.int64)}, shards / "x-2.safetensors")
    index(shards, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    with pytest.raises(
        InputError,
        match="a is in x-2.safetensors, and no other shard may hold it; got it in x-1.safetensors",
    ):
        weights.open_folder(shards)
