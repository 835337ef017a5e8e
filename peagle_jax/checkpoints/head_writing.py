"""Model -> HeadState -> a draft head's folder, in a format that vLLM serves, or in our own."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.checkpoints import (
    config_writing,
    export_placeholders,
    model_card,
    param_mapping,
)
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.draft import draft_vocab
from peagle_jax.draft.confidence import NO_CONFIDENCE
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.markov import NO_MARKOV
from peagle_jax.provenance import versions
from peagle_jax.types import InputError, Model
from peagle_jax.weights import Tensor

SERVED_FORMATS = ("vllm", "speculators")  # by vLLM
CHECKPOINT_FORMATS = (*SERVED_FORMATS, "peagle_jax")  # that are written


def from_model(head: Model) -> HeadState:
    """A model's configuration and parameters, under the names and in the layout of checkpoints.

    Raises:
      InputError: the head's matrices are FP8.
    """
    tensors = weights.export_params(head.params, param_mapping.table(head.config))
    if "d2t" in tensors:
        tensors["d2t"] = np.asarray(tensors["d2t"]).astype(np.int64)
    return HeadState(
        head.config, tensors, checkpoint_format="peagle_jax", source="peagle_jax.save_drafter"
    )


def save_drafter(
    head: Model,
    path: str | Path,
    checkpoint_format: str = "vllm",
    *,
    dtype: DTypeLike | None = None,
    target: str | None = None,
    target_architecture: str = "Qwen3ForCausalLM",
    k: int | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
    own_embedding: bool = True,
) -> None:
    """Writes a folder that vLLM (0.16 or later) or speculators loads, or one of our own format.

    The folder appears whole or not at all.

    Args:
      head: a draft head.
      path: the folder to write.
      checkpoint_format: "vllm" or "speculators"; or "peagle_jax", of a head with a Markov head
        or a confidence head.
      dtype: of the floating-point tensors; None keeps the head's.
      target: name or path of the target, which the speculators format carries.
      target_architecture: of the target; the speculators format carries it too.
      k: tokens to draft in one step; None takes what the head was trained for.
      metadata: provenance, which goes into the safetensors header and onto the model card.
      max_shard_bytes: splits the weights into files of at most so many bytes; None writes one.
      own_embedding: False leaves `embed_tokens` out. Readers then share the target's, as they do
        with most published EAGLE-3 heads. Folders of EAGLE-1 heads never have it, nor `lm_head`:
        both are the target's.

    Raises:
      InputError: the format cannot express the head, its matrices are FP8, or the folder cannot be
        written.
    """
    state = dataclasses.replace(
        from_model(head), target=target, target_architecture=target_architecture
    )
    write_head(
        state,
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
    """Writes a head's folder, tensor by tensor. `save_drafter` describes the other arguments.

    Args:
      identity_d2t: writes the `d2t` and `t2d` that the source had at full vocabulary again;
        vLLM refuses such a folder.
      on_bytes: called with the bytes written so far and the bytes of all tensors.

    Raises:
      InputError: the format cannot express the head, or its tensors do not fit its config.
    """
    if checkpoint_format not in CHECKPOINT_FORMATS:
        raise InputError(
            "--to",
            rule=f"must be one of {', '.join(CHECKPOINT_FORMATS)}",
            got=checkpoint_format,
            next_step="use vllm",
        )
    head.check()
    shared = set()
    if head.config.predicts_features:
        shared = {param_mapping.EMBEDDING, param_mapping.LM_HEAD}
    elif not own_embedding:
        # Before placeholders are rewritten: what goes into the mask token's row must not be lost.
        shared = {param_mapping.EMBEDDING}
    tensors = {name: t for name, t in head.tensors.items() if name not in shared}
    head = dataclasses.replace(head, tensors=tensors)
    head = export_placeholders.to_vllm_placeholders(head)
    cfg = head.config
    k = k or cfg.num_depths
    refuse_inexpressible(head, path, checkpoint_format, k, dtype)
    _refuse_shared(head, path, checkpoint_format, own_embedding)
    tensors = _tensors_to_write(head, dtype, identity_d2t)
    dtype_name = np.dtype(cfg.dtype if dtype is None else dtype).name
    if checkpoint_format == "peagle_jax":
        config = config_writing.own_config(cfg, dtype_name, k)
    elif checkpoint_format == "vllm":
        if not cfg.predicts_features:
            tensors = {_vllm_name(name): t for name, t in tensors.items()}
        config = config_writing.vllm_config(cfg, dtype_name, k)
    else:
        assert k is not None  # refused above
        config = config_writing.speculators_config(
            cfg, dtype_name, k, head.target, head.target_architecture
        )
    facts = _provenance(head, tensors, metadata or {})
    with weights.new_folder(Path(path)) as folder:
        weights.write_folder(folder, config, tensors, facts, max_shard_bytes, on_bytes)
        card = model_card.head_card(
            cfg,
            name=Path(path).name,
            checkpoint_format=checkpoint_format,
            dtype=dtype_name,
            k=k,
            own_embedding=param_mapping.EMBEDDING in tensors,
            facts=facts,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")


def without_markov(head: HeadState) -> HeadState:
    """The head without its Markov head; its tensors' names are noted in `left_out`.

    Every draft is then chosen by what the layers alone say, without the token before it. Where the
    Markov head was trained on top of a finished head, that is the finished head again. Where both
    were trained together, the layers have learned to rely on it.

    Raises:
      InputError: it has none.
    """
    if head.config.markov_rank is None:
        raise InputError(
            "--drop-markov",
            rule="needs a head with a Markov head",
            got="one without",
            next_step="remove --drop-markov from the command",
        )
    if head.config.confidence:
        raise InputError(
            "--drop-markov",
            rule="a confidence head that reads the Markov head is nothing without it",
            got="a head with both",
            next_step="add --drop-confidence",
        )
    return _without(head, param_mapping.MARKOV, NO_MARKOV)


def without_confidence(head: HeadState) -> HeadState:
    """The head without its confidence head; its tensors' names are noted in `left_out`.

    Every draft stays as it is.

    Raises:
      InputError: it has none.
    """
    if not head.config.confidence:
        raise InputError(
            "--drop-confidence",
            rule="needs a head with a confidence head",
            got="one without",
            next_step="remove --drop-confidence from the command",
        )
    return _without(head, param_mapping.CONFIDENCE, NO_CONFIDENCE)


def _without(head: HeadState, prefix: str, fields: Mapping[str, Any]) -> HeadState:
    """The head without the tensors of a prefix, and with other fields of its configuration."""
    dropped = [name for name in head.tensors if name.startswith(prefix)]
    return dataclasses.replace(
        head,
        config=dataclasses.replace(head.config, **fields),
        tensors={name: t for name, t in head.tensors.items() if name not in dropped},
        left_out=(*head.left_out, *dropped),
    )


def needs_own_format(cfg: HeadConfig) -> bool:
    """Whether a head has what no format but our own has a place for."""
    return cfg.markov_rank is not None or cfg.confidence


def check_expressible(head: HeadState, path: str | Path, checkpoint_format: str = "vllm") -> None:
    """Checks that `save_drafter` can write the head, before anything is written.

    Raises:
      InputError: the format has no place for something in it.
    """
    rewritten = export_placeholders.to_vllm_placeholders(head)
    refuse_inexpressible(rewritten, path, checkpoint_format, head.config.num_depths, None)
    _refuse_shared(rewritten, path, checkpoint_format, own_embedding=True)


def _tensors_to_write(
    head: HeadState, dtype: DTypeLike | None, identity_d2t: bool
) -> dict[str, Tensor]:
    """All tensors, in the dtype and the shapes that readers expect, under speculators' names."""
    tensors = dict(head.tensors) if dtype is None else weights.cast(head.tensors, np.dtype(dtype))
    tensors |= _vocab_tables(head, identity_d2t)
    if "mask_hidden" in tensors:  # [1, A] and [A] are read; speculators loads [1, 1, A] alone
        vector = tensors["mask_hidden"]
        shape = (1, 1, vector.size)
        tensors["mask_hidden"] = weights.apply(
            lambda t: t.reshape(shape), vector, shape, vector.dtype
        )
    return tensors


