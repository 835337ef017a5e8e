"""Folders of target models, of every family and storage format: read, written, converted."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.checkpoints.target_tensors import (
    TEXT_PART,
    check_format,
    quantization_of,
    text_part,
    without_quantization,
)
from peagle_jax.layers.fp8 import quantize_linears
from peagle_jax.provenance import versions
from peagle_jax.targets import gpt_oss, qwen3, sharding
from peagle_jax.targets.config import TargetConfig, read_stop_ids
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
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "embed_tokens.weight",
)
LM_HEADS = ("lm_head.weight",)


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """What a draft head's folder may need to know of its target, of any family, supported or not.

    Attributes:
      layers: how many there are.
      architecture: for example "Qwen3ForCausalLM"; this and the next are None where the config does
        not say.
      dim: width of the hidden states.
      vocab: how many tokens there are.
    """

    layers: int
    architecture: str | None = None
    dim: int | None = None
    vocab: int | None = None


def read_facts(path: str | Path) -> TargetFacts:
    """Shape and architecture, from a target's config.json alone.

    Raises:
      InputError: there is none, or it is a draft head's.
    """
    where = weights.find_folder(path, ["config.json"]) / "config.json"
    raw = weights.read_json(where)
    fields = weights.Fields(raw, where)
    refuse_heads(raw, where)
    text_fields = fields.child("text_config") if raw.get("text_config") else fields
    architectures = fields.get_strs("architectures", [])
    return TargetFacts(
        text_fields.get_int("num_hidden_layers"),
        architectures[0] if architectures else None,
        text_fields.get_int("hidden_size", None),
        text_fields.get_int("vocab_size", None),
    )


def context_of(folder: str | None) -> int | None:
    """max_position_embeddings of a target; None where it is not on this disk, or does not say."""
    config = Path(folder or "") / "config.json"
    try:
        if folder is None or not config.is_file():
            return None
    except OSError:  # a name too long, a folder that may not be read
        return None
    raw = weights.read_json(config)
    text = raw.get("text_config")
    context = (text if isinstance(text, dict) else raw).get("max_position_embeddings")
    return context if type(context) is int else None


def load_embedding(path: str | Path) -> weights.Tensor:
    """A target's token embedding [V D] alone, of any family; it is read when it is used.

    Raises:
      InputError: the folder holds no such matrix.
    """
    raw = weights.read_json(weights.find_folder(path) / "config.json")
    # of families that are not supported the config is not understood, but for this
    parts = [one for one in (raw, raw.get("text_config")) if isinstance(one, Mapping)]
    ties = [one.get("tie_word_embeddings") for one in parts]
    return _load_matrix(path, (*EMBEDDINGS, *LM_HEADS) if any(ties) else EMBEDDINGS)


def load_lm_head(path: str | Path) -> weights.Tensor:
    """A target's output matrix [V D] alone; the embedding where the two are tied.

    Raises:
      InputError: the folder holds no such matrix.
    """
    where = weights.find_folder(path) / "config.json"
    _, config = read_config(weights.read_json(where), where=where)
    return _load_matrix(path, (*LM_HEADS, *EMBEDDINGS) if config.tied_embeddings else LM_HEADS)


def _load_matrix(path: str | Path, names: Sequence[str]) -> weights.Tensor:
    """The first of `names` that a target's folder has; it is read when it is used."""
    folder = weights.find_folder(path)
    tensors = weights.dequantize(
        weights.open_folder(folder), weights.read_json(folder / "config.json"), folder
    ).tensors
    matrix = next((tensors[name] for name in names if name in tensors), None)
    if matrix is None or len(matrix.shape) != 2 or matrix.dtype not in weights.FLOATING:
        raise InputError(
            folder,
            rule=f"the target must hold {names[0]}",
            got="no such matrix",
            next_step="name a folder that holds the whole target",
        )
    return matrix


