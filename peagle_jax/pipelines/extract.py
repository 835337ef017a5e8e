"""Taps and final hidden states of a target on a corpus, to disk: a head's inputs, computed once. In shards; resumes by itself."""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax import corpus, text, weights
from peagle_jax.checkpoints.target_io import load_target, target_hash
from peagle_jax.provenance import versions
from peagle_jax.targets import read_config
from peagle_jax.train.data import PackedRows, pack
from peagle_jax.train.hidden_state_store import (
    DTYPES,
    FORMAT,
    INDEX,
    HiddenStateIndex,
    is_whole,
    read_index,
    shard_path,
    write_index,
    write_shard,
)
from peagle_jax.train.hidden_states import compute_hidden_states
from peagle_jax.types import Batch, InputError, Model

LENGTH = 2048  # tokens a row, if the target's context has so many
SHARD = (
    1 << 30
)  # bytes of a shard, at most, if nothing else is asked for: it is held in memory until it is written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extraction:
    """What to compute, and how to store it. The corpus is read as a training run reads it."""

    source: str  # corpus.read_corpus
    aux_hidden_state_layers: (
        tuple[int, ...] | None
    )  # ascending, vLLM's numbering; None: the target's default
    length: int | None  # tokens a row; None: 2048, or the target's context if that is shorter
    batch: int  # rows a forward
    rows_per_shard: int | None  # None: as many batches as make 1 GiB
    dtype: str  # stored
    compute_dtype: str
    max_chars: int | None  # a random choice of documents of about so many characters; None: all
    held_out: float  # share of documents never used
    seed: int  # of the random choice

    def __post_init__(self):
        for key, least in {
            "length": 4,
            "batch": 1,
            "rows_per_shard": 1,
            "max_chars": 1,
            "seed": 0,
        }.items():
            if (value := getattr(self, key)) is not None and value < least:
                raise InputError(
                    f"--{key.replace('_', '-')}", f"must be {least} or more", value, "raise it"
                )
        if not 0 <= self.held_out < 1:
            raise InputError(
                "--held-out", "must lie in 0..1, and below 1", self.held_out, "choose another share"
            )
        if self.dtype not in DTYPES or self.compute_dtype not in DTYPES[:2]:
            rule = f"must be one of {', '.join(DTYPES)}; --compute-dtype one of {', '.join(DTYPES[:2])}"
            raise InputError(
                "--dtype", rule, f"{self.dtype}, {self.compute_dtype}", "choose another"
            )


@dataclasses.dataclass(frozen=True)
class Extracted:
    folder: Path
    rows: int
    tokens: int  # without padding
    supervised_tokens: int
    shards: int
    bytes: int  # on disk, of the whole folder
    tokens_per_second: (
        float | None
    )  # of this session, writing included, compilation not; None if nothing was left to do


OnRows = Callable[
    [int, int, float], None
]  # told of the rows computed, of those to compute in all, and of tokens a second


def extract_hidden_states(
    target: str | Path,
    how: Extraction,
    out: Path,
    say: Callable[[str], None] = print,
    on_rows: OnRows = lambda done, total, speed: None,
    command: str = "peagle_jax.pipelines.extract.extract_features",
) -> Extracted:
    """Fills `out` with index.json and shards of packed rows, taps and final hidden states; computes the shards that are missing.

    Rows are those of training (train.data.pack): documents one after another and kept apart by attention. Positions run on over a
    row, as in training; a rotary embedding reads their differences, so that a document's numbers are those it has alone, up
    to rounding. Every forward has one shape, and a batch never crosses shards, so that a resumed folder equals an uninterrupted
    one bit for bit.

    Args:
      target: folder or hub id, of any family; with its tokenizer.
      say: told what is read, and how many bytes will be written, before that is done.

    Raises:
      InputError: target, corpus and options do not fit each other; or `out` holds something else, or was begun with other
        options; or the disk has too little room, or `how.dtype` too little range.
    """
    began = _begun(out)
    folder = weights.find_folder(target)
    settings, tokenizer = _settings(target, folder, how)
    _check_same(out, began, settings)
    rows = _rows(tokenizer, how, settings["seq_len"], say)
    facts = _facts(rows, settings["rows_per_shard"])
    _check_same(out, began, facts)
    config = HiddenStateIndex(**settings, **facts, versions=versions(), command=command)
    missing = [shard for shard in range(config.shards) if not is_whole(out, config, shard, rows)]
    speed = None
    if missing:
        _check_room(out, config, missing, say)
        model = load_target(
            folder,
            aux_hidden_state_layers=config.aux_hidden_state_layers,
            dtype=jnp.dtype(config.compute_dtype),
        )
        with _claimed(out, config):
            _check_same(
                out, _begun(out), settings | facts
            )  # another process may have begun it since
            speed = _fill(model, rows, config, missing, out, on_rows)
    else:
        say(f"{out}: all {config.shards} shards are there")
    size = sum(
        p.stat().st_size
        for p in [out / INDEX, *(shard_path(out, shard) for shard in range(config.shards))]
    )
    return Extracted(
        out, config.rows, config.tokens, config.num_loss_tokens, config.shards, size, speed
    )


