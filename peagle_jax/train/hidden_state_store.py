"""Stored hidden states: those of a target on a corpus, in shards of memory-mapped safetensors.

pipelines/extract.py fills such a folder, and training reads it instead of running the target.
"""

import dataclasses
import json
import math
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from peagle_jax import weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.old_names import HIDDEN_STATE_INDEX_KEYS, HIDDEN_STATE_TENSORS, with_new_names
from peagle_jax.train.data import PackedRows
from peagle_jax.train.settings import build, check
from peagle_jax.types import Batch, InputError

INDEX, FORMAT_VERSION = "index.json", 2
INDEX_AGAIN = f"copy {INDEX} from a backup, or extract again into another folder"
DTYPES = ("float32", "bfloat16", "float16")
HEADER_BYTES = 4096  # the most that a shard has beside its numbers
ROW_TENSORS = ("tokens", "segment_ids", "loss_mask")

# name -> shape and dtype
TensorSpecs = dict[str, tuple[tuple[int, ...], np.dtype]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStateIndex:
    """index.json: what the shards of a folder contain, and of which target and corpus.

    Only `versions` and `command` may change while a folder is filled.
    """

    format_version: int
    target: str
    # SHA-256, 16 digits, of config.json and the first bytes of every tensor: tells apart
    # checkpoints of one name.
    target_hash: str
    aux_hidden_state_layers: tuple[int, ...]  # id i is the input of layer i, as in vLLM
    aux_width: int  # A
    hidden_width: int  # E
    dtype: str  # of the stored numbers
    compute_dtype: str  # of weights and products' operands when they were computed
    seq_len: int  # T, tokens of a row, padding included
    batch_size: int  # rows of a forward
    rows_per_shard: int  # the last shard may have fewer
    data: str  # the corpus' name, without its folder
    max_chars: int | None
    held_out: float  # share of documents, by name, that were left out
    seed: int
    rows: int
    shards: int
    tokens: int  # without padding
    num_loss_tokens: int  # tokens that a loss may read
    rows_hash: str  # SHA-256, 16 digits, of all tokens, segment ids and loss masks
    versions: str
    command: str

    def __post_init__(self) -> None:
        layers = list(self.aux_hidden_state_layers)
        check(bool(layers), "aux_hidden_state_layers", "must name a layer", layers, INDEX_AGAIN)
        for key in ("hidden_width", "seq_len", "batch_size", "rows_per_shard", "rows"):
            size = getattr(self, key)
            check(size >= 1, key, "must be 1 or more", size, INDEX_AGAIN)
        for key in ("dtype", "compute_dtype"):
            dtype = getattr(self, key)
            check(dtype in DTYPES, key, f"must be one of {', '.join(DTYPES)}", dtype, INDEX_AGAIN)
        shards, width = -(-self.rows // self.rows_per_shard), len(layers) * self.hidden_width
        rule = f"must follow from rows and rows_per_shard: {shards}"
        check(self.shards == shards, "shards", rule, self.shards, INDEX_AGAIN)
        rule = f"must follow from the layers and hidden_width: {width}"
        check(self.aux_width == width, "aux_width", rule, self.aux_width, INDEX_AGAIN)

    def rows_of(self, shard: int) -> range:
        """The numbers of the rows in a shard."""
        begin = shard * self.rows_per_shard
        return range(begin, min(begin + self.rows_per_shard, self.rows))

    def tensors_of(self, shard: int) -> TensorSpecs:
        """Name -> shape [n T ..] and dtype of the tensors in a shard of n rows."""
        n, T, stored = len(self.rows_of(shard)), self.seq_len, jnp.dtype(self.dtype)
        return {
            "tokens": ((n, T), np.dtype(np.int32)),
            "segment_ids": ((n, T), np.dtype(np.int32)),
            "loss_mask": ((n, T), np.dtype(bool)),
            "aux_hidden_states": ((n, T, self.aux_width), stored),
            "hidden": ((n, T, self.hidden_width), stored),
        }

    def bytes_of(self, shard: int) -> int:
        """The most bytes that the file of a shard can have."""
        specs = self.tensors_of(shard).values()
        return HEADER_BYTES + sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HiddenStates:
    """Packed rows and the target's hidden states of them; zero on padding."""

    batch: Batch
    aux_hidden_states: Float[np.ndarray | jax.Array, "B T A"]
    hidden: Float[np.ndarray | jax.Array, "B T E"]  # after the final norm: compute_logits' input


@dataclasses.dataclass(frozen=True)
class HiddenStateFolder:
    """A complete folder of `peagle extract`.

    Shards are mapped only while a batch is copied from them, so thousands of them need no file
    handles.
    """

    path: Path
    index: HiddenStateIndex

    def __len__(self) -> int:
        return self.index.rows

    def batch(self, indices: Iterable[SupportsIndex]) -> HiddenStates:
        """Reads rows by their numbers, in that order and in the stored dtype, and no other rows.

        Raises:
          InputError: no number is given, or one that no row has; or a shard is missing, or is not
            what index.json says.
        """
        rows = [operator.index(i) for i in indices]
        if not rows or not 0 <= min(rows) <= max(rows) < len(self):
            rule = f"a batch is one or more rows of 0..{len(self) - 1}"
            raise InputError(self.path, rule, rows, f"ask for rows below {len(self)}")
        places = [divmod(row, self.index.rows_per_shard) for row in rows]
        numbers = {shard for shard, _ in places}
        shards = {shard: open_shard(self.path, self.index, shard) for shard in numbers}

        def take(name: str) -> np.ndarray:
            return np.stack([shards[shard][name][row] for shard, row in places])

        batch = Batch(take("tokens"), take("segment_ids"), take("loss_mask"))
        return HiddenStates(batch, take("aux_hidden_states"), take("hidden"))


def open_hidden_states(path: str | Path) -> HiddenStateFolder:
    """Opens a complete folder of `peagle extract`.

    The headers of all shards are checked here; numbers are read by `HiddenStateFolder.batch`.

    Raises:
      InputError: the index or a shard is missing or damaged, or a shard has other shapes than the
        index says.
    """
    folder = Path(path)
    index = read_index(folder)
    for shard in range(index.shards):
        open_shard(folder, index, shard)
    return HiddenStateFolder(folder, index)


def read_index(folder: Path) -> HiddenStateIndex:
    """Reads index.json of a folder, complete or not.

    Version 1 has the same numbers under former names, and is read too.

    Raises:
      InputError: it is missing or damaged, or of another version.
    """
    where = folder / INDEX
    raw = weights.read_json(where, INDEX_AGAIN)
    if raw.get("format_version") == 1:
        raw = with_new_names(raw, HIDDEN_STATE_INDEX_KEYS, str(where))
        raw["format_version"] = FORMAT_VERSION
    if raw.get("format_version") != FORMAT_VERSION:
        rule = f"must be the index of `peagle extract`, format_version {FORMAT_VERSION}"
        next_step = "extract again, or read it with the version of peagle_jax that wrote it"
        raise InputError(where, rule, raw.get("format_version"), next_step)
    try:
        return build(HiddenStateIndex, raw, str(where))
    except InputError as error:  # nobody writes this file by hand, as `build` advises
        raise InputError(error.where, error.rule, error.got, INDEX_AGAIN) from None


def write_index(folder: Path, index: HiddenStateIndex) -> None:
    """Writes index.json. An OSError is the caller's to explain."""
    write_atomically(folder / INDEX, json.dumps(dataclasses.asdict(index), indent=2) + "\n")


def shard_path(folder: Path, shard: int) -> Path:
    """The file of a shard."""
    return folder / f"shard-{shard:05}.safetensors"


def open_shard(folder: Path, index: HiddenStateIndex, shard: int) -> dict[str, np.ndarray]:
    """Maps the tensors of a shard, by name, after checking their shapes and dtypes.

    Raises:
      InputError: the shard is missing or damaged, or not what the index says.
    """
    path = shard_path(folder, shard)
    if not path.exists():
        rule = f"shard {shard + 1} of {index.shards} must be there"
        next_step = "run the command of index.json again: it goes on where it stopped"
        raise InputError(path, rule, "nothing", next_step)
    tensors = with_new_names(weights.open_safetensors(path), HIDDEN_STATE_TENSORS, str(path))
    actual = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    expected = index.tensors_of(shard)
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            rule = f"{name} must be {_shown(expected.get(name))}, as {INDEX} says"
            got = _shown(actual.get(name))
            raise InputError(path, rule, got, "delete it and extract again")
    return tensors


def _shown(spec: tuple[tuple[int, ...], np.dtype] | None) -> str:
    if spec is None:
        return "nothing"
    shape, dtype = spec
    return f"{dtype.name} {list(shape)}"


def is_complete(folder: Path, index: HiddenStateIndex, shard: int, rows: PackedRows) -> bool:
    """Whether a shard is there. If it is, it must contain these rows.

    Of its hidden states only the shapes are checked.

    Raises:
      InputError: it is damaged, or of another corpus.
    """
    path, numbers = shard_path(folder, shard), index.rows_of(shard)
    if not path.exists():
        return False
    next_step = "delete it and run this again"
    try:
        tensors = open_shard(folder, index, shard)
    except InputError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise InputError(path, "a shard must be complete", reason, next_step) from None
    for name in ROW_TENSORS:
        if not np.array_equal(tensors[name], getattr(rows, name)[numbers.start : numbers.stop]):
            rule = f"must contain the rows that {INDEX} names"
            raise InputError(path, rule, f"other {name}", next_step)
    return True


def write_shard(
    folder: Path, index: HiddenStateIndex, shard: int, tensors: Mapping[str, np.ndarray]
) -> None:
    """Writes a shard under a temporary name, and renames it when the disk has it.

    A shard under its own name is therefore always complete. An OSError is the caller's to explain.
    """
    metadata = {
        "writer": index.versions,
        "target": index.target,
        "aux_hidden_state_layers": ",".join(map(str, index.aux_hidden_state_layers)),
        "rows_hash": index.rows_hash,
        "shard": f"{shard + 1} of {index.shards}",
    }
    path = shard_path(folder, shard)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        weights.write_safetensors(temporary, tensors, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
