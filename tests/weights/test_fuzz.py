"""The reader on damaged bytes: it raises its own error, or reads exactly what the library reads."""

import json
import struct

import numpy as np
import pytest
import safetensors
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from weights.files import container

from peagle_jax import weights
from peagle_jax.types import InputError
from peagle_jax.weights.tensors import DTYPES

NAMES = {v: k for k, v in DTYPES.items()}
numbers = st.one_of(
    st.integers(-3, 40),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
)
anything = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.one_of(
    st.sampled_from(["a", "b", "lm_head.weight", "__metadata__", "", "\u202e", "a\nb", "\ud800"]),
    st.text(max_size=5),
)


@st.composite
def files(draw) -> bytes:
    """A well-formed file, of which something may then be broken."""
    header, at = {}, 0
    for name in draw(st.lists(names, max_size=4, unique=True)):
        kind = draw(st.sampled_from(list(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = int(np.prod(shape, dtype=int)) * np.dtype(DTYPES[kind]).itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    if draw(st.booleans()):
        header["__metadata__"] = draw(
            st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
        )
    data = draw(st.binary(min_size=at, max_size=at))
    damage = draw(
        st.sampled_from(
            ["none", "value", "key", "offsets", "bytes", "cut", "grow", "length", "twice", "text"]
        )
    )
    entry = draw(st.sampled_from(sorted(header) or ["x"]))
    spec = header.get(entry)
    if damage == "value" and isinstance(spec, dict):
        spec[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(anything)
    elif damage == "key" and isinstance(spec, dict) and spec:
        spec.pop(draw(st.sampled_from(sorted(spec))))
    elif damage == "offsets" and isinstance(spec, dict) and "data_offsets" in spec:
        spec["data_offsets"] = [draw(st.integers(-2, at + 2)), draw(st.integers(-2, at + 2))]
    elif damage == "text":
        header[entry] = draw(anything)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    if damage == "twice" and header:
        text = text[:-1] + b"," + text[1:]
    content = container(text, data)
    if damage == "cut":
        content = content[: draw(st.integers(0, len(content)))]
    elif damage == "grow":
        content += draw(st.binary(max_size=9))
    elif damage == "length":
        length = draw(st.integers(0, 2**64 - 1) | st.integers(0, 200))
        content = struct.pack("<Q", length) + content[8:]
    elif damage == "bytes":
        place = draw(st.integers(0, len(content) - 1))
        content = content[:place] + draw(st.binary(min_size=1, max_size=3)) + content[place + 1 :]
    return content


def by_library(content: bytes) -> dict | None:
    try:
        tensors = safetensors.deserialize(content)
    except Exception:  # it refuses with errors of several kinds
        return None
    return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in tensors}


# what is well-formed to the library and refused here, each for a reason of its own
STRICTER = ("printable name", "must be one of", "twice", "axes")


def read(folder, content: bytes) -> dict | InputError:
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        return weights.open_folder(folder)
    except InputError as error:
        assert str(error).isprintable() and str(path) in str(error) and len(str(error)) < 2000
        return error


def check(folder, content: bytes) -> None:
    ours, theirs = read(folder, content), by_library(content)
    if isinstance(ours, InputError):
        assert theirs is None or any(word in str(ours) for word in STRICTER), ours
        return
    assert theirs is not None and ours.keys() == theirs.keys()
    for name, (kind, shape, data) in theirs.items():
        assert list(ours[name].shape) == shape and ours[name].tobytes() == data
        assert NAMES[ours[name].dtype.type] == kind


@pytest.mark.fuzz
@cases(500)
@given(content=files() | st.binary(max_size=60))
def test_damaged_files(tmp_path_factory, content):
    check(folder_of(tmp_path_factory), content)


@st.composite
def indices(draw) -> bytes:
    """An index over two real shards, of which something may be broken."""
    where = {"a": "x-1.safetensors", "b": "x-2.safetensors"}
    raw: dict = {"metadata": {"total_size": 20}, "weight_map": where}
    files = (
        st.sampled_from(
            [
                "x-1.safetensors",
                "x-2.safetensors",
                "../x",
                "x",
                "",
                ".",
                "x\0y.safetensors",
                "/dev/zero",
                "x-1.safetensors/",
            ]
        )
        | anything
    )
    for _ in range(draw(st.integers(0, 2))):
        damage = draw(st.sampled_from(["file", "name", "lost", "map", "text"]))
        if damage == "file" and where:
            where[draw(st.sampled_from(sorted(where)))] = draw(files)
        elif damage == "name":
            where[draw(names)] = draw(files)
        elif damage == "lost" and where:
            where.pop(sorted(where)[0])
        elif damage == "map":
            raw["weight_map"] = draw(anything)
    content = json.dumps(raw).encode("utf-8", "surrogatepass")
    place = draw(st.integers(0, len(content) - 1))
    if not draw(st.booleans()):
        return content
    inserted, removed = draw(st.binary(max_size=2)), draw(st.integers(0, 1))
    return content[:place] + inserted + content[place + removed :]


def check_index(folder, content: bytes) -> None:
    for name, tensors in (
        ("x-1", {"a": np.ones(3, np.float32)}),
        ("x-2", {"b": np.zeros(1, np.int64)}),
    ):
        if not (folder / f"{name}.safetensors").exists():
            weights.write_safetensors(folder / f"{name}.safetensors", tensors, {})
    (folder / weights.INDEX).write_bytes(content)
    try:
        read = weights.open_folder(folder)
    except InputError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
        return
    assert {name: t.tolist() for name, t in read.items()} in (
        {"a": [1, 1, 1], "b": [0]},
        {"a": [1, 1, 1]},
        {"b": [0]},
    )


@pytest.mark.fuzz
@cases(500)
@given(content=indices())
def test_damaged_indices(tmp_path_factory, content):
    check_index(index_folder(tmp_path_factory), content)


def index_folder(factory, folders=[]):  # noqa: B006
    """One folder for all examples; so is the next."""
    if not folders:
        folders.append(factory.mktemp("index"))
    return folders[0]


def folder_of(factory, folders=[]):  # noqa: B006
    if not folders:
        folders.append(factory.mktemp("fuzz"))
    return folders[0]
