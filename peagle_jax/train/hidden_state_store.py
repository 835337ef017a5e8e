"""Features on disk: taps and final hidden states of a corpus, in shards that are read where they lie. pipelines/extract.py fills them."""

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
from peagle_jax.old_names import (
    HIDDEN_STATE_INDEX_KEYS,
    HIDDEN_STATE_TENSORS,
    with_new_names,
)
from peagle_jax.train.config import build
from peagle_jax.train.data import PackedRows
from peagle_jax.types import Batch, InputError

INDEX, FORMAT = "index.json", 2
DTYPES = ("float32", "bfloat16", "float16")
HEADER = 4096  # bytes of a shard beside its numbers, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStateIndex:
    """index.json: what the shards of a folder hold, and of what. Only `versions` and `command` may change while it is filled."""

    format_version: int
    target: str
    target_hash: str  # SHA-256, 16 digits, of config.json and the first bytes of every tensor: tells checkpoints of one name apart
    aux_hidden_state_layers: tuple[
        int, ...
    ]  # hidden states, vLLM's numbering: id i is the input of layer i
    aux_width: int  # A
    hidden_width: int  # D
    dtype: str  # of the numbers stored
    compute_dtype: str  # of weights and activations while they were computed
    seq_len: int  # T, tokens a row, padding included
    batch_size: int  # rows a forward
    rows_per_shard: int  # the last shard may have fewer
    data: str  # the corpus' name, without the folder it lies in
    max_chars: int | None
    held_out: float  # share of documents, by name, that is not here
    seed: int
    rows: int
    shards: int
    tokens: int  # without padding
    num_loss_tokens: int  # tokens that a loss may read
    rows_hash: str  # SHA-256, 16 digits, of all tokens, document numbers and supervision flags
    versions: str
    command: str

    def __post_init__(self):
        sizes = (
            len(self.aux_hidden_state_layers),
            self.hidden_width,
            self.seq_len,
            self.batch_size,
            self.rows_per_shard,
            self.rows,
        )
        if min(sizes) < 1 or {self.dtype, self.compute_dtype} - set(DTYPES):
            raise ValueError(
                f"sizes must be 1 or more, dtypes of {', '.join(DTYPES)}; got {sizes}, {self.dtype}, {self.compute_dtype}"
            )
        if (
            self.shards != -(-self.rows // self.rows_per_shard)
            or self.aux_width != len(self.aux_hidden_state_layers) * self.hidden_width
        ):
            raise ValueError(
                f"shards and aux_width must follow from the rest; got {self.shards} and {self.aux_width}"
            )

    def rows_of(self, shard: int) -> range:
        return range(shard * self.rows_per_shard, min((shard + 1) * self.rows_per_shard, self.rows))

    def tensors_of(self, shard: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Name -> shape [n T ...] and dtype of what a shard holds."""
        n, T, kept = len(self.rows_of(shard)), self.seq_len, jnp.dtype(self.dtype)
        return {
            "tokens": ((n, T), np.dtype(np.int32)),
            "segment_ids": ((n, T), np.dtype(np.int32)),
            "loss_mask": ((n, T), np.dtype(bool)),
            "aux_hidden_states": ((n, T, self.aux_width), kept),
            "hidden": ((n, T, self.hidden_width), kept),
        }

    def bytes_of(self, shard: int) -> int:
        """Of its file, at most."""
        return HEADER + sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors_of(shard).values()
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HiddenStates:
    """Packed rows and what a target makes of them: `train.features.extract`, stored. Zero where `batch.document` is -1."""

    batch: Batch
    aux_hidden_states: Float[np.ndarray | jax.Array, "B T A"]
    hidden: Float[np.ndarray | jax.Array, "B T D"]  # after the final norm: what `unembed` reads


@dataclasses.dataclass(frozen=True)
class HiddenStateFolder:
    """A finished folder of `peagle extract`. Shards are mapped for as long as a batch is copied out, so thousands cost no file handles."""

    path: Path
    config: HiddenStateIndex

    def __len__(self) -> int:
        return self.config.rows

    def batch(self, indices: Iterable[SupportsIndex]) -> HiddenStates:
        """Rows by number, in that order, in the stored dtype; no other row is read.

        Raises:
          InputError: no row, or one that is not there; or its shard is gone, or not what index.json says.
        """
        wanted = [operator.index(i) for i in indices]
        if not wanted or not 0 <= min(wanted) <= max(wanted) < len(self):
            raise InputError(
                self.path,
                f"a batch is one or more rows of 0..{len(self) - 1}",
                wanted,
                "choose other rows",
            )
        places = [divmod(i, self.config.rows_per_shard) for i in wanted]
        shards = {
            shard: open_shard(self.path, self.config, shard)
            for shard in {shard for shard, _ in places}
        }

        def take(name):
            return np.stack([shards[shard][name][row] for shard, row in places])

        return HiddenStates(
            Batch(take("tokens"), take("segment_ids"), take("loss_mask")),
            take("aux_hidden_states"),
            take("hidden"),
        )


def open_hidden_states(path: str | Path) -> HiddenStateFolder:
    """What `peagle extract` wrote, once all of it is there; shards are checked by their headers, numbers are read by `batch`.

    Raises:
      InputError: the index or a shard is missing, damaged, or of another shape than the index says.
    """
    folder = Path(path)
    config = read_index(folder)
    for shard in range(config.shards):
        open_shard(folder, config, shard)
    return HiddenStateFolder(folder, config)


def read_index(folder: Path) -> HiddenStateIndex:
    """index.json of a folder, finished or not."""
    where = folder / INDEX
    raw = weights.read_json(where)
    if raw.get("format_version") == 1:  # the same numbers under former names
        raw = with_new_names(raw, HIDDEN_STATE_INDEX_KEYS, str(where)) | {"format_version": FORMAT}
    if raw.get("format_version") != FORMAT:
        rule = f"must be the index of `peagle extract`, format_version {FORMAT}"
        raise InputError(
            where,
            rule,
            raw.get("format_version"),
            "extract again, or read it with the version of peagle_jax that wrote it",
        )
    return build(HiddenStateIndex, raw, str(where))


def write_index(folder: Path, config: HiddenStateIndex) -> None:
    """OSError is the caller's to explain."""
    write_atomically(folder / INDEX, json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05}.safetensors"


def open_shard(folder: Path, config: HiddenStateIndex, shard: int) -> dict[str, np.ndarray]:
    """Tensor name -> memory-mapped array, of shapes and dtypes that the index says."""
    path = shard_path(folder, shard)
    if not path.exists():
        rule = f"shard {shard + 1} of {config.shards} must be there"
        raise InputError(
            path,
            rule,
            "nothing",
            "run the command of index.json again: it goes on where it stopped",
        )
    tensors = weights.open_safetensors(path)
    tensors = with_new_names(tensors, HIDDEN_STATE_TENSORS, str(path))
    said = {name: (t.shape, t.dtype) for name, t in tensors.items()}
    if said != (want := config.tensors_of(shard)):
        odd = min(name for name in said.keys() | want.keys() if said.get(name) != want.get(name))

        def what(spec):
            return f"{spec[1].name} {list(spec[0])}" if spec else "nothing"

        raise InputError(
            path,
            f"{odd} must be {what(want.get(odd))}, as {INDEX} says",
            what(said.get(odd)),
            "delete it and extract again",
        )
    return tensors


def is_whole(folder: Path, config: HiddenStateIndex, shard: int, rows: PackedRows) -> bool:
    """Whether a shard is there; one that is there must hold these rows. Its features are looked at by their shapes alone.

    Raises:
      InputError: it is damaged, or another corpus'.
    """
    path, where = shard_path(folder, shard), config.rows_of(shard)
    if not path.exists():
        return False
    try:
        held = open_shard(folder, config, shard)
    except InputError as error:
        raise InputError(
            path,
            "a shard must be whole",
            str(error).removeprefix(f"{path}: "),
            "delete it and run this again",
        ) from None
    for name in ("tokens", "segment_ids", "loss_mask"):
        if not np.array_equal(held[name], getattr(rows, name)[where.start : where.stop]):
            raise InputError(
                path,
                f"must hold the rows that {INDEX} names",
                f"other {name}",
                "delete it and run this again",
            )
    return True


def write_shard(
    folder: Path, config: HiddenStateIndex, shard: int, tensors: Mapping[str, np.ndarray]
) -> None:
    """Under a temporary name, renamed once the disk has it: under its own name a shard is never in part.

    OSError is the caller's to explain.
    """
    facts = {
        "writer": config.versions,
        "target": config.target,
        "aux_hidden_state_layers": ",".join(map(str, config.aux_hidden_state_layers)),
        "rows_hash": config.rows_hash,
    }
    path = shard_path(folder, shard)
    work = path.with_name(f".{path.name}.tmp")
    try:
        weights.write_safetensors(
            work, tensors, facts | {"shard": f"{shard + 1} of {config.shards}"}
        )
        with work.open("rb") as file:
            os.fsync(file.fileno())
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