def target_hash(folder: Path) -> str:
    """A hash of config.json and of the beginning of every tensor.

    Not of all bytes: that would read every weight to find out that nothing is left to do.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, tensor in sorted(weights.open_folder(folder).items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        beginning = np.ascontiguousarray(np.asarray(tensor).reshape(-1)[:256])
        digest.update(beginning.view(np.uint8).tobytes())
    return digest.hexdigest()[:16]


def load_target(
    path: str | Path,
    *,
    aux_hidden_state_layers: Sequence[int] | None = None,
    dtype: DTypeLike = jnp.float32,
    fp8: bool = False,
    mxfp4: str = "packed",
    kv_cache_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """Loads a target from a Hugging Face folder of a supported family.

    Args:
      path: folder with config.json and safetensors weights (FP8 with its scales and MXFP4 experts
        too), or a hub id.
      aux_hidden_state_layers: the layers whose hidden states a draft head reads, in vLLM's
        numbering (id i is the input of layer i, 0 the embedding); None means (2, L//2, L-3).
      dtype: of weights, and of activations on a GPU; on a CPU activations are float32.
      fp8: matrices in float8 with scales: those that the folder has in float8, or else all that
        layers/fp8.py names, quantized while they are read; everything else in `dtype`.
      mxfp4: "packed" keeps experts that are stored in 4 bits as they are and decodes those that
        are used; "plain" stores them in `dtype`.
      kv_cache_dtype: of cached keys and values, for example `jnp.float8_e4m3fn`; None: what
        suits the weights (`layers.default_cache_dtype`).
      mesh: devices with an axis "model", over which heads, MLPs and experts are spread
        (targets/sharding.py). Every device reads its own slices from the files, and no process
        reads another's. None: the default device.

    Returns:
      The target: a `TargetConfig`, and its parameters.

    Raises:
      InputError: the folder is missing, damaged, of another family, or does not fit its own config.
    """
    if mxfp4 not in ("packed", "plain"):
        raise InputError("mxfp4", "must be packed or plain", mxfp4, "use packed")
    folder = weights.find_folder(path)
    family, config, tensors = _open(
        folder, aux_hidden_state_layers, dtype, keep_packed=mxfp4 == "packed"
    )
    if kv_cache_dtype is not None:
        config = dataclasses.replace(config, cache_dtype=jnp.dtype(kv_cache_dtype))
    placement = None if mesh is None else sharding.placement(config, mesh)
    make, table = _module_maker(family, config), family.table(config)
    if fp8:
        if mesh is not None:
            raise InputError(
                "fp8",
                rule="one device holds the whole of an FP8 target",
                got=f"a mesh of {mesh.size}",
                next_step="leave out fp8, or --tensor-parallel-size and --data-parallel-size",
            )
        stored = {
            name.replace(TEXT_PART, "model.", 1): t
            for name, t in weights.open_folder(folder).items()
        }
        make, tensors, table = quantize_linears(make, tensors, table, stored)
    target = weights.load_params(make, config, tensors, table, folder, placement)
    _check_output_matrix(target, folder)
    return target


def _check_output_matrix(target: Model, folder: Path) -> None:
    """Raises InputError where the matrix that gives the logits has NaN or infinity.

    Decoding notices such numbers in hidden states, which all other weights pass through. Of logits
    it knows the argmax alone, and would write the token of a damaged column for ever.
    """
    output = target.params.get("lm_head") or {"table": target.params["embed"]["table"]}
    for array in jax.tree.leaves(output):
        if jnp.issubdtype(array.dtype, jnp.floating) and not _is_finite(array):
            raise InputError(
                folder,
                rule="the output matrix (lm_head, or the embedding that is shared with it) must "
                "be free of NaN and infinity",
                got="some",
                next_step="copy the weights again, and compare their checksums",
            )


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _module_maker(family: Family, config: TargetConfig) -> Callable[[], nnx.Module]:
    """A function that makes the target's module, as `weights.load_params` wants it."""

    def make() -> nnx.Module:
        return family.module(config, rngs=nnx.Rngs(0))

    return make


def _open(
    folder: Path,
    aux_hidden_state_layers: Sequence[int] | None,
    dtype: DTypeLike,
    *,
    keep_packed: bool,
) -> tuple[Family, TargetConfig, dict[str, weights.Tensor]]:
    """Opens a folder of a supported family.

    Returns:
      The family, the configuration, and the tensors under the text model's own names, which are
      read when they are asked for.
    """
    where = folder / "config.json"
    hf = weights.read_json(where)
    family, config = read_config(
        hf, aux_hidden_state_layers=aux_hidden_state_layers, dtype=dtype, where=where
    )
    config = dataclasses.replace(config, stop_ids=_stop_ids(config, folder))
    check_format(hf, where)
    about_scales = {"quantization_config": quantization_of(hf) or {}}
    tensors = weights.dequantize(weights.open_folder(folder), about_scales, folder).tensors
    is_packed = isinstance(config, gpt_oss.GptOssConfig) and weights.mxfp4.packed_names(tensors)
    if keep_packed and is_packed:
        config = dataclasses.replace(config, packed=True)
    else:
        tensors = weights.mxfp4.unpack(tensors, folder)
    if config.layers > len(tensors):  # before a table of so many layers is made
        raise InputError(
            folder,
            rule="num_hidden_layers must be what the weights hold",
            got=f"{config.layers} with {len(tensors)} tensors",
            next_step="use the config.json that came with these weights",
        )
    unused = family.unused(config) if family.unused else frozenset()
    return family, *text_part(tensors, unused, config, folder)


def _stop_ids(config: TargetConfig, folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's where it has any, as in transformers."""
    path = folder / "generation_config.json"
    ids = read_stop_ids(weights.read_json(path), path) if path.exists() else ()
    return ids or config.stop_ids


def convert_folder(
    src: Path,
    dst: Path,
    *,
    dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:
    """Writes a target's folder in another dtype or other shards, tensor by tensor.

    Configuration and tokenizer stay as they are.

    Args:
      src: a folder of a supported family.
      dst: the folder to write; it appears whole or not at all.
      dtype: of the floating-point tensors; None keeps what each has, but FP8 needs a choice.
      metadata: provenance, for the safetensors header.
      max_shard_bytes: splits the weights into files of at most so many bytes.
      on_bytes: called with the bytes written so far and the bytes of all tensors.

    Raises:
      InputError: the source is damaged or of another family, or FP8 and `dtype` is not given.
    """
    hf = weights.read_json(src / "config.json")
    family, config, text = _open(src, None, dtype or np.float32, keep_packed=dtype is None)
    weights.check_tensors(_module_maker(family, config), text, family.table(config), src)
    dequantized = weights.dequantize(weights.open_folder(src), hf, src)
    tensors = dequantized.tensors
    if dtype is not None:
        tensors = weights.cast(weights.mxfp4.unpack(tensors, src), dtype)
        hf = hf | {"dtype": np.dtype(dtype).name}
        hf.pop("torch_dtype", None)  # the same key, before transformers 5
    elif dequantized.quantized:
        raise InputError(
            src,
            rule="an FP8 target is written in a dtype of your choice",
            got="none",
            next_step="give --dtype bfloat16 or float32",
        )
    if dtype is not None or not weights.mxfp4.packed_names(tensors):
        hf = without_quantization(hf)
    if config.tied_embeddings:
        # vLLM wants the matrix under this name
        is_part = any(name.startswith(TEXT_PART) for name in tensors)
        stored = next((name for name in EMBEDDINGS if name in tensors), EMBEDDINGS[is_part])
        matrix = tensors[stored if stored in tensors else LM_HEADS[0]]
        tensors = {name: tensor for name, tensor in tensors.items() if name not in LM_HEADS}
        tensors[stored] = matrix
    elif read_config(hf, where=src / "config.json")[1].tied_embeddings:
        hf = hf | {"tie_word_embeddings": False}  # two matrices that differ are stored
    _check_tokenizer_files(src)
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
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes a target's folder, which transformers and vLLM load; it appears whole or not at all.

    Args:
      target: a target of any family.
      path: the folder to write.
      dtype: of the floating-point tensors.
      tokenizer_from: a folder whose tokenizer files are copied.
      metadata: provenance, for the safetensors header.
      max_shard_bytes: splits the weights into files of at most so many bytes; None writes one.

    Raises:
      InputError: the target's matrices are FP8, or the folder cannot be written.
    """
    family = next(f for f in TARGETS.values() if isinstance(target.config, f.config))
    tensors = weights.cast(
        weights.export_params(target.params, family.table(target.config)), np.dtype(dtype)
    )
    with weights.new_folder(Path(path)) as folder:
        weights.write_folder(
            folder,
            _export_config(target.config, np.dtype(dtype).name),
            tensors,
            {"writer": versions(), **(metadata or {})},
            max_shard_bytes,
        )
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), folder)


def _export_config(config: TargetConfig, dtype: str) -> dict:
    """The checkpoint's own config.json again; of a model made here, one that says the same."""
    if config.source is None:
        assert isinstance(config, qwen3.Qwen3Config)  # the only family that is trained here
        return qwen3.to_hf(config, dtype)
    hf = json.loads(config.source)
    if "text_config" in hf:  # our tensors carry the text model's names
        text_model = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
        hf = hf["text_config"] | text_model
    # those of generation_config.json, which may not be there any more
    if config.stop_ids and read_stop_ids(hf, "config.json") != config.stop_ids:
        hf["eos_token_id"] = list(config.stop_ids)
    if "tie_word_embeddings" in hf or not config.tied_embeddings:
        hf["tie_word_embeddings"] = config.tied_embeddings
    hf["dtype"] = dtype
    hf.pop("torch_dtype", None)
    return hf if getattr(config, "packed", False) else without_quantization(hf)


def _check_tokenizer_files(src: Path) -> None:
    """Raises InputError where a file that will be copied is a link out of its folder."""
    for name in TOKENIZER_FILES:
        if (src / name).exists() and not weights.is_inside(src, src / name):
            rule = "what is copied must lie in the folder itself"
            got, next_step = f"{name}, a link to elsewhere", f"copy {name} into the folder"
            raise InputError(src, rule, got, next_step)


def _copy_tokenizer(src: Path, dst: Path) -> None:
    _check_tokenizer_files(src)
    for name in TOKENIZER_FILES:
        if (src / name).exists():
            shutil.copy(src / name, dst / name)
