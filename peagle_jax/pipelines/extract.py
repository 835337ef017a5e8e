"""Stores a target's hidden states on a corpus, in shards: a head's inputs, computed once.

The same command resumes an interrupted extraction.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from peagle_jax import text, weights
from peagle_jax.chat.apply_template import TEMPLATE_OPTION, check_template_kwargs
from peagle_jax.checkpoints.target_io import load_target, target_hash
from peagle_jax.layers import Decoder
from peagle_jax.pipelines.extraction_folder import (
    check_disk,
    check_unchanged,
    locked_folder,
    read_old_index,
)
from peagle_jax.pipelines.extraction_options import ExtractionOptions
from peagle_jax.pipelines.temporary_folder import temporary_folder
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import versions
from peagle_jax.targets import read_config
from peagle_jax.targets.sharding import mesh_of, parallel_mesh
from peagle_jax.train.corpus_store import CorpusChoice, open_corpus
from peagle_jax.train.data import PackedRows
from peagle_jax.train.hidden_state_store import (
    FORMAT_VERSION,
    FP8,
    INDEX,
    ROW_TENSORS,
    HiddenStateIndex,
    is_complete,
    shard_path,
    to_fp8,
    write_shard,
)
from peagle_jax.train.hidden_states import compute_hidden_states
from peagle_jax.train.mesh import put_rows, unused_devices
from peagle_jax.types import Batch, InputError, Model, Params

DEFAULT_SEQ_LEN = 2048  # if the target's context is as long
SHARD_BYTES = 1 << 30  # at most, by default: a shard is held in memory until it is written

# (params, tokens, segment ids) -> tensors of a shard, and the largest numbers in two of them
Forward = Callable[[Params, np.ndarray, np.ndarray], tuple[dict[str, jax.Array], jax.Array]]


@dataclasses.dataclass(frozen=True)
class ExtractionResult:
    """What a folder of hidden states contains.

    Attributes:
      folder: that was asked for.
      rows: packed rows.
      tokens: without padding.
      num_loss_tokens: tokens that a loss may read.
      shards: files.
      bytes: on disk, of the whole folder.
      tokens_per_second: of this session, with writing and without compilation; None if nothing was
        left to do.
    """

    folder: Path
    rows: int
    tokens: int
    num_loss_tokens: int
    shards: int
    bytes: int
    tokens_per_second: float | None


def extract_hidden_states(
    target: str | Path,
    options: ExtractionOptions,
    out: Path,
    say: Callable[[str], None] = print,
    command: str = "peagle_jax.pipelines.extract.extract_hidden_states",
) -> ExtractionResult:
    """Computes the shards that `out` lacks.

    The rows are those of training: documents one after another, kept apart by attention. Positions
    run on over a row, as in training. Rotary embeddings depend on differences of positions only, so
    that a document gets the numbers that it would get alone, up to rounding. All forwards have one
    shape and no batch crosses shards, so that a resumed folder equals an uninterrupted one bit for
    bit.

    Args:
      target: folder or hub id, of any family, with its tokenizer.
      options: what to compute.
      out: the folder; it gets index.json and the shards.
      say: is told what is read, and how many bytes will be written, before either is done.
      command: that the index names, for whoever resumes.

    Raises:
      InputError: target, corpus and options do not fit each other; `out` contains something else,
        or was begun with other options; the disk has too little room; or a number exceeds
        `options.dtype`.
    """
    old_index = read_old_index(out)
    mesh = parallel_mesh(options.tensor_parallel_size, options.data_parallel_size)
    if unused := unused_devices(mesh, "give --data-parallel-size"):
        say(unused)
    folder = weights.find_folder(target)
    settings, tokenizer = _settings(target, folder, options)
    if old_index is not None:
        settings["format_version"] = old_index.format_version
    check_unchanged(out, old_index, settings)
    # for as long as this process needs it: its numbers come into the shards
    with temporary_folder() as temporary:
        rows = _read_rows(tokenizer, options, settings["seq_len"], temporary / "corpus", say)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            return _extract(folder, mesh, rows, settings, old_index, out, say, command)


def _extract(
    folder: Path,
    mesh: Mesh | None,
    rows: PackedRows,
    settings: dict[str, Any],
    old_index: HiddenStateIndex | None,
    out: Path,
    say: Callable[[str], None],
    command: str,
) -> ExtractionResult:
    """What is left of `extract_hidden_states` when the rows are known."""
    facts = _facts(rows, settings["rows_per_shard"])
    check_unchanged(out, old_index, facts)
    index = HiddenStateIndex(**settings, **facts, versions=versions(), command=command)
    missing = [shard for shard in range(index.shards) if not is_complete(out, index, shard, rows)]
    speed = None
    if missing:
        check_disk(out, index, missing, say)
        model = load_target(
            folder,
            aux_hidden_state_layers=index.aux_hidden_state_layers,
            dtype=jnp.dtype(index.compute_dtype),
            mesh=mesh,
        )
        with locked_folder(out, index):
            # another process may have begun the folder in the meantime
            check_unchanged(out, read_old_index(out), settings | facts)
            speed = _fill(model, rows, index, missing, out)
    else:
        say(f"{out}: all {index.shards} shards are there")
    files = [out / INDEX, *(shard_path(out, shard) for shard in range(index.shards))]
    return ExtractionResult(
        folder=out,
        rows=index.rows,
        tokens=index.tokens,
        num_loss_tokens=index.num_loss_tokens,
        shards=index.shards,
        bytes=sum(path.stat().st_size for path in files),
        tokens_per_second=speed,
    )


# ---------------------------------------------------------------- what to compute


def _settings(
    target: str | Path, folder: Path, options: ExtractionOptions
) -> tuple[dict[str, Any], PreTrainedTokenizerBase]:
    """(the part of the index that options and target decide, the tokenizer)."""
    tokenizer = text.load_tokenizer(folder)
    if tokenizer is None:
        next_step = "copy tokenizer.json into the target's folder"
        rule = "a corpus needs the target's tokenizer"
        raise InputError(target, rule, "no tokenizer.json", next_step)
    if options.chat_template_kwargs:
        check_template_kwargs(tokenizer, options.chat_template_kwargs, TEMPLATE_OPTION)
    where = folder / "config.json"
    _, config = read_config(
        weights.read_json(where),
        aux_hidden_state_layers=options.aux_hidden_state_layers,
        where=where,
    )
    text.check_vocabulary(tokenizer, config.vocab, folder)
    aux_layers = config.aux_hidden_state_layers
    ascending = sorted(set(aux_layers))
    if not aux_layers or list(aux_layers) != ascending:
        option, rule = "--aux-hidden-state-layers", "must ascend, as vLLM collects them"
        next_step = f"write {','.join(map(str, ascending))}" if ascending else "name a layer"
        raise InputError(option, rule, list(aux_layers), next_step)
    seq_len = options.seq_len or min(DEFAULT_SEQ_LEN, config.context)
    if seq_len > config.context:
        rule = f"must be at most the target's context of {config.context} tokens"
        raise InputError("--seq-len", rule, seq_len, f"use --seq-len {config.context}")
    aux_width = len(aux_layers) * config.dim
    # of a token: two int32 and a bool, and the hidden states
    token_bytes = 9 + (aux_width + config.dim) * jnp.dtype(options.dtype).itemsize
    if options.dtype == FP8:
        token_bytes += 4 * (len(aux_layers) + 1)  # scales
    batch_bytes = options.batch_size * seq_len * token_bytes
    batches_per_shard = max(1, SHARD_BYTES // batch_bytes)
    settings = {
        "format_version": FORMAT_VERSION,
        "target": folder.resolve().name if Path(target).exists() else str(target),
        "target_hash": target_hash(folder),
        "aux_hidden_state_layers": aux_layers,
        "aux_width": aux_width,
        "hidden_width": config.dim,
        "dtype": options.dtype,
        "compute_dtype": options.compute_dtype,
        "seq_len": seq_len,
        "packing": options.packing,
        "batch_size": options.batch_size,
        "rows_per_shard": options.rows_per_shard or batches_per_shard * options.batch_size,
        "data": Path(options.source).absolute().name,
        "max_chars": options.max_chars,
        "held_out": options.held_out,
        "seed": options.seed,
    }
    return settings, tokenizer


def _read_rows(
    tokenizer: PreTrainedTokenizerBase,
    options: ExtractionOptions,
    seq_len: int,
    folder: Path,
    say: Callable[[str], None],
) -> PackedRows:
    choice = CorpusChoice(
        options.source,
        options.held_out,
        options.max_chars,
        options.seed,
        options.bad_rows,
        options.chat_template_kwargs,
        options.special_tokens,
        options.split_turns,
    )
    store = open_corpus(folder, choice, tokenizer, say)
    rows = store.pack(seq_len, options.packing)
    say(
        f"corpus: {len(store.order)} documents, {len(rows)} rows of {seq_len} tokens, "
        f"{rows.padding:.2%} of them padding; {len(store.held_out)} documents held out"
    )
    return rows


def _facts(rows: PackedRows, rows_per_shard: int) -> dict[str, Any]:
    """The part of the index that the rows decide."""
    return {
        "rows": len(rows),
        "shards": -(-len(rows) // rows_per_shard),
        "tokens": rows.num_tokens,
        "num_loss_tokens": rows.num_loss_tokens,
        "rows_hash": rows.digest(),
    }


# ---------------------------------------------------------------- the work


def _fill(
    model: Model, rows: PackedRows, index: HiddenStateIndex, missing: Sequence[int], out: Path
) -> float:
    """Computes and writes the missing shards.

    Returns:
      Tokens per second.
    """
    forward = _compile_forward(model, rows, index)
    done = index.rows - sum(len(index.rows_of(shard)) for shard in missing)
    tokens, began = 0, time.perf_counter()

    def speed() -> float:
        return round(tokens / (time.perf_counter() - began), 1)

    tensors: dict[str, np.ndarray] = {}
    with ProgressReport("extract", index.rows, done, "rows") as progress:
        for shard, picks, states in _computed_batches(forward, model, rows, index, missing):
            shard_rows = index.rows_of(shard)
            if picks.start == shard_rows.start:
                specs = index.tensors_of(shard)
                tensors = {
                    name: np.empty(*spec)
                    for name, spec in specs.items()
                    if name not in (*ROW_TENSORS, "checksums")
                }
            begin = picks.start - shard_rows.start
            _store_batch(tensors, states, slice(begin, begin + len(picks)), index)
            if picks.stop == shard_rows.stop:
                batch = rows.take(shard_rows)
                row_tensors = {name: np.asarray(getattr(batch, name)) for name in ROW_TENSORS}
                write_shard(out, index, shard, row_tensors | tensors)
            done += len(picks)
            tokens += int(np.count_nonzero(rows.take(picks).segment_ids >= 0))
            progress.update(done, note=f"{speed():,} tokens per second")
    return speed()


def _compile_forward(model: Model, rows: PackedRows, index: HiddenStateIndex) -> Forward:
    """The target's forward, in the stored dtype and with zeros on padding.

    It gives the tensors of a shard by name, and the largest numbers of aux and final hidden states
    before the conversion to that dtype.
    """

    def forward(params: Params, tokens: jax.Array, segment_ids: jax.Array) -> tuple:
        is_token = segment_ids >= 0
        target = cast(Decoder, model.bind(params))
        states = compute_hidden_states(target, Batch(tokens, segment_ids, is_token))
        states = [jnp.where(is_token[..., None], x, 0) for x in states]
        largest = jnp.stack([jnp.max(jnp.abs(x)) for x in states]).astype(jnp.float32)
        if index.dtype != FP8:
            aux_hidden_states, hidden = (x.astype(jnp.dtype(index.dtype)) for x in states)
            return {"aux_hidden_states": aux_hidden_states, "hidden": hidden}, largest
        aux_hidden_states, aux_scales = to_fp8(states[0], len(index.aux_hidden_state_layers))
        hidden, hidden_scales = to_fp8(states[1], 1)
        scales = {"aux_scales": aux_scales, "hidden_scales": hidden_scales}
        return {"aux_hidden_states": aux_hidden_states, "hidden": hidden} | scales, largest

    example = put_rows(_padded(rows, range(1), index.batch_size), mesh_of(model.params))
    return jax.jit(forward).lower(model.params, *example).compile()


def _computed_batches(
    forward: Forward,
    model: Model,
    rows: PackedRows,
    index: HiddenStateIndex,
    missing: Sequence[int],
) -> Iterator[tuple[int, range, tuple]]:
    """(shard, rows, outputs of `forward`) of each batch, in order.

    The device is given a batch before the host takes and writes the one before it, so that both
    work at the same time.
    """

    mesh = mesh_of(model.params)

    def launch() -> Iterator[tuple[int, range, tuple]]:
        for shard in missing:
            shard_rows = index.rows_of(shard)
            for first in range(shard_rows.start, shard_rows.stop, index.batch_size):
                picks = range(first, min(first + index.batch_size, shard_rows.stop))
                padded = put_rows(_padded(rows, picks, index.batch_size), mesh)
                yield shard, picks, forward(model.params, *padded)

    launched = launch()
    current = next(launched)
    for following in launched:
        yield current
        current = following
    yield current


def _padded(rows: PackedRows, picks: range, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids of `picks`, filled up to `size` rows: only one shape is compiled."""

    def pad(x: np.ndarray, fill: int) -> np.ndarray:
        padding = [(0, size - len(picks)), (0, 0)]
        return np.pad(x, padding, constant_values=fill)

    batch = rows.take(picks)
    return pad(np.asarray(batch.tokens), 0), pad(np.asarray(batch.segment_ids), -1)


def _store_batch(
    tensors: dict[str, np.ndarray], states: tuple, where: slice, index: HiddenStateIndex
) -> None:
    """Copies a batch into the shard's tensors, without the rows that only fill it up."""
    arrays, largest = states
    # numbers in FP8 have scales in float32
    limit = float(jnp.finfo("float32" if index.dtype == FP8 else index.dtype).max)
    for name, number in zip(("aux_hidden_states", "hidden"), np.asarray(largest), strict=True):
        if not number <= limit:  # also true of NaN
            rule, got = f"{index.dtype} must hold every number", f"{number:.6g} in {name}"
            next_step = "use --dtype bfloat16 or float32; NaN means that the target is damaged"
            raise InputError("--dtype", rule, got, next_step)
    for name, array in arrays.items():
        tensors[name][where] = np.asarray(array)[: where.stop - where.start]
