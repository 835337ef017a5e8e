"""Checkpoints of one kind into another: folders of draft heads, training runs (Orbax), targets."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax import weights
from peagle_jax.checkpoints import gguf_writing, head_reading, head_writing, runs, target_io
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.checkpoints.pair import check_made_for
from peagle_jax.checkpoints.param_mapping import EMBEDDING, LM_HEAD
from peagle_jax.old_names import CONVERSION_OPTIONS, with_new_names
from peagle_jax.types import InputError
from peagle_jax.weights import Tensor

PIECE = 1 << 24  # bytes of two matrices that are compared at a time
# What numbers may be written as: of float8 a head needs scales, which no format here has.
DTYPES = ("float32", "bfloat16", "float16")
# Options that an output has no use for; given all the same, they are refused.
UNUSED_OPTIONS = {
    "orbax": ("k", "max_shard_bytes", "share_embedding", "identity_d2t"),
    "speculators": ("share_embedding",),
    "gguf": ("k", "max_shard_bytes", "mask_token", "identity_d2t"),
    "hf": (
        "k",
        "target",
        "share_embedding",
        "mask_token",
        "aux_layer_numbering",
        "identity_d2t",
        "drop_markov",
        "drop_confidence",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """The keyword arguments of `convert`, which describes them, checked against each other.

    Raises:
      InputError: an option contradicts `to` or another option, or the output has no use for it.
    """

    to: str
    k: int | None = None
    dtype: str | None = None
    target: str | Path | None = None
    max_shard_bytes: int | None = None
    share_embedding: bool = False
    mask_token: int | None = None
    aux_layer_numbering: str | None = None
    identity_d2t: bool = False
    drop_markov: bool = False
    drop_confidence: bool = False
    command: str | None = None
    on_bytes: Callable[[int, int], None] | None = None

    def __post_init__(self):
        if self.dtype is not None and str(self.dtype) not in DTYPES:
            rule = f"must be one of {', '.join(DTYPES)}"
            raise InputError("--dtype", rule, self.dtype, "use bfloat16")
        for name in UNUSED_OPTIONS.get(self.to, ()):
            value = getattr(self, name)
            if value is not None and value is not False:
                raise InputError(
                    _flag(name),
                    rule=f"--to {self.to} has no use for it",
                    got=value,
                    next_step=f"leave out {_flag(name)}",
                )
        if self.k is not None and self.k < 1:
            raise InputError(
                "-k", "at least one token must be drafted a step", self.k, "use -k 1 or more"
            )
        if self.share_embedding and self.target is None:
            raise InputError(
                "--share-embedding",
                rule="needs the --target whose embedding is shared",
                got="none",
                next_step="give --target, or leave --share-embedding out",
            )


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str,
    k: int | None = None,
    dtype: str | None = None,
    target: str | Path | None = None,
    max_shard_bytes: int | None = None,
    share_embedding: bool = False,
    mask_token: int | None = None,
    aux_layer_numbering: str | None = None,
    identity_d2t: bool = False,
    drop_markov: bool = False,
    drop_confidence: bool = False,
    command: str | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
    **former_names: Any,
) -> None:
    """Converts a checkpoint. `dst` appears whole or not at all.

    From folder to folder, and from a training run to a folder, tensors are read, cast and written
    one after the other, so that a head need not fit into memory. With `to="orbax"` it must. An
    option that the output has no use for is refused, not ignored.

    Args:
      src: a draft head's or a target's folder, a Hugging Face hub id, or a training run.
      dst: the folder to write, or the file with `to="gguf"`.
      to: "vllm", "speculators" or "peagle_jax" (a draft head's folder), "gguf" (a file, with which
        llama.cpp drafts; needs the library gguf), "orbax" (what a training run saves), or "hf" (a
        target's folder).
      k: K, tokens to draft in one step, where the format carries it; None keeps what the source
        says.
      dtype: of the floating-point tensors, for example "bfloat16"; None keeps them.
      target: the target's folder or hub id. It is needed for a head that shares its target's
        embedding or does not name its aux hidden state layers, and by the speculators format,
        which names its target.
      max_shard_bytes: splits safetensors into files of at most so many bytes; None writes one.
      share_embedding: leaves out the head's embedding, which must be the target's (vllm and
        gguf formats).
      mask_token: id of the mask token, for a head whose config does not name it.
      aux_layer_numbering: "input" or "output", what the source's aux hidden state layer ids name
        of a layer; None takes what writers of its format mean.
      identity_d2t: writes an identity `d2t` (and `t2d`) of the source again; vLLM refuses such a
        folder.
      drop_markov: leaves out the Markov head, which vLLM and speculators have no place for; the
        drafts then are other ones (`head_writing.without_markov`).
      drop_confidence: leaves out the confidence head, likewise; the drafts are the same.
      command: the command line, to be recorded with the result.
      on_bytes: called with the bytes written so far and the bytes of all tensors.
      **former_names: options under the names that they had formerly (old_names.py).

    Raises:
      InputError: `src` is no such checkpoint, `dst` cannot express it, or an option contradicts
        `to` or another option.
    """
    if aux_layer_numbering is not None:
        former_names["aux_layer_numbering"] = aux_layer_numbering
    given = ConversionOptions(
        to=to,
        k=k,
        dtype=dtype,
        target=target,
        max_shard_bytes=max_shard_bytes,
        share_embedding=share_embedding,
        mask_token=mask_token,
        identity_d2t=identity_d2t,
        drop_markov=drop_markov,
        drop_confidence=drop_confidence,
        command=command,
        on_bytes=on_bytes,
        **with_new_names(former_names, CONVERSION_OPTIONS, "convert"),
    )
    folder, dst = weights.find_folder(src), Path(dst)
    if folder.resolve() == dst.resolve():
        raise InputError(
            dst, "the output must be another folder than the input", src, "choose another name"
        )
    metadata = {"command": given.command} if given.command else {}
    if given.target is not None and (revision := weights.split_revision(str(given.target))[1]):
        metadata["target_revision"] = revision
    if to == "hf":
        target_io.convert_folder(
            folder,
            dst,
            dtype=given.dtype,
            metadata=metadata | {"source": head_reading.short_name(src)},
            max_shard_bytes=given.max_shard_bytes,
            on_bytes=given.on_bytes,
        )
        return
    head = _open(src, folder, given)
    if head.config.predicts_features and to != "orbax" and not runs.is_run(folder):
        _check_shares_with_target(src, head, given.target)
    if given.drop_confidence:
        head = head_writing.without_confidence(head)
    if given.drop_markov:
        head = head_writing.without_markov(head)
    if to == "orbax":
        _write_run(src, head, dst, given)
        return
    if to == "speculators" and head.shares_embedding and given.target is not None:
        head = _with_target_embedding(head, given)
    if given.share_embedding:
        assert given.target is not None  # ConversionOptions refuses it otherwise
        _check_embedding_is_targets(src, head, given.target)
    if to == "gguf":
        gguf_writing.write_gguf(
            head,
            dst,
            dtype=given.dtype,
            metadata=metadata,
            own_embedding=not given.share_embedding,
            on_bytes=given.on_bytes,
        )
        return
    head_writing.write_head(
        head,
        dst,
        checkpoint_format=to,
        dtype=given.dtype,
        k=given.k,
        metadata=metadata,
        max_shard_bytes=given.max_shard_bytes,
        own_embedding=not given.share_embedding,
        identity_d2t=given.identity_d2t,
        on_bytes=given.on_bytes,
    )


def read_serving(path: str | Path, target_layers: int | None = None) -> HeadState:
    """Opens a head's folder to be served by another engine; weights are not read.

    Args:
      path: the folder, or a hub id.
      target_layers: of the target, for a head that does not name its aux hidden state layers.

    Raises:
      InputError: it is a training run or a target, or damaged.
    """
    folder = weights.find_folder(path)
    if runs.is_run(folder):
        raise InputError(
            folder,
            rule="must be a draft head's folder",
            got="a training run",
            next_step="convert the run first: peagle convert --to vllm",
        )
    return runs.open_head(path, target_layers)


def _flag(option: str) -> str:
    """The command line's name of an option, which errors speak of."""
    if option == "k":
        return "-k"
    if option == "max_shard_bytes":
        return "--max-shard-size"
    return "--" + option.replace("_", "-")


def _open(src: str | Path, folder: Path, options: ConversionOptions) -> HeadState:
    """The head in `src`, with its target's name, where a target was given."""
    target = None if options.target is None else target_io.read_facts(options.target)
    if runs.is_run(folder):
        for name in ("mask_token", "aux_layer_numbering"):
            if (value := getattr(options, name)) is not None:
                raise InputError(
                    _flag(name),
                    rule="a training run says it itself",
                    got=value,
                    next_step=f"leave out {_flag(name)}",
                )
        head = runs.open_run(folder)
    else:
        head = head_reading.read_head(
            src,
            target_layers=None if target is None else target.layers,
            mask_token=options.mask_token,
            aux_layer_numbering=options.aux_layer_numbering,
        )
    if target is None or options.target is None:
        return head
    check_made_for(head.config, target, src)
    # A local folder by its whole path: vLLM looks the target up from wherever it is started.
    if Path(options.target).exists():
        name = str(Path(options.target).resolve())
    else:
        name = weights.split_revision(str(options.target))[0]
    return dataclasses.replace(head, target=name, target_architecture=target.architecture)


def _write_run(src: str | Path, head: HeadState, dst: Path, options: ConversionOptions) -> None:
    """The head as a training run, which holds all tensors in one dtype."""
    if options.dtype is None and (head.quantized or head.has_mixed_dtypes):
        raise InputError(
            src,
            rule="a training run has one dtype",
            got="an FP8 head" if head.quantized else "several dtypes",
            next_step="give --dtype; float32 holds every other exactly",
        )
    embedding = None
    if head.shares_embedding and options.target is not None:
        embedding = target_io.load_embedding(options.target)
    lm_head = None
    if head.shares_lm_head and options.target is not None:
        lm_head = target_io.load_lm_head(options.target)
    model = head_reading.to_model(head, dtype=options.dtype, embedding=embedding, lm_head=lm_head)
    runs.check_room(dst, model.params)
    with weights.new_folder(dst) as work:
        runs.write_run(head, model, work)


def _with_target_embedding(head: HeadState, options: ConversionOptions) -> HeadState:
    """The head with the embedding that it shares, in its own dtype."""
    assert options.target is not None
    dtype = np.dtype(head.config.dtype if options.dtype is None else options.dtype)
    embedding = weights.cast({EMBEDDING: target_io.load_embedding(options.target)}, dtype)
    return dataclasses.replace(head, tensors=embedding | head.tensors)


def _check_embedding_is_targets(src: str | Path, head: HeadState, target: str | Path) -> None:
    """Raises InputError unless the head's embedding equals the target's, in the head's dtype."""
    if head.shares_embedding:
        return
    if not _is_equal(head.tensors[EMBEDDING], target_io.load_embedding(target)):
        raise InputError(
            src,
            rule="--share-embedding needs a head whose embedding is the target's",
            got="one trained further",
            next_step="leave out --share-embedding",
        )


def _check_shares_with_target(src: str | Path, head: HeadState, target: str | Path | None) -> None:
    """Raises InputError unless what an EAGLE-1 head stores beside its layers is the target's.

    Written folders have neither matrix. vLLM reads a head's own embedding where it has one.
    """
    loads = {EMBEDDING: target_io.load_embedding, LM_HEAD: target_io.load_lm_head}
    for name in loads.keys() & head.tensors.keys():
        rule = f"an EAGLE-1 head is written without {name}, which must be its target's"
        if target is None:
            raise InputError(src, rule, "one that was not compared", "give --target")
        if not _is_equal(head.tensors[name], loads[name](target)):
            raise InputError(src, rule, "another one", "let vLLM serve the folder as it is")


def _is_equal(tensor: Tensor, targets: Tensor) -> bool:
    """Whether a matrix is the target's in its own dtype; compared in pieces."""
    if tensor.shape != targets.shape:
        return False
    own, other = np.asarray(tensor), np.asarray(targets)
    rows = max(1, PIECE // max(1, own[:1].nbytes))
    pieces = (slice(i, i + rows) for i in range(0, len(own), rows))
    return all(np.array_equal(own[piece], other[piece].astype(own.dtype)) for piece in pieces)
