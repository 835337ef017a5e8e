"""A lazy safetensors reader that validates every header.

Tensors are memory-mapped: nothing is read before it is used. A checkpoint may come from anywhere,
so every field of a header and of a shard index is checked before it is used, and links that lead
out of a folder are refused. What a well-formed file is follows version 0.8 of the safetensors
library: one header, then data that the tensors tile without a gap.

The library's own readers are not used, because its NumPy one cannot load float8, and its flax one
silently turns int64 into int32.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import numpy as np

from peagle_jax.types import InputError
from peagle_jax.weights.tensors import DTYPES, map_file

# Bytes; enough for 200,000 tensors. The format allows three times as much, but Python needs ten
# times the bytes of a header to parse it.
MAX_HEADER = 32 << 20
MAX_RANK = 32
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
DOWNLOAD_AGAIN = "download it again, or save it again with the tool that wrote it"
INDEX_AGAIN = f"download {INDEX} again, or save the weights again with the tool that wrote them"
SAVE_AS_SAFETENSORS = "load it where you trust it and save it with safetensors.torch.save_file"
SURROGATES = re.compile("[\ud800-\udfff]")
# What git leaves in the place of a large file where its extension for them is not installed:
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(path: Path, next_step: str | None = None) -> dict:
    """A JSON object from a file.

    Args:
      next_step: what to do about a damaged file; None: to download it again.

    Raises:
      InputError: the file cannot be read or holds no JSON object, or an object names a key twice.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            path, "this file must exist and be readable", error.strerror, "check the folder's name"
        ) from None
    if next_step is None:
        next_step = f"download {path.name} again, or copy it from a backup"
    return parse_json(content, path, "the file", next_step)


def parse_json(
    content: bytes, where: Path | str, what: str, next_step: str, *, strict_numbers: bool = False
) -> dict:
    """A JSON object from bytes.

    Args:
      where, what, next_step: for the error: the file, what of it the bytes are, what to do.
      strict_numbers: refuses NaN and Infinity, which Python reads and JSON does not have.

    Raises:
      InputError: the bytes are no JSON object in UTF-8, or an object names a key twice.
    """
    parse_constant = _refuse_constant if strict_numbers else None
    if content.startswith(GIT_LFS_POINTER):
        raise git_lfs_pointer(where)
    try:
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_dict_of_unique_keys,
            parse_constant=parse_constant,
        )
    # ValueError includes UnicodeDecodeError, and whole numbers of more than 4,300 digits
    except (ValueError, RecursionError) as error:
        raise InputError(where, f"{what} must be JSON in UTF-8", error, next_step) from None
    if not isinstance(value, dict):
        raise InputError(where, f"{what} must be a JSON object", type(value).__name__, next_step)
    return value


def git_lfs_pointer(where: Path | str) -> InputError:
    """The error of a file that is git-lfs's pointer to its contents."""
    rule, got = "this file must have its contents", "a git-lfs pointer to them"
    next_step = f"run git lfs pull --include {Path(where).name} in its repository, or download it"
    return InputError(where, rule, got, next_step)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _dict_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    """The object of these pairs; ValueError where a key stands twice, as the library refuses it."""
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    first_keys: set[str] = set()
    for key, _ in pairs:
        if key in first_keys:
            raise ValueError(f"the key {key!r} twice")
        first_keys.add(key)
    raise AssertionError("fewer keys than pairs, and none of them twice")


