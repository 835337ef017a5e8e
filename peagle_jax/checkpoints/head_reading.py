"""Folders of draft heads, in any checkpoint format -> HeadState -> model.

The formats are "vllm" (AWS and vLLM), "speculators", "automodel" (NVIDIA NeMo) and "specforge".
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.checkpoints import config_reading, param_mapping
from peagle_jax.checkpoints.checkpoint_format import detect_format
from peagle_jax.checkpoints.head_state import HeadState, head_maker
from peagle_jax.draft import draft_vocab
from peagle_jax.draft.head import HeadConfig
from peagle_jax.layers.fp8 import quantize_linears
from peagle_jax.types import InputError, Model
from peagle_jax.weights import Tensor


def read_head(
    path: str | Path,
    *,
    target_layers: int | None = None,
    mask_token: int | None = None,
    aux_layer_numbering: str | None = None,
) -> HeadState:
    """Opens a draft head's folder of any checkpoint format; no weights are read yet.

    Args:
      path: folder with config.json and safetensors weights, or a Hugging Face hub id.
      target_layers: for a folder that does not name its aux hidden state layers.
      mask_token: for a folder that does not name its mask token.
      aux_layer_numbering: "input" or "output"; see `config_reading.read_config` for all three.

    Raises:
      InputError: the folder is missing or damaged, or asks for something that this head does
        not compute.
    """
    folder = weights.find_folder(path)
    where = folder / "config.json"
    raw = weights.read_json(where)
    stored = weights.open_folder(folder)
    tensors: dict[str, Tensor] = {param_mapping.plain_name(name): t for name, t in stored.items()}
    if len(tensors) < len(stored):
        raise InputError(
            folder,
            rule="every tensor must have one name",
            got="one under two spellings, as midlayer. and layers.0.",
            next_step="remove one of the two from the safetensors",
        )
    fp8 = weights.dequantize(tensors, raw, folder)
    # in the order of VERIFIER_TENSORS, which written metadata has had from the beginning
    unread = sorted(filter(param_mapping.is_left_out, fp8.tensors), reverse=True)
    tensors = {name: t for name, t in fp8.tensors.items() if name not in unread}
    left_out = [*fp8.left_out, *unread]
    _add_output_biases(tensors)
    config = config_reading.read_config(
        raw,
        tensors,
        str(where),
        target_layers=target_layers,
        mask_token=mask_token,
        aux_layer_numbering=aux_layer_numbering,
    )
    left_out += _normalize_vocab_tables(tensors, config, folder)
    metadata = weights.read_metadata(folder)
    if "peagle_jax" in metadata.get("writer", ""):  # what an earlier conversion left out
        left_out += [name for name in metadata.get("left_out", "").split() if name not in left_out]
    target, architecture = config_reading.read_target(raw, where)
    dequantized = fp8.quantized
    return HeadState(
        config=dataclasses.replace(
            config,
            dtype=_common_dtype([t for name, t in tensors.items() if name not in dequantized]),
        ),
        tensors=tensors,
        checkpoint_format=detect_format(raw),
        source=short_name(path),
        left_out=tuple(left_out),
        quantized=bool(dequantized),
        target=target or metadata.get("target"),
        target_architecture=architecture or metadata.get("target_architecture"),
    )


def short_name(path: str | Path) -> str:
    """A hub id as it is, and the last part of a local path.

    Checkpoints record their source, and need not tell where somebody's files lie.
    """
    return Path(path).name if Path(path).exists() else str(path)


def to_model(
    head: HeadState,
    *,
    dtype: DTypeLike | None = None,
    embedding: np.ndarray | jax.Array | Tensor | None = None,
    lm_head: np.ndarray | jax.Array | Tensor | None = None,
    fp8: bool = False,
) -> Model:
    """Reads the weights of a head into a model.

    Args:
      head: from `read_head` or `runs.open_head`.
      dtype: of weights, and of activations on a GPU; on a CPU activations are float32. None keeps
        the head's.
      embedding: the target's [V D], for a head that shares it.
      lm_head: the target's output matrix [V D], for a head that shares it.
      fp8: all matrices in float8, `lm_head` too (it only drafts), and the rest in `dtype`.

    Raises:
      InputError: the tensors do not fit the config, or what is shared is not given.
    """
    tensors = dict(head.tensors)
    if head.shares_embedding:
        if embedding is None:
            raise InputError(
                head.source,
                rule=f"needs {param_mapping.EMBEDDING}, or the target's embedding",
                got="neither",
                next_step="give --target or embedding=",
            )
        tensors[param_mapping.EMBEDDING] = np.asarray(embedding)
    if head.shares_lm_head:
        if lm_head is None:
            raise InputError(
                head.source,
                rule=f"needs {param_mapping.LM_HEAD}, or its target's",
                got="neither",
                next_step="load it with its target: load_pair(target, head), or give --target",
            )
        tensors[param_mapping.LM_HEAD] = np.asarray(lm_head)
    config = head.config
    if dtype is not None:
        config = dataclasses.replace(config, dtype=np.dtype(dtype))
    make, table = head_maker(config), param_mapping.table(config)
    if fp8:
        make, tensors, table = quantize_linears(make, tensors, table, {}, keep=())
    return weights.load_params(make, config, tensors, table, head.source)


def _common_dtype(tensors: list[Tensor]) -> DTypeLike:
    """The dtype that holds all floating-point tensors exactly; float32 where there are none."""
    dtypes = [t.dtype for t in tensors if t.dtype in weights.FLOATING]
    return functools.reduce(jnp.promote_types, dtypes, dtypes[0]) if dtypes else np.dtype("float32")


def _add_output_biases(tensors: dict[str, Tensor]) -> None:
    """Adds the zero `o_proj.bias` of heads that have biases on q, k and v alone.

    vLLM builds all four from the one key `attention_bias`, and leaves what is not in the file
    uninitialized (0.32).
    """
    for name in [n for n in tensors if n.endswith("self_attn.q_proj.bias")]:
        output = name.replace("q_proj", "o_proj")
        matrix = tensors.get(output.replace("bias", "weight"))
        if output in tensors or matrix is None or not matrix.shape:
            continue
        rows, dtype = matrix.shape[0], tensors[name].dtype
        zeros = functools.partial(np.zeros, rows, dtype)
        tensors[output] = weights.LazyTensor((rows,), dtype, zeros)


def _normalize_vocab_tables(
    tensors: dict[str, Tensor], config: HeadConfig, folder: Path
) -> list[str]:
    """Leaves `d2t` as int64 offsets at a reduced vocabulary, and neither table at the full one.

    Returns:
      Names of the tables that were taken out because they say nothing.

    Raises:
      InputError: the tables leave the vocabulary, name an id twice, or disagree.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = None if d2t is None else _ids_of_d2t(d2t, config, folder)
    if t2d is not None:
        ids = _check_t2d(t2d, ids, config, folder)
    if config.draft_vocab != config.vocab:
        if ids is not None:
            tensors["d2t"] = draft_vocab.tables(ids, config.vocab)[0]
        return []
    if ids is not None and not np.array_equal(ids, np.arange(config.vocab)):
        raise InputError(
            folder,
            rule="d2t must be the identity (all zero) at full vocabulary",
            got="another map",
            next_step="put the rows of lm_head into the target's order and remove d2t",
        )
    return [name for name, table in (("d2t", d2t), ("t2d", t2d)) if table is not None]


