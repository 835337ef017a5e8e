"""safetensors folders in and out, and the one-table mapping between checkpoint tensors and model parameters.

Knows no model. Reads by memory map (the safetensors library cannot load float8 in numpy, and its flax reader turns
int64 into int32 without a word); writes with the safetensors library.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.numpy import save_file

from peagle_jax.types import InputError, Model, Params

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
INDEX = "model.safetensors.index.json"
HEADER, HEADER_LINE = 4096, 256  # bytes a shard's header may take, at first and for each tensor
# what the writers of this package put into a folder: only a folder of these alone is replaced
OURS = (
    "config.json",
    "model.safetensors",
    "model-0",
    "README.md",
    "head.json",
    "checkpoints",
    "tokenizer",
    "special_tokens_map",
    "chat_template",
    "generation_config",
)

# ---------------------------------------------------------------- reading


def find_folder(name: str | Path) -> Path:
    """A local folder, or a Hugging Face hub id, which is fetched (or found in the cache when offline).

    Raises:
      InputError: neither is to be had.
    """
    path = Path(name)
    if path.exists() or len(path.parts) != 2 or path.is_absolute() or ".." in path.parts:
        if not path.is_dir():
            raise InputError(path, "this folder must exist", "nothing" if not path.exists() else "a file", "check the name")
        return path
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"{type(error).__name__} from the hub"
        raise InputError(
            name, "must be a local folder, or a hub id that is online or cached", reason, "check the name and the network"
        ) from None


def check_positive(raw: Mapping, keys: tuple[str, ...], where) -> None:
    """Raises InputError where a key is there and is not a whole number of 1 or more."""
    for key in keys:
        value = raw.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(where, f"{key} must be a whole number of 1 or more", repr(value), "mend the config")


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(path, "this file must exist", "nothing", "check the folder's name") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(path, "must be UTF-8 JSON", error, "restore the file") from None
    if not isinstance(value, dict):
        raise InputError(path, "must hold a JSON object", type(value).__name__, "restore the file")
    return value


def open_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Tensor name -> memory-mapped array: nothing is read before it is used.

    Raises:
      InputError: the file is missing, truncated, or its header contradicts its size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise InputError(path, f"the header must fit the file of {size} bytes", f"{length} bytes", "fetch it again")
            header = json.loads(file.read(length).decode("utf-8"))
    except FileNotFoundError:
        raise InputError(path, "this file must exist", "nothing", "fetch it, or check the folder's name") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(path, "the header must be UTF-8 JSON", error, "fetch it again") from None
    if not isinstance(header, dict):
        raise InputError(path, "the header must be a JSON object", type(header).__name__, "fetch it again")
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else np.zeros(0, np.uint8)
    return {name: _view(path, data, name, spec) for name, spec in header.items()}


def _view(path: Path, data: np.ndarray, name: str, spec: Mapping) -> np.ndarray:
    try:
        (start, end), shape, kind = map(int, spec["data_offsets"]), tuple(map(int, spec["shape"])), spec["dtype"]
        if min(shape, default=0) < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise InputError(path, f"tensor {name} needs dtype, shape and data_offsets", spec, "fetch it again") from None
    if kind not in DTYPES:
        raise InputError(path, f"the dtype of {name} must be one of {', '.join(DTYPES)}", kind, "convert it first")
    dtype = np.dtype(DTYPES[kind])
    want = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if not 0 <= start <= end <= data.size or end - start != want:
        raise InputError(path, f"{name} {kind} {list(shape)} needs {want} of the {data.size} bytes of data",
                         f"offsets {start}..{end}", "the file is truncated or damaged: fetch it again")  # fmt: skip
    return data[start:end].view(dtype).reshape(shape)


def open_folder(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint folder, one file or shards with an index, lazily."""
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / INDEX
    if single.exists():
        return open_safetensors(single)
    if not index.exists():
        if pickles := [p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth"}]:
            raise InputError(folder, "weights must be safetensors (pickles can run code)", pickles[0], "convert it with safetensors")
        raise InputError(folder, f"must hold model.safetensors or {INDEX}", "neither", "check the folder's name")
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise InputError(index, "weight_map must name the shard of each tensor", type(where).__name__, "restore the index")
    if bad := [f for f in set(where.values()) if Path(f).name != f]:
        raise InputError(index, "shards must lie in the folder itself", bad[0], "restore the index")
    shards = {file: open_safetensors(folder / file) for file in sorted(set(where.values()))}
    if lost := [n for n, f in where.items() if n not in shards[f]]:
        raise InputError(folder / where[lost[0]], f"must hold {lost[0]}, as the index says", "nothing", "fetch it again")
    return {name: shards[file][name] for name, file in where.items()}


# ---------------------------------------------------------------- the table


@dataclasses.dataclass(frozen=True)
class Layout:
    """How torch stores a tensor that we store differently; `to_torch(to_jax(t))` is t, bit for bit."""

    name: str
    to_jax: Callable[[np.ndarray], np.ndarray]
    to_torch: Callable[[np.ndarray], np.ndarray]


SAME = Layout("same", lambda t: t, lambda t: t)
LINEAR = Layout("linear", lambda t: t.T, lambda t: t.T)  # torch [out, in] <-> [in, out]
Table = Mapping[str, tuple[str, Layout]]  # checkpoint name -> (our path, layout)


def flat(params: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path -> leaf of a pure dict."""
    for key, value in params.items():
        path = f"{prefix}{key}"
        yield from flat(value, path + ".") if isinstance(value, dict) else [(path, value)]


def nest(flat_params: Mapping[str, Any]) -> Params:
    root: dict = {}
    for path, leaf in flat_params.items():
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        node = root
        for p in parents:
            node = node.setdefault(p, {})
        node[last] = leaf
    return root


def load(make: Callable[[], nnx.Module], config, tensors: Mapping[str, np.ndarray], table: Table, where) -> Model:
    """Fills a model from checkpoint tensors; `make` is only traced for its parameter paths, shapes and dtypes.

    Raises:
      InputError: naming missing, unknown and misshapen tensors at once.
    """
    abstract = nnx.eval_shape(make)
    graph, state = nnx.split(abstract)
    expected = dict(flat(nnx.to_pure_dict(state)))
    if stray := {path for path, _ in table.values()} ^ expected.keys():
        raise AssertionError(f"the table and the model disagree on parameters: {_sample(stray)}")
    missing, unknown = table.keys() - tensors.keys(), tensors.keys() - table.keys()
    filled, misshapen = {}, []
    for name, (path, layout) in table.items():
        if name in missing:
            continue
        array, want = layout.to_jax(tensors[name]), expected[path]
        if array.shape != want.shape:
            misshapen.append(
                f"{name} {list(tensors[name].shape)} where the config says {list(layout.to_torch(np.empty(want.shape)).shape)}"
            )
            continue
        filled[path] = jnp.asarray(array, want.dtype)
    if missing or unknown or misshapen:
        problems = [f"{what} {_sample(names)}" for what, names in
                    (("missing:", missing), ("unknown:", unknown), ("wrong shape:", misshapen)) if names]  # fmt: skip
        raise InputError(where, "the tensors must fit config.json", "; ".join(problems), "take weights and config from one checkpoint")
    return Model(config, graph, nest(filled))


def export(params: Params, table: Table) -> dict[str, np.ndarray]:
    """The inverse of `load`: checkpoint name -> tensor in torch layout."""
    leaves = dict(flat(params))
    return {name: np.ascontiguousarray(layout.to_torch(np.asarray(leaves[path]))) for name, (path, layout) in table.items()}


def _sample(names, limit: int = 4) -> str:
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# ---------------------------------------------------------------- writing


def new_folder(path: Path) -> "FolderWriter":
    """A folder that appears whole or not at all: written beside its place, renamed at the end."""
    return FolderWriter(Path(path))


class FolderWriter:
    """Context manager: yields a temporary folder; on success it takes the place of `path`, on failure nothing is left.

    An existing folder is replaced only if it holds nothing but what these writers write.
    """

    def __init__(self, path: Path):
        self.path = path.resolve()

    def __enter__(self) -> Path:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_dir():
                raise InputError(self.path, "the output must be a folder", "a file", "choose another name")
            if foreign := [p.name for p in self.path.glob("*") if not p.name.startswith(OURS)]:
                raise InputError(self.path, "only a checkpoint folder is replaced", f"one that holds {foreign[0]}", "choose another name")
            if (self.path / "README.md").exists() and not (self.path / "config.json").exists():
                raise InputError(self.path, "only a checkpoint folder is replaced", "one without config.json", "choose another name")
            self.work = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        except OSError as error:
            raise InputError(self.path, "the output folder must be writable", error.strerror, "choose another place") from None
        self.work.chmod(0o755)
        return self.work

    def __exit__(self, kind, error, trace):
        if kind is not None:
            shutil.rmtree(self.work, ignore_errors=True)
            return
        old = None
        if self.path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.old.", dir=self.path.parent))
            self.path.rename(old / "was")
        self.work.rename(self.path)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)


def write_folder(
    folder: Path, config: Mapping, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str], max_shard_bytes: int | None = None
) -> None:
    """Writes config.json and the weights into an existing folder: model.safetensors, or shards with an index where that is too large.

    Shards are filled in the order of the names, as transformers and huggingface_hub do; a tensor larger than the limit
    has a file to itself.
    """
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shards: list[dict] = [{}]
    held = HEADER
    for name, tensor in tensors.items():
        if max_shard_bytes is not None and shards[-1] and held + tensor.nbytes + HEADER_LINE > max_shard_bytes:
            shards.append({})
            held = HEADER
        shards[-1][name] = tensor
        held += tensor.nbytes + HEADER_LINE
    metadata = {"format": "pt", **metadata}
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata=metadata)
        (folder / file).chmod(0o644)  # the library leaves it readable by its owner alone
    if len(shards) == 1:
        return
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def cast(tensors: Mapping[str, np.ndarray], dtype) -> dict[str, np.ndarray]:
    """Floating-point tensors in `dtype`; integers and booleans (`d2t`, `t2d`) as they are."""
    floating = lambda t: jax.dtypes.issubdtype(t.dtype, np.floating)  # noqa: E731
    return {name: t.astype(dtype) if floating(t) else t for name, t in tensors.items()}