def open_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Tensor name -> memory-mapped array: nothing is read before it is used.

    Raises:
      InputError: the file is missing or truncated, or its header breaks a rule of the format.
    """
    header, data, _ = _open(path)
    return {name: _view(path, data, name, spec) for name, spec in header.items()}


def read_metadata(folder: Path) -> dict[str, str]:
    """The metadata of a folder's first weights file, in which unprintable characters are replaced.

    Raises:
      InputError: the folder holds no weights, or the file's header is damaged.
    """
    if _has_single_file(folder):
        file = SINGLE
    else:
        file = min(_read_index(folder).values())
    _, _, metadata = _open(folder / file)
    return {_printable(key): _printable(value) for key, value in metadata.items()}


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _open(path: Path) -> tuple[dict, np.ndarray, dict[str, str]]:
    """The checked header without its metadata, the mapped data, and the metadata."""
    try:
        if not path.is_file():
            got = "no file" if path.exists() else "nothing"
            next_step = f"download {path.name} too, or check the folder's name"
            raise InputError(path, "this file must exist", got, next_step)
        size = path.stat().st_size
        content = _read_header(path, size)
        data_start = 8 + len(content)
        if size > data_start:
            data = map_file(path, data_start)
        else:
            data = np.zeros(0, np.uint8)
    except OSError as error:
        raise InputError(
            path, "this file must be readable", error.strerror, "check its permissions"
        ) from None
    if not content.startswith(b"{"):
        raise InputError(
            path,
            rule="the header must begin with {",
            got=repr(content[:12]),
            next_step=f"{SAVE_AS_SAFETENSORS}, or download it again",
        )
    # the library's parser refuses NaN and Infinity, too
    header = parse_json(content, path, "the header", DOWNLOAD_AGAIN, strict_numbers=True)
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(map(_is_text, [*metadata, *metadata.values()])):
        raise InputError(path, "__metadata__ must name strings", str(metadata)[:80], DOWNLOAD_AGAIN)
    _check_tiling(path, header, data.size)
    return header, data, metadata


def _read_header(path: Path, size: int) -> bytes:
    """The bytes of the header of a file of `size` bytes."""
    with path.open("rb") as file:
        begin = file.read(len(GIT_LFS_POINTER))
        if begin == GIT_LFS_POINTER:
            raise git_lfs_pointer(path)
        length = int.from_bytes(begin[:8], "little")
        got = f"{length:,} bytes"
        if size < 8 or length > size - 8:
            raise InputError(
                path, f"the header must fit the file of {size:,} bytes", got, DOWNLOAD_AGAIN
            )
        if length > MAX_HEADER:
            raise InputError(
                path, f"a header of at most {MAX_HEADER:,} bytes is read", got, DOWNLOAD_AGAIN
            )
        file.seek(8)
        return file.read(length)


def _check_tiling(path: Path, header: Mapping, size: int) -> None:
    """Every byte of the data belongs to exactly one tensor, as the format demands."""
    spans = sorted((*_checked_span(path, name, spec, size), name) for name, spec in header.items())
    end_before, name_before = 0, "the header"
    for start, end, name in spans:
        if start != end_before:
            gap = "a hole" if start > end_before else "an overlap"
            got = f"{gap} between {name_before} and {name}, at byte {min(start, end_before)}"
            rule = "tensors must follow each other without hole or overlap"
            raise InputError(path, rule, got, DOWNLOAD_AGAIN)
        end_before, name_before = end, name
    if end_before != size:
        rule = f"the tensors must fill the {size} bytes of data"
        raise InputError(path, rule, f"{end_before} bytes in use", DOWNLOAD_AGAIN)


def _checked_span(path: Path, name: str, spec: Any, size: int) -> tuple[int, int]:
    """Where the bytes of one tensor begin and end in data of `size` bytes."""
    if not name.isprintable() or not isinstance(spec, dict) or not all(map(_is_text, spec)):
        rule = "every entry of the header must be a printable name and an object"
        raise InputError(path, rule, f"{name!r}", DOWNLOAD_AGAIN)
    shape, offsets, dtype = spec.get("shape"), spec.get("data_offsets"), spec.get("dtype")
    if (
        not _is_list_of_sizes(shape)
        or not _is_list_of_sizes(offsets)
        or len(offsets) != 2
        or not isinstance(dtype, str)
    ):
        rule = f"tensor {name} needs dtype, shape and data_offsets"
        raise InputError(path, rule, spec, DOWNLOAD_AGAIN)
    if dtype not in DTYPES:
        rule = f"the dtype of {name} must be one of {', '.join(DTYPES)}"
        raise InputError(path, rule, dtype, "convert it to one of these dtypes first")
    if len(shape) > MAX_RANK:
        rule = f"{name} must have at most {MAX_RANK} axes"
        raise InputError(path, rule, len(shape), DOWNLOAD_AGAIN)
    # as Python integers, which do not overflow
    if max(shape, default=0) >= 2**62:
        rule = f"the axes of {name} must be below 2**62"
        raise InputError(path, rule, "a larger one", f"the file is damaged: {DOWNLOAD_AGAIN}")
    needed = int(np.prod(shape, dtype=object)) * np.dtype(DTYPES[dtype]).itemsize
    start, end = offsets
    if not start <= end <= size or end - start != needed:
        raise InputError(
            path,
            rule=f"{name} {dtype} {shape} needs {needed} of the {size} bytes of data",
            got=f"offsets {start}..{end}",
            next_step=f"the file is truncated or damaged: {DOWNLOAD_AGAIN}",
        )
    return start, end


def _is_text(value: Any) -> bool:
    """Whether a value is a string of Unicode.

    Python reads half of a surrogate pair, "\\udc00", from JSON; the library refuses it.
    """
    return isinstance(value, str) and SURROGATES.search(value) is None


def _is_list_of_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _view(path: Path, data: np.ndarray, name: str, spec: Mapping) -> np.ndarray:
    """The tensor that a checked entry of the header describes, as a view of the data."""
    start, end = spec["data_offsets"]
    try:
        return data[start:end].view(np.dtype(DTYPES[spec["dtype"]])).reshape(tuple(spec["shape"]))
    except (ValueError, OverflowError) as error:  # an axis of 2**61 beside one of zero
        rule = f"{name} must have a shape that an array can have"
        raise InputError(path, rule, error, DOWNLOAD_AGAIN) from None


# ---------------------------------------------------------------- folders


def open_folder(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint folder, lazily: one file, or shards with an index.

    Raises:
      InputError: a file is missing or damaged, the index and the shards disagree, or a file lies
        outside the folder.
    """
    folder = Path(folder)
    if _has_single_file(folder):
        _check_no_other_weights(folder)
        return open_safetensors(folder / SINGLE)
    weight_map = _read_index(folder)
    shards = {file: open_safetensors(folder / file) for file in sorted(set(weight_map.values()))}
    for file, tensors in shards.items():
        for name in tensors:
            if weight_map.get(name) != file:
                got = f"it in {weight_map[name]}" if name in weight_map else "no such tensor"
                rule = f"must say that {name} is in {file}, and no other shard may hold it"
                raise InputError(folder / INDEX, rule, got, INDEX_AGAIN)
    for name, file in weight_map.items():
        if name not in shards[file]:
            rule = f"must hold {name}, as the index says"
            raise InputError(folder / file, rule, "nothing", DOWNLOAD_AGAIN)
    return {name: shards[file][name] for name, file in weight_map.items()}


