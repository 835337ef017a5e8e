"""safetensors files and folders, read lazily by memory map, and trusted in nothing.

Our own reader, because the library's cannot load float8 into NumPy, and its flax one turns int64 into int32 without a word.
What a well-formed file is: the safetensors format, version 0.8 of its library (one header, one tiling of the data).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from peagle_jax.types import InputError
from peagle_jax.weights.tensors import DTYPES

MAX_HEADER = (
    32 << 20
)  # bytes: 200,000 tensors; the format allows three times as much, and Python needs ten times that to parse it
MAX_RANK = 32
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def read_json(path: Path) -> dict:
    """A JSON object from a file.

    Raises:
      InputError: there is none, or one of its objects names a key twice.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            path, "this file must exist and be readable", error.strerror, "check the folder's name"
        ) from None
    return parse_json(content, path, "the file", "restore the file")


def parse_json(content: bytes, where, what: str, next_step: str) -> dict:
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_once)
    except (
        ValueError,
        RecursionError,
    ) as error:  # also a UnicodeDecodeError, and whole numbers of 5,000 digits
        raise InputError(where, f"{what} must be JSON in UTF-8", error, next_step) from None
    if not isinstance(value, dict):
        raise InputError(where, f"{what} must be a JSON object", type(value).__name__, next_step)
    return value


