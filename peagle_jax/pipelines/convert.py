"""Checkpoints from one form to another: head folders, training runs (Orbax), targets."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from peagle_jax import weights
from peagle_jax.draft import folders
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.layers import Rope
from peagle_jax.targets import load_target, save_target
from peagle_jax.train.checkpoint import restore_params
from peagle_jax.types import InputError, Model

HEAD_FILE, FROZEN = "head.json", "frozen"  # beside `checkpoints` in a run's folder


def convert(
    src: Path, dst: Path, *, to: str, k: int | None = None, dtype: str | None = None, target: Path | None = None,
    max_shard_bytes: int | None = None, share_embedding: bool = False,
) -> None:  # fmt: skip
    """Reads any form, writes another; `dst` appears whole or not at all.

    Args:
      to: "vllm" or "speculators" (a draft-head folder), "orbax" (what a training run saves), "hf" (a target).
      k: tokens to draft a step, where the layout carries it.
      dtype: of the floating tensors; None keeps them.
      target: for a head that shares the target's embedding, and for speculators' layout, which names its target.
      max_shard_bytes: split safetensors into files of at most so many bytes.
      share_embedding: leave out the head's embedding, which must be the target's (vllm layout).

    Raises:
      InputError: `src` is none of these, or `dst` cannot express it.
    """
    if Path(src).resolve() == Path(dst).resolve():
        raise InputError(dst, "the output must be another folder than the input", src, "choose another name")
    if k is not None and k < 1:
        raise InputError("--k", "at least one token must be drafted a step", k, "use --k 1 or more")
    if k is not None and to in ("orbax", "hf"):
        raise InputError("--k", f"--to {to} carries no K", k, "leave it out")
    if max_shard_bytes is not None and to == "orbax":
        raise InputError("--max-shard-size", "--to orbax has its own files", max_shard_bytes, "leave it out")
    if target is not None and to == "hf":
        raise InputError("--target", "a target is converted by itself", target, "leave it out")
    if share_embedding and (to != "vllm" or target is None):
        got = f"--to {to}, {'a' if target else 'no'} target"
        raise InputError("--share-embedding", "needs --to vllm and --target", got, "give both, or leave it out")
    metadata = {"source": f"{Path(src).name}, by peagle convert --to {to}"}
    if to == "hf":
        save_target(
            load_target(src, dtype=dtype or _stored_dtype(src)),
            dst,
            dtype=dtype or _stored_dtype(src),
            tokenizer_from=src,
            metadata=metadata,
            max_shard_bytes=max_shard_bytes,
        )
        return
    embedding = None
    if target is not None and (share_embedding or not _has_embedding(src)):
        embedding = load_target(target).params["embed"]["table"]
    head = read_head(src, embedding)
    if share_embedding and not np.array_equal(head.params["embed"]["table"], embedding.astype(head.config.dtype)):
        raise InputError(src, "--share-embedding needs a head whose embedding is the target's", "one trained further", "leave it out")
    if to == "orbax":
        with weights.new_folder(dst) as work:
            write_run(head if dtype is None else _cast(head, dtype), work)
        return
    architecture = (
        (weights.read_json(target / "config.json").get("architectures") or ["Qwen3ForCausalLM"])[0] if target else "Qwen3ForCausalLM"
    )
    folders.save_drafter(head, dst, layout=to, dtype=dtype, target=str(target) if target else None,
                         target_architecture=architecture, k=k, metadata=metadata, max_shard_bytes=max_shard_bytes,
                         own_embedding=not share_embedding)  # fmt: skip


def read_head(src: Path, embedding: jax.Array | None = None) -> Model:
    """A head from a folder of any layout, or from a training run; `embedding` is for one that shares its target's."""
    src = Path(src)
    return read_run(src) if (src / HEAD_FILE).exists() else folders.load_drafter(src, embedding=embedding)


def _has_embedding(src: Path) -> bool:
    return (Path(src) / HEAD_FILE).exists() or "embed_tokens.weight" in map(folders.plain_name, weights.open_folder(src))


def _stored_dtype(src: Path) -> np.dtype:
    return next(t.dtype for t in weights.open_folder(src).values())


def _cast(head: Model, dtype: str) -> Model:
    floating = lambda x: jax.numpy.issubdtype(x.dtype, jax.numpy.floating)  # noqa: E731
    params = jax.tree.map(lambda x: x.astype(dtype) if floating(x) else x, head.params)
    return Model(dataclasses.replace(head.config, dtype=np.dtype(dtype)), head.graph, params)


# ---------------------------------------------------------------- a run's own files


def head_json(config: HeadConfig) -> str:
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    rope = json.loads(config.rope.source) | {"max_position_embeddings": config.context}
    return json.dumps(fields | {"rope": rope, "dtype": np.dtype(config.dtype).name}, indent=2) + "\n"


def head_config_from_json(path: Path) -> HeadConfig:
    raw = weights.read_json(path)
    try:
        rope = dict(raw["rope"])
        context = rope.pop("max_position_embeddings")
        raw |= {
            "rope": Rope.from_hf({"rope_parameters": rope, "max_position_embeddings": context}, raw["head_dim"], str(path)),
            "taps": tuple(raw["taps"]), "windows": tuple(raw["windows"]), "dtype": np.dtype(raw["dtype"]),
        }  # fmt: skip
        return HeadConfig(**raw)
    except (KeyError, TypeError) as error:
        raise InputError(path, "must be the head.json of a training run", error, "restore the file") from None


def start_run(head: Model, frozen: dict, out: Path) -> None:
    """What `read_run` needs beside the checkpoints: the head's shape, and the parts that are not trained."""
    out.mkdir(parents=True, exist_ok=True)
    (out / HEAD_FILE).write_text(head_json(head.config), encoding="utf-8")
    if frozen:
        _save(out / FROZEN, frozen)


def write_run(head: Model, out: Path) -> None:
    """A head as an Orbax folder: shape, and one checkpoint of all its parameters."""
    start_run(head, {}, out)
    _save(out / "checkpoints" / "0" / "default", {"params": head.params})


def read_run(src: Path) -> Model:
    """The newest checkpoint of a training run, or what `write_run` wrote."""
    config = head_config_from_json(src / HEAD_FILE)
    _, params = restore_params(src / "checkpoints")
    if (src / FROZEN).exists():
        with ocp.StandardCheckpointer() as reader:
            params = {**reader.restore((src / FROZEN).absolute()), **params}
    tensors = {path: np.asarray(leaf) for path, leaf in weights.flat(params)}
    same = {path: (path, weights.SAME) for path, _ in folders.table(config).values()}
    return weights.load(lambda: DraftHead(config, rngs=nnx.Rngs(0)), config, tensors, same, src)


def _save(path: Path, tree) -> None:
    with ocp.StandardCheckpointer() as writer:
        writer.save(path.absolute(), tree, force=True)


def read_serving(folder: Path) -> HeadConfig:
    """The shape of a servable head folder, without loading its weights."""
    raw = weights.read_json(folder / "config.json")
    if not folders.is_drafter(raw):
        raise InputError(
            folder, "must be a draft head's folder", raw.get("architectures"), "convert the run first: peagle convert --to vllm"
        )
    tensors = {folders.plain_name(name): t for name, t in weights.open_folder(folder).items()}
    return folders.read_config(raw, tensors, str(folder / "config.json"))
