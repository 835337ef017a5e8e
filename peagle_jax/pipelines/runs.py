"""Training runs of heads as checkpoints: Orbax states beside head.json, which says what they are states of."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.draft import names
from peagle_jax.draft.config_reading import is_drafter
from peagle_jax.draft.folders import read_head, to_model
from peagle_jax.draft.form import HeadTensors
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.placeholders import HIDDEN, PAPER, TOKEN
from peagle_jax.files import write_whole
from peagle_jax.layers import Rope
from peagle_jax.train.checkpoint import newest, open_tree
from peagle_jax.types import InputError, Model

HEAD_FILE, FROZEN = "head.json", "frozen"  # beside `checkpoints` in a run's folder
FACTS = ("source", "left_out", "target", "target_architecture")  # of HeadTensors, kept for an export back


def is_run(folder: Path) -> bool:
    return (folder / HEAD_FILE).exists()


def head_json(config: HeadConfig, facts: Mapping | None = None) -> str:
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    rope = json.loads(config.rope.source) | {"max_position_embeddings": config.context}
    fields |= {"rope": rope, "dtype": np.dtype(config.dtype).name}
    return json.dumps(fields | ({"origin": dict(facts)} if facts else {}), indent=2) + "\n"


def config_from_json(path: Path) -> HeadConfig:
    raw = weights.read_json(path)
    raw.pop("origin", None)
    f = weights.Fields(raw, path)
    for key in ("vocab", "draft_vocab", "dim", "layers", "mlp_dim", "heads", "kv_heads", "head_dim", "context", "target_dim"):
        f.whole(key)
    f.whole("mask_token", None, least=0), f.whole("depths", None), f.number("norm_eps"), f.text("dtype")
    raw = {**PAPER, **raw}  # runs older than the other designs
    for key, known in (("placeholder_hidden", HIDDEN), ("placeholder_token", TOKEN)):
        if not isinstance(raw[key], str) or raw[key] not in known:
            raise InputError(path, f"{key} must be one of {', '.join(known)}", raw[key], "restore the file")
    for key in ("qk_norm", "attention_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        f.flag(key)
    windows = f.get("windows")
    if not f.wholes("taps") or not isinstance(windows, list) or len(windows) != raw["layers"] or raw["layers"] > 10_000:
        raise InputError(path, "taps and windows must be lists, with one window a layer", "others", "restore the file")
    try:
        rope = dict(raw["rope"])
        context = rope.pop("max_position_embeddings")
        raw |= {
            "rope": Rope.from_hf({"rope_parameters": rope, "max_position_embeddings": context}, raw["head_dim"], str(path)),
            "taps": tuple(raw["taps"]), "windows": tuple(raw["windows"]), "dtype": np.dtype(raw["dtype"]),
        }  # fmt: skip
        return HeadConfig(**raw)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(path, "must be the head.json of a training run", error, "restore the file") from None


def start_run(head: Model, frozen: dict, out: Path, facts: Mapping | None = None) -> None:
    """What `open_run` needs beside the checkpoints: the head's shape, and the parts that are not trained."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / HEAD_FILE, head_json(head.config, facts))
    if frozen:
        _save(out / FROZEN, frozen)


def write_run(head: HeadTensors, model: Model, out: Path) -> None:
    """A head as an Orbax folder: shape, origin, and one checkpoint of all its parameters."""
    facts = {key: value for key in FACTS if (value := getattr(head, key))}
    start_run(model, {}, out, facts)
    _save(out / "checkpoints" / "0" / "default", {"params": model.params})


def open_run(src: Path) -> HeadTensors:
    """The newest checkpoint of a training run, or what `write_run` wrote; read parameter by parameter."""
    src = Path(src)
    config = config_from_json(src / HEAD_FILE)
    leaves = open_tree(newest(src / "checkpoints"), "params")
    if (src / FROZEN).exists():
        leaves = open_tree(src / FROZEN) | leaves
    table = names.table(config)
    if odd := {path for path, _ in table.values()} ^ leaves.keys():
        raise InputError(src, "the checkpoint must hold the parameters of head.json", f"a difference at {min(odd)}", "restore the folder")
    tensors = weights.export(weights.nest(leaves), table)
    if "d2t" in tensors:
        tensors["d2t"] = np.asarray(tensors["d2t"]).astype(np.int64)
    facts = weights.Fields(weights.read_json(src / HEAD_FILE), src / HEAD_FILE).inner("origin")
    return HeadTensors(
        config, tensors, layout="orbax", source=facts.text("source", None) or src.name, left_out=tuple(facts.texts("left_out", [])),
        target=facts.text("target", None), target_architecture=facts.text("target_architecture", None),
    )  # fmt: skip


def open_head(path: str | Path, target_layers: int | None = None) -> HeadTensors:
    """A head that can draft here: a folder of any layout, a hub id, or a training run.

    Raises:
      InputError: it is a target, or damaged.
    """
    folder = weights.find_folder(path)
    if is_run(folder):
        return open_run(folder)
    raw = weights.read_json(folder / "config.json")
    if not is_drafter(raw):
        raise InputError(folder, "must be a draft head's folder", raw.get("architectures"), "name a head, not a target")
    return read_head(path, target_layers=target_layers)


def load_drafter(
    path: str | Path, *, dtype: DTypeLike | None = None, embedding: np.ndarray | jax.Array | None = None, target_layers: int | None = None
) -> Model:
    """Loads a draft head: a folder of any layout, a hub id, or a training run of this package.

    Args:
      path: folder with config.json and safetensors weights, a hub id, or the `out` of a run.
      dtype: of weights and activations; None keeps the file's (of an FP8 head: that of its other tensors).
      embedding: the target's [V D], for a head whose folder has no `embed_tokens` and shares it.
      target_layers: of the target, for a head whose config names no taps.

    Raises:
      InputError: the folder is missing, damaged, or asks for something that this head does not compute.
    """
    return to_model(open_head(path, target_layers), dtype=dtype, embedding=embedding)


def read_run(src: Path) -> Model:
    return to_model(open_run(src))


def _save(path: Path, tree) -> None:
    try:
        with ocp.StandardCheckpointer() as writer:
            writer.save(path.absolute(), jax.tree.map(np.asarray, tree), force=True)
    except ValueError as error:  # tensorstore's word for a disk that is full
        raise InputError(path, "the checkpoint must be written to the end", error, "make room and try again") from None
