"""Folders of target models, of every family and format: read, written, converted."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.layers.fp8 import quantize_linears
from peagle_jax.provenance import versions
from peagle_jax.targets import gpt_oss, qwen3, sharding
from peagle_jax.targets.config import TargetConfig
from peagle_jax.targets.families import TARGETS, Family, read_config, refuse_heads
from peagle_jax.types import InputError, Model

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
TEXT_PART = "model.language_model."  # of a multimodal checkpoint, whose other parts are
OTHER_PARTS = (
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "embed_tokens.weight",
)


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """What a draft head's folder may need to know of its target; of any family, supported or not."""

    layers: int
    architecture: str | None


def read_facts(path: str | Path) -> TargetFacts:
    """From a target's config.json alone.

    Raises:
      InputError: there is none, or it is a draft head's.
    """
    where = weights.find_folder(path, ["config.json"]) / "config.json"
    raw = weights.read_json(where)
    fields = weights.Fields(raw, where)
    refuse_heads(raw, where)
    inner = fields.child("text_config") if raw.get("text_config") else fields
    return TargetFacts(
        inner.get_int("num_hidden_layers"), next(iter(fields.get_strs("architectures", [])), None)
    )


def load_embedding(path: str | Path) -> weights.Tensor:
    """A target's token embedding [V D] alone, of any family.

    Raises:
      InputError: the folder holds no such matrix.
    """
    folder = weights.find_folder(path)
    tensors = weights.dequantize(
        weights.open_folder(folder), weights.read_json(folder / "config.json"), folder
    ).tensors
    found = next((tensors[name] for name in EMBEDDINGS if name in tensors), None)
    if found is None or len(found.shape) != 2 or found.dtype not in weights.FLOATING:
        raise InputError(
            folder, f"the target must hold {EMBEDDINGS[0]}", "no such matrix", "name another target"
        )
    return found


