"""Draft-head folders of every layout <-> one form outside any model, lazily; and that form <-> our head.

Read: "vllm" (AWS and vLLM), "speculators", "automodel" (NeMo), "specforge". Written: "vllm" and "speculators".
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.checkpoints import (
    config_reading,
    config_writing,
    export_placeholders,
    model_card,
    param_mapping,
)
from peagle_jax.checkpoints.config_reading import detect_format
from peagle_jax.checkpoints.head_state import HeadState, maker
from peagle_jax.draft import draft_vocab
from peagle_jax.draft.head import HeadConfig
from peagle_jax.layers.fp8 import quantize_linears
from peagle_jax.provenance import versions
from peagle_jax.types import InputError, Model
from peagle_jax.weights import Tensor

CHECKPOINT_FORMATS = ("vllm", "speculators")  # that are written


# ---------------------------------------------------------------- reading


def read_head(
    path: str | Path,
    *,
    target_layers: int | None = None,
    mask_token: int | None = None,
    numbering: str | None = None,
) -> HeadState:
    """A draft head's folder of any layout, detected from the folder itself; no weights are read yet.

    Args:
      path: folder with config.json and safetensors, or a hub id.
      target_layers, mask_token, numbering: for folders that leave them open: see `config_reading.read_config`.

    Raises:
      InputError: the folder is missing, damaged, or asks for something that this head does not compute.
    """
    folder = weights.find_folder(path)
    where = folder / "config.json"
    raw = weights.read_json(where)
    stored = weights.open_folder(folder)
    tensors: dict[str, Tensor] = {param_mapping.plain(name): t for name, t in stored.items()}
    if len(tensors) < len(stored):
        raise InputError(
            folder,
            "every tensor must have one name",
            "one under two spellings, as midlayer. and layers.0.",
            "drop one",
        )
    fp8 = weights.dequantize(tensors, raw, folder)
    tensors = {name: t for name, t in fp8.tensors.items() if name not in param_mapping.VERIFIERS}
    left_out = [*fp8.left_out, *(name for name in param_mapping.VERIFIERS if name in fp8.tensors)]
    _complete_biases(tensors)
    config = config_reading.read_config(
        raw,
        tensors,
        str(where),
        target_layers=target_layers,
        mask_token=mask_token,
        numbering=numbering,
    )
    left_out += _map_vocabulary(tensors, config, folder)
    plain = [
        t.dtype
        for name, t in tensors.items()
        if t.dtype in weights.FLOATING and name not in fp8.quantized
    ]
    metadata = weights.read_metadata(folder)
    if "peagle_jax" in metadata.get("writer", ""):  # what an earlier conversion left out
        left_out += [name for name in metadata.get("left_out", "").split() if name not in left_out]
    target, architecture = config_reading.read_target(raw, where)
    return HeadState(
        config=dataclasses.replace(
            config,
            dtype=functools.reduce(jnp.promote_types, plain, plain[0])
            if plain
            else np.dtype(np.float32),
        ),
        tensors=tensors,
        checkpoint_format=detect_format(raw),
        source=short_name(path),
        left_out=tuple(left_out),
        quantized=bool(fp8.quantized),
        target=target or metadata.get("target"),
        target_architecture=architecture or metadata.get("target_architecture"),
    )


def short_name(path: str | Path) -> str:
    """A hub id as it is; of a local folder its name alone, so that no checkpoint tells where somebody's files lie."""
    return Path(path).name if Path(path).exists() else str(path)


def _complete_biases(tensors: dict[str, Tensor]) -> None:
    """Heads with biases on q, k, v alone: the output's is zero. vLLM builds it from the same key, and leaves what is not in the
    file uninitialised (0.32)."""
    for name in [n for n in tensors if n.endswith("self_attn.q_proj.bias")]:
        output = name.replace("q_proj", "o_proj")
        matrix = tensors.get(output.replace("bias", "weight"))
        if output not in tensors and matrix is not None and matrix.shape:
            rows = matrix.shape[0]
            tensors[output] = weights.LazyTensor(
                (rows,), tensors[name].dtype, functools.partial(np.zeros, rows, tensors[name].dtype)
            )


