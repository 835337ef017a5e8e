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
from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints import param_mapping
from peagle_jax.checkpoints.config_reading import is_drafter
from peagle_jax.checkpoints.head_io import read_head, to_model
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.checkpoints.orbax_io import newest, open_tree
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.placeholders import HIDDEN_DESIGNS, PAPER_DESIGN, TOKEN_DESIGNS
from peagle_jax.layers import Rope
from peagle_jax.old_names import HEAD_JSON_KEYS, with_new_names
from peagle_jax.types import InputError, Model

HEAD_FILE, FROZEN = "head.json", "frozen"  # beside `checkpoints` in a run's folder
FACTS = (
    "source",
    "left_out",
    "target",
    "target_architecture",
)  # of HeadTensors, kept for an export back


def is_run(folder: Path) -> bool:
    return (folder / HEAD_FILE).exists()


def head_json(config: HeadConfig, facts: Mapping | None = None) -> str:
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    rope = json.loads(config.rope.source) | {"max_position_embeddings": config.context}
    fields |= {"rope": rope, "dtype": np.dtype(config.dtype).name}
    return json.dumps(fields | ({"origin": dict(facts)} if facts else {}), indent=2) + "\n"


def config_from_json(path: Path) -> HeadConfig:
    raw = with_new_names(weights.read_json(path), HEAD_JSON_KEYS, str(path))
    raw.pop("origin", None)
    f = weights.Fields(raw, path)
    for key in (
        "vocab",
        "draft_vocab",
        "dim",
        "layers",
        "mlp_dim",
        "heads",
        "kv_heads",
        "head_dim",
        "context",
        "target_dim",
    ):
        f.get_int(key)
    (
        f.get_int("mask_token", None, least=0),
        f.get_int("num_depths", None),
        f.get_float("norm_eps"),
        f.get_str("dtype"),
    )
    raw = {**PAPER_DESIGN, **raw}  # runs older than the other designs
    for key, known in (
        ("placeholder_hidden", HIDDEN_DESIGNS),
        ("placeholder_token", TOKEN_DESIGNS),
    ):
        if not isinstance(raw[key], str) or raw[key] not in known:
            raise InputError(
                path, f"{key} must be one of {', '.join(known)}", raw[key], "restore the file"
            )
    for key in (
        "qk_norm",
        "attention_bias",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    ):
        f.get_bool(key)
    windows = f.get("windows")
    if (
        not f.get_ints("aux_hidden_state_layers")
        or not isinstance(windows, list)
        or len(windows) != raw["layers"]
        or raw["layers"] > 10_000
    ):
        raise InputError(
            path,
            "taps and windows must be lists, with one window a layer",
            "others",
            "restore the file",
        )
    try:
        rope = dict(raw["rope"])
        context = rope.pop("max_position_embeddings")
        raw |= {
            "rope": Rope.from_hf(
                {"rope_parameters": rope, "max_position_embeddings": context},
                raw["head_dim"],
                str(path),
            ),
            "aux_hidden_state_layers": tuple(raw["aux_hidden_state_layers"]),
            "windows": tuple(raw["windows"]),
            "dtype": np.dtype(raw["dtype"]),
        }
        return HeadConfig(**raw)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            path, "must be the head.json of a training run", error, "restore the file"
        ) from None


def write_run_header(head: Model, frozen: dict, out: Path, facts: Mapping | None = None) -> None:
    """What `open_run` needs beside the checkpoints: the head's shape, and the parts that are not trained."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / HEAD_FILE, head_json(head.config, facts))
    if frozen:
        _save(out / FROZEN, frozen)


def write_run(head: HeadState, model: Model, out: Path) -> None:
    """A head as an Orbax folder: shape, origin, and one checkpoint of all its parameters."""
    facts = {key: value for key in FACTS if (value := getattr(head, key))}
    write_run_header(model, {}, out, facts)
    _save(out / "checkpoints" / "0" / "default", {"params": model.params})


def open_run(src: Path) -> HeadState:
    """The newest checkpoint of a training run, or what `write_run` wrote; read parameter by parameter."""
    src = Path(src)
    config = config_from_json(src / HEAD_FILE)
    leaves = open_tree(newest(src / "checkpoints"), "params")
    if (src / FROZEN).exists():
        leaves = open_tree(src / FROZEN) | leaves
    table = param_mapping.table(config)
    if odd := {path for path, _ in table.values()} ^ leaves.keys():
        raise InputError(
            src,
            "the checkpoint must hold the parameters of head.json",
            f"a difference at {min(odd)}",
            "restore the folder",
        )
    tensors = weights.export_params(weights.unflatten_params(leaves), table)
    if "d2t" in tensors:
        tensors["d2t"] = np.asarray(tensors["d2t"]).astype(np.int64)
    facts = weights.Fields(weights.read_json(src / HEAD_FILE), src / HEAD_FILE).child("origin")
    return HeadState(
        config,
        tensors,
        checkpoint_format="orbax",
        source=facts.get_str("source", None) or src.name,
        left_out=tuple(facts.get_strs("left_out", [])),
        target=facts.get_str("target", None),
        target_architecture=facts.get_str("target_architecture", None),
    )


def open_head(path: str | Path, target_layers: int | None = None) -> HeadState:
    """A head that can draft here: a folder of any layout, a hub id, or a training run.

    Raises:
      InputError: it is a target, or damaged.
    """
    folder = weights.find_folder(path)
    if is_run(folder):
        return open_run(folder)
    raw = weights.read_json(folder / "config.json")
    if not is_drafter(raw):
        raise InputError(
            folder,
            "must be a draft head's folder",
            raw.get("architectures"),
            "name a head, not a target",
        )
    return read_head(path, target_layers=target_layers)


def load_drafter(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    embedding: np.ndarray | jax.Array | None = None,
    target_layers: int | None = None,
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
        raise InputError(
            path, "the checkpoint must be written to the end", error, "make room and try again"
        ) from None
