"""Training runs of heads as checkpoints; and `load_drafter`, which opens a head of any kind.

A run's folder holds Orbax states under `checkpoints`, and beside them head.json, which says what
they are states of, and `frozen`, the parameters that were not trained.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints import param_mapping
from peagle_jax.checkpoints.checkpoint_format import CALIBRATION, is_drafter
from peagle_jax.checkpoints.head_reading import read_head, to_model
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.draft.confidence import (
    NO_CONFIDENCE,
    Calibration,
    calibration_from_json,
    check_confidence,
)
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.markov import NO_MARKOV, check_kind, check_rank
from peagle_jax.draft.placeholders import DESIGNS, PAPER_DESIGN
from peagle_jax.layers import FINAL_HIDDEN_STATE, Rope
from peagle_jax.old_names import HEAD_JSON_KEYS, HEAD_JSON_VALUES, with_new_names, with_new_values
from peagle_jax.types import InputError, Model, Params

HEAD_FILE, FROZEN, RESULT_FILE = "head.json", "frozen", "result.json"
HEAD_FILE_AGAIN = f"copy {HEAD_FILE} from a backup, or train again with another out:"
ORIGIN_FIELDS = ("source", "left_out", "target", "target_architecture")  # of HeadState
MARGIN = 1 << 16  # bytes of a checkpoint beside its arrays
INT_KEYS = (
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
)
BOOL_KEYS = (
    "qk_norm",
    "attention_bias",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "confidence",
)
MOST_LAYERS = 10_000  # a damaged head.json must not make a model of any size


# ---------------------------------------------------------------- opening a head of any kind


def load_drafter(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    embedding: np.ndarray | jax.Array | None = None,
    lm_head: np.ndarray | jax.Array | None = None,
    target_layers: int | None = None,
) -> Model:
    """Loads a draft head: a folder of any checkpoint format, a hub id, or a training run.

    `peagle_jax.load_pair` loads a target and its head together, and needs none of the last three
    arguments.

    Args:
      path: folder with config.json and safetensors weights, a Hugging Face hub id, or the `out`
        of a training run of this package.
      dtype: of weights, and of activations on a GPU; on a CPU activations are float32. None keeps
        the file's (of an FP8 head: that of its other tensors).
      embedding: the target's [V D], for a head whose folder has no `embed_tokens` and shares it.
      lm_head: the target's output matrix [V D], for an EAGLE-1 head whose folder has none.
      target_layers: how many layers the target has, for a head whose config does not name its aux
        hidden state layers.

    Returns:
      The head: a `HeadConfig`, and its parameters on the default device.

    Raises:
      InputError: the folder is missing, a target's, or damaged, or asks for something that this
        head does not compute.
    """
    head = open_head(path, target_layers)
    return to_model(head, dtype=dtype, embedding=embedding, lm_head=lm_head)


def open_head(path: str | Path, target_layers: int | None = None) -> HeadState:
    """Opens a head of any kind without reading its weights; see `load_drafter`.

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
            rule="must be a draft head's folder",
            got=raw.get("architectures"),
            next_step="name a head, not a target",
        )
    return read_head(path, target_layers=target_layers)


# ---------------------------------------------------------------- reading a run


def is_run(folder: Path) -> bool:
    """Whether a folder is a training run of a head."""
    return (folder / HEAD_FILE).exists()


def read_run(src: Path) -> Model:
    """The head of a training run, from its newest checkpoint."""
    return to_model(open_run(src))


def open_run(src: Path) -> HeadState:
    """The head of a run; its parameters are read when they are asked for.

    Raises:
      InputError: there is no finished checkpoint, or it does not hold what head.json says.
    """
    # here and below: Orbax takes a third of a second to import, and most heads are no runs
    from peagle_jax.checkpoints.orbax_io import open_tree

    src = Path(src)
    config = config_from_json(src / HEAD_FILE)
    params = open_tree(_state_of_head(src), "params")
    if (src / FROZEN).exists():
        params = open_tree(src / FROZEN) | params
    table = param_mapping.table(config)
    if differing := {path for path, _ in table.values()} ^ params.keys():
        raise InputError(
            src,
            rule="the checkpoint must hold the parameters of head.json",
            got=f"a difference at {min(differing)}",
            next_step=f"copy checkpoints and {HEAD_FILE} from a backup, or train again with "
            "another out:",
        )
    tensors = weights.export_params(weights.unflatten_params(params), table)
    if "d2t" in tensors:
        tensors["d2t"] = np.asarray(tensors["d2t"]).astype(np.int64)
    origin = weights.Fields(weights.read_json(src / HEAD_FILE), src / HEAD_FILE).child("origin")
    return HeadState(
        config,
        tensors,
        checkpoint_format="orbax",
        source=origin.get_str("source", None) or src.name,
        left_out=tuple(origin.get_strs("left_out", [])),
        target=origin.get_str("target", None),
        target_architecture=origin.get_str("target_architecture", None),
    )


def _state_of_head(src: Path) -> Path:
    """The state that a run's head is in: of the step that a finished run kept, or the newest."""
    from peagle_jax.checkpoints.orbax_io import newest

    path = newest(src / "checkpoints")
    result_file = src / RESULT_FILE
    result = weights.read_json(result_file) if result_file.exists() else {}
    kept_step = result.get("kept_step")
    if result.get("step") != int(path.parent.name) or type(kept_step) is not int:
        return path  # the run was extended since, or says nothing
    kept = path.parents[1] / str(kept_step) / path.name
    return kept if kept.exists() else path