def _has_single_file(folder: Path) -> bool:
    """Whether the weights are one file, which no link may lead out of the folder.

    Raises:
      InputError: it is a link to elsewhere.
    """
    file = folder / SINGLE
    if not file.exists():
        return False
    if not is_inside(folder, file):
        rule, got = "weights must lie in the folder itself", f"{SINGLE}, a link to elsewhere"
        raise InputError(folder, rule, got, f"copy {SINGLE} into the folder")
    return True


def _check_no_other_weights(folder: Path) -> None:
    """Raises InputError where an index names other files, and these hold other tensors.

    vLLM reads those, transformers model.safetensors; one of the two is old. Some repositories have
    the same weights in both, and tensors of the same names, shapes and dtypes are taken for it.
    """
    if not (folder / INDEX).exists():
        return
    try:
        files = set(_read_index(folder).values())
    except InputError:
        return  # a damaged one: whoever needs it says so
    if not files - {SINGLE} or not all((folder / file).exists() for file in files):
        return
    of_single = _facts(open_safetensors(folder / SINGLE))
    of_index: dict[str, tuple] = {}
    for file in sorted(files):
        of_index |= _facts(open_safetensors(folder / file))
    if of_single != of_index:
        rule = f"weights must be {SINGLE}, or the files that {INDEX} names"
        next_step = f"remove {SINGLE}, or {INDEX} and its files, whichever is old"
        raise InputError(folder, rule, "both", next_step)


def _facts(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple]:
    """Shapes and dtypes by name."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def absent_shards(folder: Path) -> list[str]:
    """Files that the index of a folder names and that are not there.

    A whole `model.safetensors` beside the index is read all the same (`open_folder`).

    Raises:
      InputError: there is an index, and it is none.
    """
    if not (folder / INDEX).exists():
        return []
    return sorted(
        file for file in set(_read_index(folder).values()) if not (folder / file).exists()
    )


def _read_index(folder: Path) -> dict[str, str]:
    """The checked index: tensor name -> file in this folder."""
    index = folder / INDEX
    if not index.exists():
        raise _no_weights(folder)
    weight_map = read_json(index, INDEX_AGAIN).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        rule = "weight_map must name the shard of each tensor"
        raise InputError(index, rule, type(weight_map).__name__, INDEX_AGAIN)
    for file in sorted(set(weight_map.values())):
        _check_shard_name(index, file)
    return weight_map


def _no_weights(folder: Path) -> InputError:
    """The error for a folder without safetensors; another one if it has pickles instead."""
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLES)
    if not pickles:
        rule, next_step = f"must hold {SINGLE} or {INDEX}", "check the folder's name"
        if folder.parent.name == "snapshots":  # of the hub; pickles are not fetched from there
            next_step = "if the repository has only pickles (.bin), save them as safetensors"
        return InputError(folder, rule, "neither", next_step)
    rule = "weights must be safetensors (pickles can run code)"
    return InputError(folder, rule, pickles[0], SAVE_AS_SAFETENSORS)


def _check_shard_name(index: Path, file: str) -> None:
    """Raises unless a file that the index names is a safetensors file of the same folder."""
    in_folder = "shards must lie in the folder itself"
    if not file.isprintable() or Path(file).name != file:
        raise InputError(index, in_folder, repr(file), INDEX_AGAIN)
    if not file.endswith(".safetensors"):
        rule = "shards must be safetensors (pickles can run code)"
        raise InputError(index, rule, file, SAVE_AS_SAFETENSORS)
    if not is_inside(index.parent, index.parent / file):
        raise InputError(
            index, in_folder, f"{file}, a link to elsewhere", f"copy {file} into the folder"
        )


def is_inside(folder: Path, file: Path) -> bool:
    """Whether a file, its links followed, lies in its folder.

    In the hub's cache, where a snapshot is a folder of links, the files of the same repository
    count, too.
    """
    try:
        real, home = file.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return False
    cached = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    return real.parent == home or cached
