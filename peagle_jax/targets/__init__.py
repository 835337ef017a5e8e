"""Target models: one file per family, chosen by `model_type` in the checkpoint's config.json."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.targets import qwen3
from peagle_jax.types import InputError, Model

TARGETS = {"qwen3": (qwen3.Qwen3Config, qwen3.Qwen3, qwen3.table, qwen3.to_hf)}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def load_target(path: str | Path, *, taps: Sequence[int] | None = None, dtype: DTypeLike = jnp.float32) -> Model:
    """Loads a Hugging Face folder of a supported family.

    Args:
      path: folder with config.json and safetensors weights.
      taps: hidden states to tap, in vLLM's numbering (id i is the input of layer i); None means (2, L//2, L-3).
      dtype: of weights and activations.

    Raises:
      InputError: the folder is missing, damaged, of another family, or does not fit its own config.
    """
    folder = Path(path)
    hf = weights.read_json(folder / "config.json")
    if hf.get("model_type") not in TARGETS:
        raise InputError(
            folder / "config.json", f"model_type must be one of {', '.join(TARGETS)}", hf.get("model_type"), "use another target"
        )
    make_config, module, table, _ = TARGETS[hf["model_type"]]
    taps = None if taps is None else tuple(taps)
    config = make_config.from_hf(hf, taps=taps, dtype=dtype, where=str(folder / "config.json"))
    if (folder / "generation_config.json").exists():  # chat models list further stop tokens there, which vLLM honours
        more = weights.read_json(folder / "generation_config.json").get("eos_token_id")
        more = more if isinstance(more, list) else [] if more is None else [more]
        config = dataclasses.replace(config, stop_ids=(*config.stop_ids, *(t for t in more if t not in config.stop_ids)))
    tensors = weights.open_folder(folder)
    if config.tied_embeddings:  # some writers store the tied matrix twice
        tensors = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    return weights.load(lambda: module(config, rngs=nnx.Rngs(0)), config, tensors, table(config), folder)


def save_target(
    target: Model, path: str | Path, *, dtype: DTypeLike = jnp.float32, tokenizer_from: Path | None = None, metadata=None,
    max_shard_bytes: int | None = None,
) -> None:  # fmt: skip
    """Writes a folder that transformers and vLLM load; appears whole or not at all. One file, or shards of at most `max_shard_bytes`."""
    _, _, table, to_hf = next(t for t in TARGETS.values() if isinstance(target.config, t[0]))
    tensors = weights.cast(weights.export(target.params, table(target.config)), np.dtype(dtype))
    with weights.new_folder(Path(path)) as folder:
        weights.write_folder(folder, to_hf(target.config, np.dtype(dtype).name), tensors, metadata or {}, max_shard_bytes)
        for name in TOKENIZER_FILES:
            if tokenizer_from is not None and (Path(tokenizer_from) / name).exists():
                shutil.copy(Path(tokenizer_from) / name, folder / name)