def config_from_json(path: Path) -> HeadConfig:
    """The head that a run trains, from its head.json; former names of keys are read too.

    Raises:
      InputError: a key is missing or of a wrong kind, or names a design that does not exist.
    """
    raw = with_new_names(weights.read_json(path, HEAD_FILE_AGAIN), HEAD_JSON_KEYS, str(path))
    raw = with_new_values(raw, HEAD_JSON_VALUES, str(path), HEAD_FILE_AGAIN)
    raw.pop("origin", None)
    # runs from before other designs, Markov and confidence heads do not name theirs
    raw = {**PAPER_DESIGN, **NO_MARKOV, **NO_CONFIDENCE, **raw}
    calibration = calibration_from_json(raw[CALIBRATION], str(path), HEAD_FILE_AGAIN)
    raw[CALIBRATION] = calibration
    _check_values(raw, path)
    try:
        rope = dict(raw["rope"])
        context = rope.pop("max_position_embeddings")
        raw |= {
            "rope": Rope.from_hf(
                {"rope_parameters": rope, "max_position_embeddings": context},
                raw["head_dim"],
                str(path),
                default_theta=None,
            ),
            "aux_hidden_state_layers": tuple(raw["aux_hidden_state_layers"]),
            "windows": tuple(raw["windows"]),
            "dtype": np.dtype(raw["dtype"]),
        }
        return HeadConfig(**raw)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            path, "must be the head.json of a training run", error, HEAD_FILE_AGAIN
        ) from None


def _check_values(raw: Mapping, path: Path) -> None:
    """Raises InputError where a value of head.json is not what `HeadConfig` needs."""
    fields = weights.Fields(raw, path)
    for key in INT_KEYS:
        fields.get_int(key)
    fields.get_int("mask_token", None, least=0)
    fields.get_int("num_depths", None)
    fields.get_float("norm_eps")
    fields.get_str("dtype")
    for key, designs in DESIGNS.items():
        if not isinstance(raw[key], str) or raw[key] not in designs:
            raise InputError(
                path, f"{key} must be one of {', '.join(designs)}", raw[key], HEAD_FILE_AGAIN
            )
    for key in BOOL_KEYS:
        fields.get_bool(key)
    rank, is_parallel = fields.get_int("markov_rank", None), raw.get("mask_token") is not None
    check_rank(rank, raw["draft_vocab"], is_parallel, f"{path}: markov_rank", HEAD_FILE_AGAIN)
    check_kind(raw["markov_kind"], f"{path}: markov_kind", HEAD_FILE_AGAIN)
    is_calibrated = raw[CALIBRATION] is not None
    check_confidence(raw["confidence"], is_calibrated, is_parallel, f"{path}: confidence")
    windows, aux_layers = fields.get("windows"), raw.get("aux_hidden_state_layers")
    if aux_layers != [FINAL_HIDDEN_STATE]:  # an EAGLE-1 head's
        aux_layers = fields.get_ints("aux_hidden_state_layers")
    has_window_per_layer = (
        isinstance(windows, list)
        and len(windows) == raw["layers"] <= MOST_LAYERS
        and all(window is None or (type(window) is int and window >= 1) for window in windows)
    )
    if not aux_layers or not has_window_per_layer:
        raise InputError(
            path,
            rule="aux_hidden_state_layers and windows must be lists, the latter with a number of 1 "
            "or more, or null, for each layer",
            got="others",
            next_step=HEAD_FILE_AGAIN,
        )


# ---------------------------------------------------------------- writing a run


def write_run_header(
    head: Model, frozen: dict, out: Path, origin: Mapping[str, Any] | None = None
) -> None:
    """Writes what `open_run` needs beside the checkpoints. All processes of a run must call it.

    Args:
      head: the head to train.
      frozen: parameters that are not trained, and so in no checkpoint.
      out: the run's folder; it is made.
      origin: where the head comes from (`ORIGIN_FIELDS` of its HeadState), for an export.
    """
    out.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        write_atomically(out / HEAD_FILE, head_json(head.config, origin))
    if frozen:
        from peagle_jax.checkpoints.orbax_io import save_tree

        save_tree(out / FROZEN, frozen)


def check_room(out: Path, params: Params) -> None:
    """Checks that the disk has room for parameters, before anything is written.

    Where a disk is full half-way, the library that writes prints a traceback for each array.

    Raises:
      InputError: there is less.
    """
    needed = sum(x.nbytes for x in jax.tree.leaves(params)) + MARGIN
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        rule, got = f"{needed:,} bytes must be free to write the checkpoint", f"{free:,} bytes"
        raise InputError(out, rule, got, "make room, or choose another disk")


def write_run(head: HeadState, model: Model, out: Path) -> None:
    """A head as a run's folder: its shape, its origin, and one checkpoint of all parameters."""
    origin = {key: value for key in ORIGIN_FIELDS if (value := getattr(head, key))}
    write_run_header(model, {}, out, origin)
    from peagle_jax.checkpoints.orbax_io import save_tree

    save_tree(out / "checkpoints" / "0" / "default", {"params": model.params})


def head_json(config: HeadConfig, origin: Mapping[str, Any] | None = None) -> str:
    """head.json of a run: every field of the configuration, and where the head comes from."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    fields["rope"] = json.loads(config.rope.source) | {"max_position_embeddings": config.context}
    fields["dtype"] = np.dtype(config.dtype).name
    if isinstance(fields[CALIBRATION], Calibration):
        fields[CALIBRATION] = fields[CALIBRATION].to_json()
    if origin is not None:
        fields["origin"] = dict(origin)
    return json.dumps(fields, indent=2) + "\n"