def _ids_of_d2t(d2t: Tensor, config: HeadConfig, folder: Path) -> np.ndarray:
    """Target ids of all draft ids, from offsets [W] of whole numbers."""
    size, vocab = config.draft_vocab, config.vocab
    if d2t.shape != (size,) or d2t.dtype.kind not in "iu":
        raise InputError(
            folder,
            rule=f"d2t must hold {size} whole numbers",
            got=f"{d2t.dtype.name} {list(d2t.shape)}",
            next_step=_damaged("d2t"),
        )
    offsets = np.asarray(d2t).astype(np.int64)
    ids = np.arange(size) + offsets
    too_far = np.abs(offsets).max(initial=0) > vocab  # the sum may have overflowed
    if too_far or ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != size:
        raise InputError(
            folder,
            rule=f"d2t must name {size} different ids in 0..{vocab - 1}",
            got=f"ids {ids.min()}..{ids.max()}",
            next_step=_damaged("d2t"),
        )
    return ids


def _check_t2d(t2d: Tensor, ids: np.ndarray | None, config: HeadConfig, folder: Path) -> np.ndarray:
    """The target ids that the mask t2d [V] names; they must be `ids`, where d2t gave those."""
    size, vocab = config.draft_vocab, config.vocab
    if t2d.shape != (vocab,) or t2d.dtype.kind not in "biu":
        raise InputError(
            folder,
            rule=f"t2d must hold {vocab} truth values",
            got=f"{t2d.dtype.name} {list(t2d.shape)}",
            next_step=_damaged("t2d"),
        )
    masked = np.flatnonzero(np.asarray(t2d))
    ids = masked if ids is None else ids
    if len(masked) != size or not np.array_equal(np.sort(ids), masked):
        in_one_only = sorted(set(masked.tolist()) ^ set(ids.tolist()))
        first = in_one_only[0] if in_one_only else len(masked)
        raise InputError(
            folder,
            rule=f"t2d must name the {size} ids of the draft vocabulary",
            got=f"a difference at {first}",
            next_step=_damaged("t2d"),
        )
    return ids


def _damaged(table: str) -> str:
    """What to do about a damaged table of a head that somebody else has trained."""
    return (
        "download its safetensors files again, or let its trainer save the head again: "
        f"{table} is damaged"
    )
