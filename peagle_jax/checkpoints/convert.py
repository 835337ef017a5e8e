"""Checkpoints from one form to another: head folders, training runs (Orbax), targets."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from peagle_jax import weights
from peagle_jax.checkpoints import head_io, runs, target_io
from peagle_jax.checkpoints.head_io import HeadState
from peagle_jax.checkpoints.param_mapping import EMBEDDING
from peagle_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to convert. Every one is refused where it would say nothing.

    Attributes:
      to: "vllm" or "speculators" (a draft-head folder), "orbax" (what a training run saves), "hf" (a target).
      k: tokens to draft a step, where the layout carries it; None keeps what the source says.
      dtype: of the floating tensors; None keeps them.
      target: a folder or hub id: for a head that shares its target's embedding or names no taps, and for speculators' layout,
        which names its target.
      max_shard_bytes: split safetensors into files of at most so many bytes.
      share_embedding: leave out the head's embedding, which must be the target's (vllm layout).
      mask_token: for a head whose config does not name it.
      tap_numbering: of the source's tap ids: "input" or "output" of the layer; None takes what its layout uses.
      identity_d2t: put an identity `d2t` (and `t2d`) of the source back in; vLLM refuses such a folder.
    """

    to: str
    k: int | None = None
    dtype: str | None = None
    target: str | Path | None = None
    max_shard_bytes: int | None = None
    share_embedding: bool = False
    mask_token: int | None = None
    tap_numbering: str | None = None
    identity_d2t: bool = False
    command: str | None = None  # that is recorded with the result
    on_bytes: Callable[[int, int], None] | None = (
        None  # told of the bytes written so far, and of all
    )

    def __post_init__(self):
        unused = {
            "orbax": ("k", "max_shard_bytes", "share_embedding", "identity_d2t"),
            "speculators": ("share_embedding",),
            "hf": ("k", "target", "share_embedding", "mask_token", "tap_numbering", "identity_d2t"),
        }.get(self.to, ())
        flags = {"max_shard_bytes": "--max-shard-size"}
        for name in unused:
            if getattr(self, name) not in (None, False):
                flag = flags.get(name, "--" + name.replace("_", "-"))
                raise InputError(
                    flag, f"--to {self.to} has no use for it", getattr(self, name), "leave it out"
                )
        if self.k is not None and self.k < 1:
            raise InputError(
                "--k", "at least one token must be drafted a step", self.k, "use --k 1 or more"
            )
        if self.share_embedding and self.target is None:
            raise InputError(
                "--share-embedding",
                "needs the --target whose embedding is shared",
                "none",
                "give it, or leave it out",
            )


def convert(src: str | Path, dst: str | Path, *, to: str, **options) -> None:
    """Reads any form, writes another; `dst` appears whole or not at all. The options are those of `Options`.

    From folder to folder, and from a training run to a folder, tensors are read, cast and written one after the other. `--to orbax`
    holds the whole head.

    Raises:
      InputError: `src` is none of the forms, or `dst` cannot express it.
    """
    how = Options(to=to, **options)
    folder, dst = weights.find_folder(src), Path(dst)
    if folder.resolve() == dst.resolve():
        raise InputError(
            dst, "the output must be another folder than the input", src, "choose another name"
        )
    metadata = {"command": how.command} if how.command else {}
    if to == "hf":
        target_io.convert_folder(
            folder,
            dst,
            dtype=how.dtype,
            metadata=metadata | {"source": head_io.short_name(src)},
            max_shard_bytes=how.max_shard_bytes,
            on_bytes=how.on_bytes,
        )
        return
    head = _open(src, folder, how)
    if to == "orbax":
        if how.dtype is None and (head.quantized or head.mixed):
            got = "an FP8 head" if head.quantized else "several dtypes"
            raise InputError(
                src,
                "a training run has one dtype",
                got,
                "give --dtype, as float32, which holds every other exactly",
            )
        embedding = (
            target_io.load_embedding(how.target)
            if head.shares_embedding and how.target is not None
            else None
        )
        model = head_io.to_model(head, dtype=how.dtype, embedding=embedding)
        with weights.new_folder(dst) as work:
            runs.write_run(head, model, work)
        return
    if to == "speculators" and head.shares_embedding and how.target is not None:
        own = target_io.load_embedding(how.target)
        own = weights.cast({EMBEDDING: own}, head.config.dtype if how.dtype is None else how.dtype)
        head = dataclasses.replace(head, tensors=own | head.tensors)
    if how.share_embedding:
        _check_shared(src, head, how.target)
    head_io.write_head(
        head,
        dst,
        checkpoint_format=to,
        dtype=how.dtype,
        k=how.k,
        metadata=metadata,
        max_shard_bytes=how.max_shard_bytes,
        own_embedding=not how.share_embedding,
        identity_d2t=how.identity_d2t,
        on_bytes=how.on_bytes,
    )


def _open(src, folder: Path, how: Options) -> HeadState:
    target = None if how.target is None else target_io.read_facts(how.target)
    if runs.is_run(folder):
        for name in ("mask_token", "tap_numbering"):
            if getattr(how, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise InputError(
                    flag, "a training run says it itself", getattr(how, name), "leave it out"
                )
        head = runs.open_run(folder)
    else:
        head = head_io.read_head(
            src,
            target_layers=target and target.layers,
            mask_token=how.mask_token,
            numbering=how.tap_numbering,
        )
    if target is None:
        return head
    # a local folder by its whole path: vLLM looks the target up from wherever it is started
    name = (
        str(Path(how.target).resolve())
        if Path(how.target).exists()
        else weights.split_revision(str(how.target))[0]
    )
    return dataclasses.replace(head, target=name, target_architecture=target.architecture)


def _check_shared(src, head: HeadState, target) -> None:
    if head.shares_embedding:
        return
    own = head.tensors[EMBEDDING]
    if not np.array_equal(
        np.asarray(own), np.asarray(target_io.load_embedding(target)).astype(own.dtype)
    ):
        raise InputError(
            src,
            "--share-embedding needs a head whose embedding is the target's",
            "one trained further",
            "leave it out",
        )


def read_serving(path: str | Path, target_layers: int | None = None) -> HeadState:
    """A servable head folder, without its weights being read.

    Raises:
      InputError: it is a training run, a target, or damaged.
    """
    folder = weights.find_folder(path)
    if runs.is_run(folder):
        raise InputError(
            folder,
            "must be a draft head's folder",
            "a training run",
            "convert the run first: peagle convert --to vllm",
        )
    return runs.open_head(path, target_layers)