# ---------------------------------------------------------------- what to compute


def _settings(target: str | Path, folder: Path, how: Extraction):
    """(what options and target decide of the index, the tokenizer), before a weight is read."""
    tokenizer = text.load_tokenizer(folder)
    if tokenizer is None:
        raise InputError(
            target,
            "a corpus needs the target's tokenizer",
            "no tokenizer.json",
            "copy it into the target's folder",
        )
    where = folder / "config.json"
    _, config = read_config(
        weights.read_json(where), aux_hidden_state_layers=how.aux_hidden_state_layers, where=where
    )
    text.check_vocabulary(tokenizer, config.vocab, folder)
    aux_hidden_state_layers, length = (
        config.aux_hidden_state_layers,
        how.length or min(LENGTH, config.context),
    )
    if not aux_hidden_state_layers or list(aux_hidden_state_layers) != sorted(
        set(aux_hidden_state_layers)
    ):
        raise InputError(
            "--taps",
            "must ascend, as vLLM collects them",
            list(aux_hidden_state_layers),
            "put them in order",
        )
    if length > config.context:
        raise InputError(
            "--length",
            f"must be at most the target's context of {config.context} tokens",
            length,
            "choose shorter rows",
        )
    width = len(aux_hidden_state_layers) * config.dim
    row = length * (
        9 + (width + config.dim) * jnp.dtype(how.dtype).itemsize
    )  # bytes: two int32 and a bool a token, and the features
    settings = {
        "format_version": FORMAT,
        "target": folder.resolve().name if Path(target).exists() else str(target),
        "target_hash": target_hash(folder),
        "aux_hidden_state_layers": aux_hidden_state_layers,
        "aux_width": width,
        "hidden_width": config.dim,
        "dtype": how.dtype,
        "compute_dtype": how.compute_dtype,
        "seq_len": length,
        "batch_size": how.batch,
        "rows_per_shard": how.rows_per_shard or max(1, SHARD // (row * how.batch)) * how.batch,
        "data": Path(how.source).absolute().name,
        "max_chars": how.max_chars,
        "held_out": how.held_out,
        "seed": how.seed,
    }
    return settings, tokenizer


def _rows(tokenizer, how: Extraction, length: int, say: Callable[[str], None]) -> PackedRows:
    train, held_out = corpus.split(corpus.read_corpus(how.source), how.held_out)
    encoded = text.encode(tokenizer, corpus.limit(train, how.max_chars, how.seed))
    rows = pack(encoded, length, how.source)
    say(
        f"corpus: {len(encoded)} documents, {len(rows)} rows of {length} tokens; {len(held_out)} documents held out"
    )
    return rows


def _facts(rows: PackedRows, rows_per_shard: int) -> dict:
    return {
        "rows": len(rows),
        "shards": -(-len(rows) // rows_per_shard),
        "tokens": int((rows.segment_ids >= 0).sum()),
        "num_loss_tokens": int(rows.loss_mask.sum()),
        "rows_hash": rows.digest(),
    }


# ---------------------------------------------------------------- the folder


def _begun(out: Path) -> HiddenStateIndex | None:
    """The index of a folder that was begun; None where nothing is. What is something else's is left alone."""
    if (out / INDEX).exists():
        return read_index(out)
    home = next(p for p in [out, *out.absolute().parents] if p.exists())
    if not home.is_dir() or not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        raise InputError(
            out,
            "the output folder must be writable",
            f"{home}, which is not",
            "choose another place",
        )
    if home == out and (
        foreign := sorted(p.name for p in out.iterdir() if p.name != f".{INDEX}.tmp")
    ):
        rule = f"must be a new folder, or one that `peagle extract` began: with {INDEX}"
        raise InputError(out, rule, f"{foreign[0]} without it", "choose another folder")
    return None


def _check_same(out: Path, began: HiddenStateIndex | None, said: Mapping) -> None:
    for key, value in said.items() if began is not None else ():
        if (old := getattr(began, key)) != value:
            plain = [list(v) if isinstance(v, tuple) else v for v in (old, value)]
            rule = f"{key} was {plain[0]} when this folder was begun, and must stay so"
            raise InputError(
                out / INDEX,
                rule,
                plain[1],
                "repeat the options and the data it was begun with, or choose another --out",
            )


def _check_room(
    out: Path, config: HiddenStateIndex, missing: Sequence[int], say: Callable[[str], None]
) -> None:
    size = sum(config.bytes_of(shard) for shard in missing)
    free = shutil.disk_usage(next(p for p in [out, *out.absolute().parents] if p.exists())).free
    say(
        f"{out}: {size:,} bytes to write, in {len(missing)} of {config.shards} shards; {free:,} bytes are free"
    )
    if free < size:
        next_step = "make room, choose another disk, or write less (--max-chars, --taps, --dtype)"
        raise InputError(
            out, f"{size:,} bytes must be free to write the features", f"{free:,} bytes", next_step
        )


@contextlib.contextmanager
def _claimed(out: Path, config: HiddenStateIndex) -> Iterator[None]:
    """The folder with its index, and nobody else writing there: two would use the same temporary names, and rename half a shard."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise InputError(
            out, "the output folder must be writable", error.strerror, "choose another place"
        ) from None
    try:
        _lock(handle, out)
        if not (out / INDEX).exists():
            write_index(out, config)
        yield
    except OSError as error:
        next_step = "make room, then run this again: whole shards are kept"
        raise InputError(
            out, "the features must be written to the end", error.strerror or error, next_step
        ) from None
    finally:
        os.close(handle)  # and with it the lock, as when the process is killed


def _lock(handle: int, out: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            out,
            "one process fills a folder at a time",
            "another one at it",
            "wait for it, or choose another --out",
        ) from None
    except OSError:
        pass  # a file system without locks


# ---------------------------------------------------------------- the work


def _fill(
    model: Model,
    rows: PackedRows,
    config: HiddenStateIndex,
    missing: Sequence[int],
    out: Path,
    on_rows: OnRows,
) -> float:
    """Computes and writes the missing shards. Returns tokens a second."""
    forward = _compiled(model, rows, config)
    done, tokens = config.rows - sum(len(config.rows_of(shard)) for shard in missing), 0
    start = time.perf_counter()

    def speed():
        return round(tokens / (time.perf_counter() - start), 1)

    for shard, picks, features in _batches(forward, model, rows, config, missing):
        where = config.rows_of(shard)
        if picks.start == where.start:
            kept = {
                name: np.empty(*config.tensors_of(shard)[name])
                for name in ("aux_hidden_states", "hidden")
            }
        _keep(kept, features, slice(picks.start - where.start, picks.stop - where.start), config)
        if picks.stop == where.stop:
            packed = {
                name: getattr(rows, name)[where.start : where.stop]
                for name in ("tokens", "segment_ids", "loss_mask")
            }
            write_shard(out, config, shard, packed | kept)
        done, tokens = (
            done + len(picks),
            tokens + int((rows.segment_ids[picks.start : picks.stop] >= 0).sum()),
        )
        on_rows(done, config.rows, speed())
    return speed()


def _compiled(model: Model, rows: PackedRows, config: HiddenStateIndex):
    """(params, tokens, document) -> taps, hidden in the stored dtype, zero on padding; and their largest numbers before the cast."""

    def forward(params, tokens, segment_ids):
        real = segment_ids >= 0
        features = [
            jnp.where(real[..., None], x, 0)
            for x in compute_hidden_states(model.bind(params), Batch(tokens, segment_ids, real))
        ]
        largest = jnp.stack([jnp.max(jnp.abs(x)) for x in features]).astype(jnp.float32)
        return *(x.astype(jnp.dtype(config.dtype)) for x in features), largest

    return (
        jax.jit(forward).lower(model.params, *_padded(rows, range(1), config.batch_size)).compile()
    )


def _batches(
    forward, model: Model, rows: PackedRows, config: HiddenStateIndex, missing: Sequence[int]
):
    """(shard, rows, what `forward` gives) in order. The device gets a batch before the host takes, or writes, the one before it."""

    def asked():
        for shard in missing:
            where = config.rows_of(shard)
            for first in range(where.start, where.stop, config.batch_size):
                picks = range(first, min(first + config.batch_size, where.stop))
                yield shard, picks, forward(model.params, *_padded(rows, picks, config.batch_size))

    ahead = asked()
    now = next(ahead)
    for following in ahead:
        yield now
        now = following
    yield now


def _padded(rows: PackedRows, picks: range, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and documents of `size` rows, empty past the last of `picks`: one shape is compiled."""

    def pad(x, fill):
        return np.pad(
            x[picks.start : picks.stop], [(0, size - len(picks)), (0, 0)], constant_values=fill
        )

    return pad(rows.tokens, 0), pad(rows.segment_ids, -1)


def _keep(kept: dict[str, np.ndarray], features, where: slice, config: HiddenStateIndex) -> None:
    """Into the shard's arrays; the rows that fill a batch up are dropped."""
    *arrays, largest = features
    for (name, held), array, most in zip(kept.items(), arrays, np.asarray(largest), strict=True):
        if not most <= float(jnp.finfo(config.dtype).max):  # NaN too
            got = f"{most:.6g} in {name}"
            raise InputError(
                "--dtype",
                f"{config.dtype} must hold every number",
                got,
                "choose bfloat16 or float32; or another target",
            )
        held[where] = np.asarray(array)[: where.stop - where.start]
