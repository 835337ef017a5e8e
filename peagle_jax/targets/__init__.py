"""Target models: one file per family, chosen by `model_type` in the checkpoint's config.json."""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.origin import versions
from peagle_jax.targets import qwen3
from peagle_jax.types import InputError, Model

TARGETS = {"qwen3": (qwen3.Qwen3Config, qwen3.Qwen3, qwen3.table, qwen3.to_hf)}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")


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
    if "speculators_model_type" in raw or "draft_vocab_size" in raw:
        raise InputError(where, "must be a target's config", "a draft head's", "name the target")
    inner = fields.inner("text_config") if raw.get("text_config") else fields
    return TargetFacts(inner.whole("num_hidden_layers"), next(iter(fields.texts("architectures", [])), None))


def load_embedding(path: str | Path) -> weights.Tensor:
    """A target's token embedding [V D] alone, of any family.

    Raises:
      InputError: the folder holds no such matrix.
    """
    folder = weights.find_folder(path)
    tensors = weights.dequantise(weights.open_folder(folder), weights.read_json(folder / "config.json"), folder).tensors
    found = next((tensors[name] for name in EMBEDDINGS if name in tensors), None)
    if found is None or len(found.shape) != 2 or found.dtype not in weights.FLOATING:
        raise InputError(folder, f"the target must hold {EMBEDDINGS[0]}", "no such matrix", "name another target")
    return found


def load_target(path: str | Path, *, taps: Sequence[int] | None = None, dtype: DTypeLike = jnp.float32) -> Model:
    """Loads a Hugging Face folder of a supported family.

    Args:
      path: folder with config.json and safetensors weights (FP8 with its scales too), or a hub id.
      taps: hidden states to tap, in vLLM's numbering (id i is the input of layer i); None means (2, L//2, L-3).
      dtype: of weights and activations.

    Raises:
      InputError: the folder is missing, damaged, of another family, or does not fit its own config.
    """
    folder = weights.find_folder(path)
    config, module, table, tensors = _open(folder, taps, dtype)
    return weights.load(lambda: module(config, rngs=nnx.Rngs(0)), config, tensors, table, folder)


def _open(folder: Path, taps: Sequence[int] | None, dtype: DTypeLike):
    """(config, module class, weight table, tensors read when asked for) of a folder of a supported family."""
    hf = weights.read_json(folder / "config.json")
    kind = weights.Fields(hf, folder / "config.json").text("model_type", None)
    if kind not in TARGETS:
        raise InputError(folder / "config.json", f"model_type must be one of {', '.join(TARGETS)}", kind, "use another target")
    make_config, module, table, _ = TARGETS[hf["model_type"]]
    taps = None if taps is None else tuple(taps)
    config = make_config.from_hf(hf, taps=taps, dtype=dtype, where=str(folder / "config.json"))
    if (folder / "generation_config.json").exists():  # chat models list further stop tokens there, which vLLM honours
        more = weights.read_json(folder / "generation_config.json").get("eos_token_id")
        more = more if isinstance(more, list) else [] if more is None else [more]
        config = dataclasses.replace(config, stop_ids=(*config.stop_ids, *(t for t in more if t not in config.stop_ids)))
    tensors = weights.dequantise(weights.open_folder(folder), hf, folder).tensors
    if config.layers > len(tensors):  # before a table of so many layers is made
        got = f"{config.layers} with {len(tensors)} tensors"
        raise InputError(folder, "num_hidden_layers must be what the weights hold", got, "mend the config")
    if config.tied_embeddings:  # some writers store the tied matrix twice
        tensors = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    return config, module, table(config), tensors


def convert_folder(
    src: Path, dst: Path, *, dtype: str | None = None, metadata: Mapping[str, str] | None = None, max_shard_bytes: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """A target's folder again, tensor by tensor, in another dtype or other shards; its configuration and tokenizer as they are.

    Args:
      dtype: of the floating tensors; None keeps what each has, but FP8 needs a choice.
      on_bytes: told of the bytes written so far, and of all.

    Raises:
      InputError: the source is damaged or of another family, or FP8 without `dtype`.
    """
    hf = weights.read_json(src / "config.json")
    config, module, table, tensors = _open(src, None, dtype or np.float32)
    weights.check(lambda: module(config, rngs=nnx.Rngs(0)), tensors, table, src)
    if dtype is not None:
        tensors, hf = weights.cast(tensors, dtype), hf | {"dtype": np.dtype(dtype).name}
        hf.pop("torch_dtype", None)  # the same key, before transformers 5
    elif hf.get("quantization_config"):
        raise InputError(src, "an FP8 target is written in a dtype of your choice", "none", "give --dtype bfloat16 or float32")
    hf.pop("quantization_config", None)
    with weights.new_folder(dst) as folder:
        weights.write_folder(folder, hf, tensors, {"writer": versions(), **(metadata or {})}, max_shard_bytes, on_bytes)
        _copy_tokenizer(src, folder)


def save_target(
    target: Model, path: str | Path, *, dtype: DTypeLike = jnp.float32, tokenizer_from: Path | None = None, metadata=None,
    max_shard_bytes: int | None = None,
) -> None:  # fmt: skip
    """Writes a folder that transformers and vLLM load; appears whole or not at all. One file, or shards of at most `max_shard_bytes`."""
    _, _, table, to_hf = next(t for t in TARGETS.values() if isinstance(target.config, t[0]))
    tensors = weights.cast(weights.export(target.params, table(target.config)), np.dtype(dtype))
    with weights.new_folder(Path(path)) as folder:
        facts = {"writer": versions(), **(metadata or {})}
        weights.write_folder(folder, to_hf(target.config, np.dtype(dtype).name), tensors, facts, max_shard_bytes)
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), folder)


def _copy_tokenizer(src: Path, dst: Path) -> None:
    for name in TOKENIZER_FILES:
        if (src / name).exists():
            shutil.copy(src / name, dst / name)