def _vllm_name(name: str) -> str:
    """vLLM calls the first layer of an EAGLE-3 or P-EAGLE head `midlayer`."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _provenance(
    head: HeadState, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> dict[str, str]:
    """What the safetensors header and the model card say about where the head comes from."""
    # an identity d2t that was written again is not left out
    left_out = [name for name in head.left_out if name not in tensors]
    facts = {
        "source": head.source,
        "source_format": head.checkpoint_format,
        "target": head.target,
        "target_architecture": head.target_architecture,
        "left_out": " ".join(left_out),
        "writer": versions(),
        **metadata,
    }
    return {key: value for key, value in facts.items() if value}


def refuse_inexpressible(
    head: HeadState,
    path: str | Path,
    checkpoint_format: str,
    k: int | None,
    dtype: DTypeLike | None,
) -> None:
    """Raises InputError where a reader of the format would refuse the head, or misread it.

    Args:
      k: tokens to draft in one step; None where nothing says it.
      dtype: of the written tensors; None for the head's.
    """
    cfg = head.config
    if cfg.markov_rank is not None and checkpoint_format in SERVED_FORMATS:
        raise InputError(
            path,
            rule="vLLM and speculators have no Markov head in P-EAGLE: their drafts would be other "
            "ones",
            got=f"one of rank {cfg.markov_rank}",
            next_step="use --to peagle_jax, or --drop-markov to write the head without it",
        )
    if cfg.confidence and checkpoint_format in SERVED_FORMATS:
        raise InputError(
            path,
            rule="vLLM and speculators have no confidence head in P-EAGLE",
            got="a head with one",
            next_step="use --to peagle_jax, or --drop-confidence, which leaves every draft as it "
            "is",
        )
    if not needs_own_format(cfg) and checkpoint_format == "peagle_jax":
        # every other reader would refuse the folder, which holds nothing that needs it
        raise InputError(
            path,
            rule="our own format is for heads with a Markov head or a confidence head, which the "
            "others have no place for",
            got="one without",
            next_step="use --to vllm",
        )
    aux_layers = list(cfg.aux_hidden_state_layers)
    if aux_layers != sorted(set(aux_layers)):
        raise InputError(
            path,
            rule="vLLM collects aux hidden states once each and in layer order: ids must ascend",
            got=aux_layers,
            next_step=f"train a head with aux_hidden_state_layers {sorted(set(aux_layers))}",
        )
    if cfg.predicts_features and (cfg.qk_norm or checkpoint_format != "vllm"):
        # llama_eagle.py is made of Llama's layers; and the speculators format has EAGLE-1 under
        # other names, which vLLM does not read
        got = "norms of queries and keys" if cfg.qk_norm else "an EAGLE-1 head"
        raise InputError(
            path,
            rule="vLLM reads EAGLE-1 heads of Llama layers in the vllm format alone",
            got=got,
            next_step="train without head.qk_norm" if cfg.qk_norm else "use --to vllm",
        )
    if cfg.predicts_features and set(cfg.windows) - {None}:
        # llama.py takes an EAGLE-1 head's layers for its target's, and finds no layer_types of them
        raise InputError(
            path,
            rule="vLLM's EAGLE-1 heads have no sliding window",
            got=cfg.windows,
            next_step="train without head.sliding_window, or with task: eagle3",
        )
    if cfg.qk_norm and checkpoint_format in SERVED_FORMATS and (name := _output_bias(head)):
        raise InputError(
            path,
            rule="vLLM's layers with norms of queries and keys have no bias of the output, and it "
            "says nothing where a head has one",
            got=name,
            next_step="train the head without this bias, or with zeros in it",
        )
    if len(set(cfg.windows)) > 1:
        # vLLM 0.32: "All drafting layers should belong to the same kv cache group"
        raise InputError(
            path,
            rule="vLLM drafts with one cache: all layers have one sliding window, or none",
            got=cfg.windows,
            next_step="train a head whose layers have the same window",
        )
    head.check_written_dtype(path, dtype)
    if not cfg.qk_norm and cfg.dim % cfg.heads:
        raise InputError(
            path,
            rule="transformers' LlamaConfig wants a width that its heads divide",
            got=f"{cfg.dim} and {cfg.heads}",
            next_step="train a head with qk_norm, or with a number of heads that divides its width",
        )
    if checkpoint_format == "speculators":
        _refuse_inexpressible_in_speculators(cfg, path, k)


def _output_bias(head: HeadState) -> str | None:
    """The first bias of an output of attention that is not zero."""
    names = (name for name in head.tensors if name.endswith("self_attn.o_proj.bias"))
    return next((name for name in names if np.asarray(head.tensors[name]).any()), None)


def _refuse_inexpressible_in_speculators(cfg: HeadConfig, path: str | Path, k: int | None) -> None:
    if cfg.norm_before_fc and cfg.fc_norm:
        raise InputError(
            path, "speculators takes norm_before_fc or fc_norm, not both", "both", "use --to vllm"
        )
    ignored = [name for name in ("fc_norm", "norm_output") if getattr(cfg, name)]
    if cfg.parallel and ignored:
        raise InputError(
            path,
            rule="vLLM's reading of a speculators peagle folder ignores some options",
            got=", ".join(ignored),
            next_step="use --to vllm",
        )
    if k is None:
        raise InputError(path, "the speculators format carries K", "none", "give it with -k")


def _refuse_shared(
    head: HeadState, path: str | Path, checkpoint_format: str, own_embedding: bool
) -> None:
    """Raises InputError for a speculators folder without what speculators 0.9 reads as zeros.

    vLLM takes the target's in its place.
    """
    if checkpoint_format != "speculators":
        return
    if head.shares_embedding or not own_embedding:
        raise InputError(
            path,
            rule="the speculators format has its own embedding",
            got="a shared one",
            next_step="give --target, or use --to vllm",
        )
    if head.shares_lm_head:
        raise InputError(
            path,
            rule="the speculators format has its own lm_head",
            got="a shared one",
            next_step="use --to vllm",
        )


def _vocab_tables(head: HeadState, identity_d2t: bool) -> dict[str, np.ndarray]:
    """`d2t` and `t2d` of a reduced vocabulary; at the full one those that `identity_d2t` wants."""
    cfg = head.config
    if cfg.draft_vocab != cfg.vocab:
        if identity_d2t:
            raise InputError(
                "--identity-d2t",
                rule="only a head of the full vocabulary has an identity d2t",
                got=cfg.draft_vocab,
                next_step="leave out --identity-d2t",
            )
        ids = np.arange(cfg.draft_vocab) + np.asarray(head.tensors["d2t"])
        d2t, t2d = draft_vocab.tables(ids, cfg.vocab)
        return {"d2t": d2t, "t2d": t2d}
    if not identity_d2t:
        return {}
    if "d2t" not in head.left_out:
        rule = "the source must have had d2t, or an earlier conversion must have left it out"
        raise InputError("--identity-d2t", rule, "neither", "leave out --identity-d2t")
    d2t, t2d = draft_vocab.tables(np.arange(cfg.vocab), cfg.vocab)
    return {"d2t": d2t, "t2d": t2d} if "t2d" in head.left_out else {"d2t": d2t}