def _map_vocabulary(tensors: dict[str, Tensor], config: HeadConfig, folder: Path) -> list[str]:
    """Leaves `d2t` as int64 offsets at a reduced vocabulary, and neither table at the full one. Returns what was left out.

    Raises:
      InputError: the tables leave the vocabulary, name an id twice, or disagree.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    width, vocab, ids = config.draft_vocab, config.vocab, None
    if d2t is not None:
        if d2t.shape != (width,) or d2t.dtype.kind not in "iu":
            raise InputError(
                folder,
                f"d2t must hold {width} whole numbers",
                f"{d2t.dtype.name} {list(d2t.shape)}",
                "restore the file",
            )
        offsets = np.asarray(d2t).astype(np.int64)
        ids = np.arange(width) + offsets
        if (
            np.abs(offsets).max(initial=0) > vocab
            or ids.min() < 0
            or ids.max() >= vocab
            or len(np.unique(ids)) != width
        ):
            raise InputError(
                folder,
                f"d2t must name {width} different ids in 0..{vocab - 1}",
                f"ids {ids.min()}..{ids.max()}",
                "restore the file",
            )
    if t2d is not None:
        if t2d.shape != (vocab,) or t2d.dtype.kind not in "biu":
            raise InputError(
                folder,
                f"t2d must hold {vocab} truth values",
                f"{t2d.dtype.name} {list(t2d.shape)}",
                "restore the file",
            )
        kept = np.flatnonzero(np.asarray(t2d))
        ids = kept if ids is None else ids
        if len(kept) != width or not np.array_equal(np.sort(ids), kept):
            odd = next(iter(sorted(set(kept.tolist()) ^ set(ids.tolist()))), len(kept))
            raise InputError(
                folder,
                f"t2d must name the {width} ids of the draft vocabulary",
                f"a difference at {odd}",
                "restore the file",
            )
    if width != vocab:
        if ids is not None:
            tensors["d2t"] = draft_vocab.tables(ids, vocab)[0]
        return []
    if ids is not None and not np.array_equal(ids, np.arange(vocab)):
        raise InputError(
            folder,
            "d2t must be the identity (all zero) at full vocabulary",
            "another map",
            "reorder lm_head and drop d2t",
        )
    return [name for name, table in (("d2t", d2t), ("t2d", t2d)) if table is not None]


def load_drafter(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    embedding: np.ndarray | jax.Array | None = None,
    target_layers: int | None = None,
) -> Model:
    """Loads a draft head folder of any layout.

    Args:
      path: folder with config.json and safetensors weights, or a hub id.
      dtype: of weights and activations; None keeps the file's (of an FP8 head: that of its other tensors).
      embedding: the target's [V D], for a head whose folder has no `embed_tokens` and shares it.
      target_layers: of the target, for a head whose config names no taps.

    Raises:
      InputError: the folder is missing, damaged, or asks for something that this head does not compute.
    """
    return to_model(read_head(path, target_layers=target_layers), dtype=dtype, embedding=embedding)


def to_model(
    head: HeadState,
    *,
    dtype: DTypeLike | None = None,
    embedding: np.ndarray | jax.Array | None = None,
    fp8: bool = False,
) -> Model:
    """The head in memory; with `fp8` all its matrices in float8 (`lm_head` too: it only drafts), the rest in `dtype`."""
    tensors = dict(head.tensors)
    if head.shares_embedding:
        if embedding is None:
            raise InputError(
                head.source,
                f"needs {param_mapping.EMBEDDING}, or the target's embedding",
                "neither",
                "give --target or embedding=",
            )
        tensors[param_mapping.EMBEDDING] = np.asarray(embedding)
    config = (
        head.config if dtype is None else dataclasses.replace(head.config, dtype=np.dtype(dtype))
    )
    make, table = maker(config), param_mapping.table(config)
    if fp8:
        make, tensors, table = quantize_linears(make, tensors, table, {}, keep=())
    return weights.load_params(make, config, tensors, table, head.source)


# ---------------------------------------------------------------- writing


def of_model(head: Model) -> HeadState:
    tensors = weights.export_params(head.params, param_mapping.table(head.config))
    if "d2t" in tensors:
        tensors["d2t"] = np.asarray(tensors["d2t"]).astype(np.int64)
    return HeadState(
        head.config, tensors, checkpoint_format="peagle_jax", source="peagle_jax.save_drafter"
    )


def save_drafter(
    head: Model,
    path: str | Path,
    *,
    checkpoint_format: str = "vllm",
    dtype: DTypeLike | None = None,
    target: str | None = None,
    target_architecture: str = "Qwen3ForCausalLM",
    k: int | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
    own_embedding: bool = True,
) -> None:
    """Writes a folder that vLLM (>= 0.16) or speculators loads; it appears whole or not at all.

    Args:
      layout: "vllm" or "speculators".
      dtype: of the floating tensors; None keeps the head's.
      target: name or path of the target, which speculators' layout carries.
      target_architecture: of the target, likewise.
      k: tokens to draft a step; None takes what the head was trained for.
      metadata: provenance, into the safetensors header and the model card.
      max_shard_bytes: split the weights into files of at most so many bytes; None writes one file.
      own_embedding: False leaves `embed_tokens` out: readers then share the target's, as published EAGLE-3 heads do.

    Raises:
      InputError: the layout cannot express the head.
    """
    form = dataclasses.replace(
        of_model(head), target=target, target_architecture=target_architecture
    )
    write_head(
        form,
        path,
        checkpoint_format=checkpoint_format,
        dtype=dtype,
        k=k,
        metadata=metadata,
        max_shard_bytes=max_shard_bytes,
        own_embedding=own_embedding,
    )


def write_head(
    head: HeadState,
    path: str | Path,
    *,
    checkpoint_format: str,
    dtype: DTypeLike | None = None,
    k: int | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
    own_embedding: bool = True,
    identity_d2t: bool = False,
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:
    """A head in a layout, tensor by tensor: see `save_drafter`.

    Args:
      identity_d2t: put the `d2t` and `t2d` that the source had at full vocabulary back in; vLLM refuses such a folder.
      on_bytes: told of the bytes written so far, and of all.

    Raises:
      InputError: the layout cannot express the head, or its tensors are not those of its config.
    """
    if checkpoint_format not in CHECKPOINT_FORMATS:
        raise InputError(
            "--to",
            f"must be one of {', '.join(CHECKPOINT_FORMATS)}",
            checkpoint_format,
            "choose one of them",
        )
    head.check()
    if not own_embedding:  # before placeholders are rewritten: what that puts into the mask token's row must not be lost
        head = dataclasses.replace(
            head,
            tensors={
                name: t for name, t in head.tensors.items() if name != param_mapping.EMBEDDING
            },
        )
    head = export_placeholders.to_vllm_placeholders(head)
    cfg, k = head.config, k or head.config.num_depths
    _refuse(head, path, checkpoint_format, k, dtype, own_embedding)
    tensors = dict(head.tensors) if dtype is None else weights.cast(head.tensors, dtype)
    tensors |= _tables(head, identity_d2t)
    if "mask_hidden" in tensors:  # [1, A] and [A] are read; speculators loads [1, 1, A] alone
        shape = (1, 1, tensors["mask_hidden"].size)
        tensors["mask_hidden"] = weights.apply(
            lambda t: t.reshape(shape), tensors["mask_hidden"], shape, tensors["mask_hidden"].dtype
        )
    name = np.dtype(cfg.dtype if dtype is None else dtype).name
    if checkpoint_format == "vllm":
        tensors = {
            ("midlayer." + n.removeprefix("layers.0.") if n.startswith("layers.0.") else n): t
            for n, t in tensors.items()
        }
        config = config_writing.vllm_config(cfg, name, k)
    else:
        config = config_writing.speculators_config(
            cfg, name, k, head.target, head.target_architecture
        )
    left_out = [
        name for name in head.left_out if name not in tensors
    ]  # what --identity-d2t put back is in
    facts = {
        "source": head.source,
        "source_layout": head.checkpoint_format,
        "target": head.target,
        "target_architecture": head.target_architecture,
        "left_out": " ".join(left_out),
        "writer": versions(),
        **(metadata or {}),
    }
    facts = {key: value for key, value in facts.items() if value}
    with weights.new_folder(Path(path)) as folder:
        weights.write_folder(folder, config, tensors, facts, max_shard_bytes, on_bytes)
        own = param_mapping.EMBEDDING in tensors
        text = model_card.head_card(
            cfg,
            name=Path(path).name,
            checkpoint_format=checkpoint_format,
            dtype=name,
            k=k,
            own_embedding=own,
            facts=facts,
        )
        (folder / "README.md").write_text(text, encoding="utf-8")


def _refuse(
    head: HeadState, path, checkpoint_format: str, k: int | None, dtype, own_embedding: bool
) -> None:
    cfg = head.config
    if list(cfg.aux_hidden_state_layers) != sorted(set(cfg.aux_hidden_state_layers)):
        raise InputError(
            path,
            "vLLM collects taps once each and in layer order: tap ids must ascend",
            list(cfg.aux_hidden_state_layers),
            "train with ascending taps",
        )
    if head.quantized and dtype is None:
        raise InputError(
            path,
            "an FP8 head is written in a dtype of your choice",
            "none",
            "give --dtype bfloat16 or float32",
        )
    if not cfg.qk_norm and cfg.dim % cfg.heads:
        raise InputError(
            path,
            "transformers' LlamaConfig wants a width that its heads divide",
            f"{cfg.dim} and {cfg.heads}",
            "retrain it",
        )
    if checkpoint_format == "speculators":
        if cfg.norm_before_fc and cfg.fc_norm:
            raise InputError(
                path,
                "speculators takes norm_before_fc or fc_norm, not both",
                "both",
                "use --to vllm",
            )
        if (
            lost := [o for o in ("fc_norm", "norm_output") if getattr(cfg, o)]
            if cfg.parallel
            else []
        ):
            raise InputError(
                path,
                "vLLM's reading of a speculators peagle folder ignores some options",
                ", ".join(lost),
                "use --to vllm",
            )
        if k is None:
            raise InputError(path, "speculators' layout carries K", "none", "give it with --k")
        if (
            head.shares_embedding or not own_embedding
        ):  # speculators 0.9 reads such a folder with an embedding of zeros
            raise InputError(
                path,
                "speculators' layout has its own embedding",
                "a shared one",
                "give --target, or use --to vllm",
            )


def check_servable(head: HeadState, path) -> None:
    """Raises InputError where vLLM would refuse the folder that `head` was read from, or serve it wrongly."""
    head.check()
    if head.config.draft_vocab == head.config.vocab and "d2t" in weights.open_folder(
        weights.find_folder(path)
    ):
        raise InputError(
            path,
            "vLLM refuses d2t at full vocabulary",
            "one",
            "peagle convert --to vllm first, which leaves it out",
        )
    _refuse(
        head,
        path,
        head.checkpoint_format,
        head.config.num_depths or 1,
        np.float32,
        own_embedding=True,
    )
    config_writing.vllm_config(head.config, "float32", None)  # what a config cannot say


def _tables(head: HeadState, identity_d2t: bool) -> dict[str, np.ndarray]:
    cfg = head.config
    if cfg.draft_vocab != cfg.vocab:
        if identity_d2t:
            raise InputError(
                "--identity-d2t",
                "only a head of the full vocabulary has an identity d2t",
                cfg.draft_vocab,
                "leave it out",
            )
        ids = np.arange(cfg.draft_vocab) + np.asarray(head.tensors["d2t"])
        return dict(zip(("d2t", "t2d"), draft_vocab.tables(ids, cfg.vocab), strict=True))
    if not identity_d2t:
        return {}
    identity = dict(
        zip(("d2t", "t2d"), draft_vocab.tables(np.arange(cfg.vocab), cfg.vocab), strict=True)
    )
    wanted = {name: table for name, table in identity.items() if name in head.left_out}
    if "d2t" not in wanted:
        rule = "puts back what the source had, or what an earlier conversion left out"
        raise InputError("--identity-d2t", rule, "neither", "leave it out")
    return wanted
