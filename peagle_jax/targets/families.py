"""The registry of target families, by `model_type` of a checkpoint's config.json."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.layers import Decoder
from peagle_jax.targets import gemma4, gpt_oss, llama, qwen3, qwen3_moe
from peagle_jax.targets.config import TargetConfig
from peagle_jax.targets.gemma4_config import Gemma4Config
from peagle_jax.types import InputError


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family consists of.

    Attributes:
      config: reads a config.json (`from_hf`).
      module: makes the model: `module(config, rngs=rngs)`.
      table: config -> which checkpoint tensor fills which parameter.
      unused: config -> names of tensors that released checkpoints hold and the model does not use;
        None: there are none.
    """

    config: type[TargetConfig]
    module: Callable[..., Decoder]
    table: Callable[..., weights.ParamTable]
    unused: Callable[..., frozenset[str]] | None = None


GEMMA4 = Family(Gemma4Config, gemma4.Gemma4, gemma4.table, gemma4.unused)
TARGETS = {  # by model_type
    "llama": Family(llama.LlamaConfig, llama.Llama, llama.table),
    "qwen3": Family(qwen3.Qwen3Config, qwen3.Qwen3, qwen3.table),
    "qwen3_moe": Family(qwen3_moe.Qwen3MoeConfig, qwen3_moe.Qwen3Moe, qwen3_moe.table),
    "gpt_oss": Family(gpt_oss.GptOssConfig, gpt_oss.GptOss, gpt_oss.table),
    "gemma4": GEMMA4,  # the multimodal model, of which the text part is read
    "gemma4_text": GEMMA4,
}


def read_config(
    hf: Mapping,
    *,
    aux_hidden_state_layers: Sequence[int] | None = None,
    dtype: DTypeLike = jnp.float32,
    where: str | Path = "config.json",
) -> tuple[Family, TargetConfig]:
    """The family and the configuration of a checkpoint's config.json.

    Args:
      hf: the content of config.json.
      aux_hidden_state_layers: which hidden states the model returns for a draft head; None: three,
        as vLLM chooses them (`default_aux_layers`).
      dtype: of weights and activations.
      where: the file, for errors.

    Raises:
      InputError: the model_type is not supported, the config is a draft head's, or it asks for what
        the family's model does not compute.
    """
    model_type = weights.Fields(hf, where).get_str("model_type", None)
    refuse_heads(hf, where)
    if model_type not in TARGETS:
        supported = ", ".join(TARGETS)
        raise InputError(
            where,
            rule=f"model_type must be one of {supported}",
            got=model_type,
            next_step="choose a checkpoint of one of these; docs/targets.md lists the families",
        )
    family = TARGETS[model_type]
    if aux_hidden_state_layers is not None:
        aux_hidden_state_layers = tuple(aux_hidden_state_layers)
    config = family.config.from_hf(
        hf, aux_hidden_state_layers=aux_hidden_state_layers, dtype=dtype, where=str(where)
    )
    return family, config


def refuse_heads(raw: Mapping, where: str | Path) -> None:
    """Raises an InputError for the config of a draft head, whose model_type may be a target's."""
    if "speculators_model_type" in raw or "draft_vocab_size" in raw:
        raise InputError(
            where, "must be a target's config", "a draft head's", "name the target's folder"
        )
