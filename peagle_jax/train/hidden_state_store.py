"""Stored hidden states: those of a target on a corpus, in shards of memory-mapped safetensors.

pipelines/extract.py fills such a folder, and training reads it instead of running the target.
"""

import dataclasses
import json
import math
import operator
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from peagle_jax import weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.old_names import HIDDEN_STATE_INDEX_KEYS, HIDDEN_STATE_TENSORS, with_new_names
from peagle_jax.train.data import PackedRows
from peagle_jax.train.settings import build, check
from peagle_jax.types import Batch, InputError

INDEX, FORMAT_VERSION = "index.json", 3
OLD_VERSIONS = (1, 2)  # without checksums; version 1 has former names as well
INDEX_AGAIN = f"copy {INDEX} from a backup, or extract again into another folder"
FP8 = "float8_e4m3fn"
DTYPES = ("float32", "bfloat16", "float16", FP8)
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
    packing: str = "cut"  # how documents became rows; folders of former versions do not say

    def __post_init__(self) -> None:
        layers = list(self.aux_hidden_state_layers)
        check(bool(layers), "aux_hidden_state_layers", "must name a layer", layers, INDEX_AGAIN)
        for key in ("hidden_width", "seq_len", "batch_size", "rows_per_shard", "rows"):
            size = getattr(self, key)
            check(size >= 1, key, "must be 1 or more", size, INDEX_AGAIN)
        for key, known in (("dtype", DTYPES), ("compute_dtype", DTYPES[:3])):
            dtype = getattr(self, key)
            check(dtype in known, key, f"must be one of {', '.join(known)}", dtype, INDEX_AGAIN)
        shards, width = -(-self.rows // self.rows_per_shard), len(layers) * self.hidden_width
        rule = f"must follow from rows and rows_per_shard: {shards}"
        check(self.shards == shards, "shards", rule, self.shards, INDEX_AGAIN)
        rule = f"must follow from the layers and hidden_width: {width}"
        check(self.aux_width == width, "aux_width", rule, self.aux_width, INDEX_AGAIN)

    @property
    def has_checksums(self) -> bool:
        """Whether the rows of shards have checksums."""
        return self.format_version not in OLD_VERSIONS

    def rows_of(self, shard: int) -> range:
        """The numbers of the rows in a shard."""
        begin = shard * self.rows_per_shard
        return range(begin, min(begin + self.rows_per_shard, self.rows))

    def tensors_of(self, shard: int) -> TensorSpecs:
        """Name -> shape [n T ..] and dtype of the tensors in a shard of n rows."""
        n, T, stored = len(self.rows_of(shard)), self.seq_len, jnp.dtype(self.dtype)
        specs: TensorSpecs = {
            "tokens": ((n, T), np.dtype(np.int32)),
            "segment_ids": ((n, T), np.dtype(np.int32)),
            "loss_mask": ((n, T), np.dtype(bool)),
            "aux_hidden_states": ((n, T, self.aux_width), stored),
            "hidden": ((n, T, self.hidden_width), stored),
        }
        if self.dtype == FP8:
            layers = len(self.aux_hidden_state_layers)
            specs["aux_scales"] = ((n, T, layers), np.dtype(np.float32))
            specs["hidden_scales"] = ((n, T, 1), np.dtype(np.float32))
        if self.has_checksums:
            specs["checksums"] = ((n,), np.dtype(np.uint32))  # CRC-32 of `row_checksum`
        return specs

    def bytes_of(self, shard: int) -> int:
        """The most bytes that the file of a shard can have."""
        specs = self.tensors_of(shard).values()
        return HEADER_BYTES + sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HiddenStates:
    """Packed rows and the target's hidden states of them; zero on padding.

    Attributes:
      batch: the rows.
      aux_hidden_states: of `layers` layers, side by side.
      hidden: after the final norm, compute_logits' input.
      aux_scales: by which `decoded` multiplies FP8 numbers, of every token and layer; else None.
      hidden_scales: likewise, of every token.
    """

    batch: Batch
    aux_hidden_states: Float[np.ndarray | jax.Array, "B T A"]
    hidden: Float[np.ndarray | jax.Array, "B T E"]
    aux_scales: Float[np.ndarray | jax.Array, "B T layers"] | None = None
    hidden_scales: Float[np.ndarray | jax.Array, "B T 1"] | None = None


@dataclasses.dataclass(frozen=True)
class HiddenStateFolder:
    """A complete folder of `peagle extract`.

    Shards are mapped only while a batch is copied from them, so thousands of them need no file
    handles. A row's checksum is compared when it is read for the first time.
    """

    path: Path
    index: HiddenStateIndex
    checked_rows: set[int] = dataclasses.field(default_factory=set, repr=False, compare=False)

    def __len__(self) -> int:
        return self.index.rows

    def batch(self, indices: Iterable[SupportsIndex]) -> HiddenStates:
        """Reads rows by their numbers, in that order and in the stored dtype, and no other rows.

        Raises:
          InputError: no number is given, or one that no row has; or a shard is missing, is not
            what index.json says, or has bytes that changed since it was written.
        """
        rows = [operator.index(i) for i in indices]
        if not rows or not 0 <= min(rows) <= max(rows) < len(self):
            rule = f"a batch is one or more rows of 0..{len(self) - 1}"
            raise InputError(self.path, rule, rows, f"ask for rows below {len(self)}")
        places = [divmod(row, self.index.rows_per_shard) for row in rows]
        numbers = {shard for shard, _ in places}
        shards = {shard: open_shard(self.path, self.index, shard) for shard in numbers}

        tensors = {
            name: np.stack([shards[shard][name][row] for shard, row in places])
            for name in self.index.tensors_of(places[0][0])
        }
        checksums = tensors.pop("checksums", None)
        if checksums is not None:
            for i, row in enumerate(rows):
                self._check_row(row, {name: x[i] for name, x in tensors.items()}, int(checksums[i]))
        batch = Batch(*(tensors.pop(name) for name in ROW_TENSORS))
        return HiddenStates(batch, **tensors)

    def _check_row(self, row: int, tensors: Mapping[str, np.ndarray], expected: int) -> None:
        """Raises InputError if a row has other bytes than were written; asked once for each row."""
        if row in self.checked_rows:
            return
        if (actual := row_checksum(tensors)) != expected:
            shard = row // self.index.rows_per_shard
            rule = f"row {row} must have the checksum {expected:08x} with which it was written"
            next_step = "the file is damaged: delete it, and extract again"
            raise InputError(shard_path(self.path, shard), rule, f"{actual:08x}", next_step)
        self.checked_rows.add(row)


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

    Version 1 has the same numbers under former names, and is read too; version 2 has no checksums.

    Raises:
      InputError: it is missing or damaged, or of another version.
    """
    where = folder / INDEX
    raw = weights.read_json(where, INDEX_AGAIN)
    if raw.get("format_version") == 1:
        raw = with_new_names(raw, HIDDEN_STATE_INDEX_KEYS, str(where))
        raw["format_version"] = 2
    if raw.get("format_version") not in (2, FORMAT_VERSION):
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


def row_checksum(tensors: Mapping[str, np.ndarray]) -> int:
    """CRC-32 of all numbers of a row, tensor by tensor in the order of their names."""
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(np.ascontiguousarray(tensors[name]).tobytes(), checksum)
    return checksum


def to_fp8(
    x: Float[jax.Array, "B T W"], parts: int
) -> tuple[Float[jax.Array, "B T W"], Float[jax.Array, "B T parts"]]:
    """Numbers in FP8 and their scales, one for each of `parts` equal parts of a token's numbers.

    The largest number of a part becomes FP8's largest, 448: residual streams differ by layer and
    have tokens with very large numbers (arXiv:2402.17762).
    """
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], parts, -1)
    largest = jnp.max(jnp.abs(grouped), axis=-1)
    scales = jnp.where(largest > 0, largest / float(jnp.finfo(FP8).max), 1)
    return (grouped / scales[..., None]).astype(FP8).reshape(x.shape), scales


def decoded(
    x: Float[jax.Array | np.ndarray, "B T W"],
    scales: Float[jax.Array | np.ndarray, "B T parts"] | None,
    dtype: DTypeLike,
) -> Float[jax.Array, "B T W"]:
    """Stored numbers in the dtype of a model; of FP8 ones times their scales."""
    x = jnp.asarray(x)
    if scales is None:
        return x.astype(dtype)
    grouped = x.astype(jnp.float32).reshape(*scales.shape, -1)
    return (grouped * jnp.asarray(scales)[..., None]).reshape(x.shape).astype(dtype)


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
    batch = rows.take(numbers)
    for name in ROW_TENSORS:
        if not np.array_equal(tensors[name], getattr(batch, name)):
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
    if index.has_checksums:
        rows = range(len(index.rows_of(shard)))
        sums = [row_checksum({name: x[row] for name, x in tensors.items()}) for row in rows]
        tensors = {**tensors, "checksums": np.array(sums, np.uint32)}
    path = shard_path(folder, shard)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        weights.write_safetensors(temporary, tensors, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