def target_hash(folder: Path) -> str:
    """Not of all bytes: that would read every weight to find out that nothing is left to do."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, tensor in sorted(weights.open_folder(folder).items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        digest.update(np.ascontiguousarray(tensor.reshape(-1)[:256]).view(np.uint8))
    return digest.hexdigest()[:16]


def load_target(
    path: str | Path,
    *,
    aux_hidden_state_layers: Sequence[int] | None = None,
    dtype: DTypeLike = jnp.float32,
    fp8: bool = False,
    mxfp4: str = "packed",
    mesh: Mesh | None = None,
) -> Model:
    """Loads a Hugging Face folder of a supported family.

    Args:
      path: folder with config.json and safetensors weights (FP8 with its scales too, MXFP4 experts), or a hub id.
      taps: hidden states to tap, in vLLM's numbering (id i is the input of layer i); None means (2, L//2, L-3).
      dtype: of weights and activations.
      fp8: matrices in float8 with scales, as the folder has them or quantised while they are read (layers/fp8.py says which);
        everything else in `dtype`.
      mxfp4: "packed" keeps experts that are stored so in 4 bits and decodes those that are used, "plain" stores them in `dtype`.
      mesh: devices with an axis "model", over which heads, MLPs and experts are spread (targets/sharding.py); every device
        reads its own slices from the files, and no process reads another's. None: the default device.

    Raises:
      InputError: the folder is missing, damaged, of another family, or does not fit its own config.
    """
    if mxfp4 not in ("packed", "plain"):
        raise InputError("mxfp4", "must be packed or plain", mxfp4, "choose one of them")
    folder = weights.find_folder(path)
    family, config, tensors = _open(
        folder, aux_hidden_state_layers, dtype, keep_packed=mxfp4 == "packed"
    )
    place = None if mesh is None else sharding.placement(config, mesh)
    make, table = lambda: family.module(config, rngs=nnx.Rngs(0)), family.table(config)
    if fp8:
        if mesh is not None:
            raise InputError(
                "fp8",
                "one device holds the whole of an FP8 target",
                "a mesh",
                "leave out one of them",
            )
        stored = {
            name.replace(TEXT_PART, "model.", 1): t
            for name, t in weights.open_folder(folder).items()
        }
        make, tensors, table = quantize_linears(make, tensors, table, stored)
    return weights.load_params(make, config, tensors, table, folder, place)


def _open(
    folder: Path,
    aux_hidden_state_layers: Sequence[int] | None,
    dtype: DTypeLike,
    *,
    keep_packed: bool,
):
    """(family, config, tensors by the text model's own names, read when asked for) of a folder of a supported family."""
    where = folder / "config.json"
    hf = weights.read_json(where)
    family, config = read_config(
        hf, aux_hidden_state_layers=aux_hidden_state_layers, dtype=dtype, where=where
    )
    if (
        folder / "generation_config.json"
    ).exists():  # chat models list further stop tokens there, which vLLM honours
        more = weights.read_json(folder / "generation_config.json").get("eos_token_id")
        more = more if isinstance(more, list) else [] if more is None else [more]
        config = dataclasses.replace(
            config, stop_ids=(*config.stop_ids, *(t for t in more if t not in config.stop_ids))
        )
    tensors = weights.dequantize(weights.open_folder(folder), hf, folder).tensors
    if (
        keep_packed
        and isinstance(config, gpt_oss.GptOssConfig)
        and weights.mxfp4.packed_names(tensors)
    ):
        config = dataclasses.replace(config, packed=True)
    else:
        tensors = weights.mxfp4.unpack(tensors, folder)
    if config.layers > len(tensors):  # before a table of so many layers is made
        got = f"{config.layers} with {len(tensors)} tensors"
        raise InputError(
            folder, "num_hidden_layers must be what the weights hold", got, "mend the config"
        )
    return family, config, _text_part(tensors, family, config)


def _text_part(
    tensors: Mapping[str, weights.Tensor], family: Family, config: TargetConfig
) -> dict[str, weights.Tensor]:
    """Without the other parts of a multimodal checkpoint, and without what no layer uses."""
    if any(name.startswith(TEXT_PART) for name in tensors):
        tensors = {
            n.replace(TEXT_PART, "model.", 1): t
            for n, t in tensors.items()
            if not n.startswith(OTHER_PARTS)
        }
    unused = family.unused(config) if family.unused else frozenset()
    if config.tied_embeddings:  # some writers store the tied matrix twice
        unused |= {"lm_head.weight"}
    return {name: tensor for name, tensor in tensors.items() if name not in unused}


def convert_folder(
    src: Path,
    dst: Path,
    *,
    dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:
    """A target's folder again, tensor by tensor, in another dtype or other shards; its configuration and tokenizer as they are.

    Args:
      dtype: of the floating tensors; None keeps what each has, but FP8 needs a choice.
      on_bytes: told of the bytes written so far, and of all.

    Raises:
      InputError: the source is damaged or of another family, or FP8 without `dtype`.
    """
    hf = weights.read_json(src / "config.json")
    family, config, text = _open(src, None, dtype or np.float32, keep_packed=dtype is None)
    weights.check_tensors(
        lambda: family.module(config, rngs=nnx.Rngs(0)), text, family.table(config), src
    )
    tensors = weights.dequantize(weights.open_folder(src), hf, src)
    quantized, tensors = tensors.quantized, tensors.tensors
    if dtype is not None:
        tensors = weights.cast(weights.mxfp4.unpack(tensors, src), dtype)
        hf = hf | {"dtype": np.dtype(dtype).name}
        hf.pop("torch_dtype", None)  # the same key, before transformers 5
    elif quantized:
        raise InputError(
            src,
            "an FP8 target is written in a dtype of your choice",
            "none",
            "give --dtype bfloat16 or float32",
        )
    if dtype is not None or not weights.mxfp4.packed_names(tensors):
        hf.pop("quantization_config", None)
    if config.tied_embeddings:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    with weights.new_folder(dst) as folder:
        weights.write_folder(
            folder,
            hf,
            tensors,
            {"writer": versions(), **(metadata or {})},
            max_shard_bytes,
            on_bytes,
        )
        _copy_tokenizer(src, folder)


def save_target(
    target: Model,
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    tokenizer_from: Path | None = None,
    metadata=None,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes a folder that transformers and vLLM load; appears whole or not at all. One file, or shards of at most `max_shard_bytes`."""
    family = next(f for f in TARGETS.values() if isinstance(target.config, f.config))
    tensors = weights.cast(
        weights.export_params(target.params, family.table(target.config)), np.dtype(dtype)
    )
    with weights.new_folder(Path(path)) as folder:
        facts = {"writer": versions(), **(metadata or {})}
        weights.write_folder(
            folder,
            _export_config(target.config, np.dtype(dtype).name),
            tensors,
            facts,
            max_shard_bytes,
        )
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), folder)


def _export_config(config: TargetConfig, dtype: str) -> dict:
    """The checkpoint's own config.json again; of a model made here, one that says the same."""
    if config.source is None:
        return qwen3.to_hf(config, dtype)
    hf = json.loads(config.source)
    if "text_config" in hf:  # our tensors carry the text model's names
        stops = {"eos_token_id": list(config.stop_ids)} if config.stop_ids else {}
        hf = (
            hf["text_config"]
            | stops
            | {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
        )
        hf["tie_word_embeddings"] = config.tied_embeddings
    hf["dtype"] = dtype
    drop = (
        {"torch_dtype"}
        if getattr(config, "packed", False)
        else {"torch_dtype", "quantization_config"}
    )
    return {key: value for key, value in hf.items() if key not in drop}


def _copy_tokenizer(src: Path, dst: Path) -> None:
    for name in TOKENIZER_FILES:
        if (src / name).exists():
            shutil.copy(src / name, dst / name)