def _once(pairs: list[tuple]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        raise ValueError(
            f"the key {next(key for key, _ in pairs if key in seen or seen.add(key))!r} twice"
        )
    return value


def open_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Tensor name -> memory-mapped array: nothing is read before it is used.

    Raises:
      InputError: the file is missing, truncated, or not as the format says.
    """
    header, data, _ = _open(path)
    return {name: _view(path, data, name, spec) for name, spec in header.items()}


def read_metadata(folder: Path) -> dict[str, str]:
    """What the first weights file of a folder says of itself: strings by name, as its writer left them."""
    files = [SINGLE] if (folder / SINGLE).exists() else sorted(set(_shards(folder).values()))[:1]
    texts = next((_open(folder / file)[2] for file in files), {})

    def printable(text):
        return "".join(c if c.isprintable() else "?" for c in text)

    return {printable(key): printable(value) for key, value in texts.items()}


def _open(path: Path) -> tuple[dict, np.ndarray, dict[str, str]]:
    """The checked header without its metadata, the data, and the metadata."""
    again = "fetch it again"
    try:
        if not path.is_file():
            raise InputError(
                path,
                "this file must exist",
                "nothing" if not path.exists() else "no file",
                "fetch it, or check the name",
            )
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise InputError(
                    path,
                    f"the header must fit the file of {size:,} bytes",
                    f"{length:,} bytes",
                    again,
                )
            if length > MAX_HEADER:
                raise InputError(
                    path,
                    f"a header of at most {MAX_HEADER:,} bytes is read",
                    f"{length:,} bytes",
                    again,
                )
            content = file.read(length)
        data = (
            np.memmap(path, np.uint8, "r", offset=8 + length)
            if size > 8 + length
            else np.zeros(0, np.uint8)
        )
    except OSError as error:
        raise InputError(
            path, "this file must be readable", error.strerror, "check its permissions"
        ) from None
    if not content.startswith(b"{"):
        raise InputError(
            path,
            "the header must begin with {",
            repr(content[:12]),
            "safetensors are needed: convert or fetch it again",
        )
    header = parse_json(content, path, "the header", again)
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise InputError(path, "__metadata__ must name strings", str(metadata)[:80], again)
    _check_tiling(path, header, data.size)
    return header, data, metadata


def _check_tiling(path: Path, header: Mapping, size: int) -> None:
    """Every byte of the data belongs to exactly one tensor, as the format demands."""
    spans = []
    for name, spec in header.items():
        if not name.isprintable() or not isinstance(spec, dict):
            raise InputError(
                path,
                "every entry of the header must be a printable name and an object",
                f"{name!r}",
                "fetch it again",
            )
        shape, offsets, kind = spec.get("shape"), spec.get("data_offsets"), spec.get("dtype")
        if (
            not _wholes(shape)
            or not _wholes(offsets)
            or len(offsets) != 2
            or not isinstance(kind, str)
        ):
            raise InputError(
                path, f"tensor {name} needs dtype, shape and data_offsets", spec, "fetch it again"
            )
        if kind not in DTYPES:
            raise InputError(
                path,
                f"the dtype of {name} must be one of {', '.join(DTYPES)}",
                kind,
                "convert it first",
            )
        if len(shape) > MAX_RANK:
            raise InputError(
                path, f"{name} must have at most {MAX_RANK} axes", len(shape), "fetch it again"
            )
        want, (start, end) = (
            int(np.prod(shape, dtype=object)) * np.dtype(DTYPES[kind]).itemsize,
            offsets,
        )
        if not start <= end <= size or end - start != want or max(shape, default=0) >= 2**62:
            raise InputError(
                path,
                f"{name} {kind} {shape} needs {want} of the {size} bytes of data",
                f"offsets {start}..{end}",
                "the file is truncated or damaged: fetch it again",
            )
        spans.append((start, end, name))
    at, before = 0, "the header"
    for start, end, name in sorted(spans):
        if start != at:
            got = f"{'a hole' if start > at else 'an overlap'} between {before} and {name}, at byte {min(start, at)}"
            raise InputError(
                path,
                "tensors must follow each other without hole or overlap",
                got,
                "fetch it again",
            )
        at, before = end, name
    if at != size:
        raise InputError(
            path,
            f"the tensors must fill the {size} bytes of data",
            f"{at} bytes in use",
            "fetch it again",
        )


def _wholes(value) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _view(path: Path, data: np.ndarray, name: str, spec: Mapping) -> np.ndarray:
    (start, end), shape, dtype = (
        spec["data_offsets"],
        tuple(spec["shape"]),
        np.dtype(DTYPES[spec["dtype"]]),
    )
    try:
        return data[start:end].view(dtype).reshape(shape)
    except (ValueError, OverflowError) as error:  # an axis of 2**61 beside one of zero
        raise InputError(
            path, f"{name} must have a shape that an array can have", error, "fetch it again"
        ) from None


# ---------------------------------------------------------------- folders


def open_folder(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint folder, one file or shards with an index, lazily.

    Raises:
      InputError: a file is missing or damaged, or the index and the shards disagree, or it leads out of the folder.
    """
    folder = Path(folder)
    if (folder / SINGLE).exists():
        return open_safetensors(folder / SINGLE)
    where = _shards(folder)
    shards = {file: open_safetensors(folder / file) for file in sorted(set(where.values()))}
    for file, tensors in shards.items():
        for name in tensors:
            if where.get(name) != file:
                other = f"it in {where[name]}" if name in where else "no such tensor"
                rule = f"must say that {name} is in {file}, and no other shard may hold it"
                raise InputError(folder / INDEX, rule, other, "restore the index")
    if lost := [name for name, file in where.items() if name not in shards[file]]:
        raise InputError(
            folder / where[lost[0]],
            f"must hold {lost[0]}, as the index says",
            "nothing",
            "fetch it again",
        )
    return {name: shards[file][name] for name, file in where.items()}


def _shards(folder: Path) -> dict[str, str]:
    """The index: tensor name -> file in this folder."""
    index = folder / INDEX
    if not index.exists():
        pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLES)
        if pickles:
            raise InputError(
                folder,
                "weights must be safetensors (pickles can run code)",
                pickles[0],
                "convert it with safetensors",
            )
        raise InputError(
            folder, f"must hold {SINGLE} or {INDEX}", "neither", "check the folder's name"
        )
    where = read_json(index).get("weight_map")
    if (
        not isinstance(where, dict)
        or not where
        or not all(isinstance(file, str) for file in where.values())
    ):
        raise InputError(
            index,
            "weight_map must name the shard of each tensor",
            type(where).__name__,
            "restore the index",
        )
    for file in sorted(set(where.values())):
        if not file.isprintable() or Path(file).name != file:
            raise InputError(
                index, "shards must lie in the folder itself", repr(file), "restore the index"
            )
        if not file.endswith(".safetensors"):
            raise InputError(
                index,
                "shards must be safetensors (pickles can run code)",
                file,
                "convert it with safetensors",
            )
        if not _inside(folder, folder / file):
            raise InputError(
                index,
                "shards must lie in the folder itself",
                f"{file}, a link to elsewhere",
                "copy the file into it",
            )
    return where


def _inside(folder: Path, file: Path) -> bool:
    """Whether a file, its links followed, lies in its folder; or, in the hub's cache, among the files of the same repository."""
    try:
        real, home = file.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return False
    cached = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    return real.parent == home or cached
