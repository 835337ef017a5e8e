"""The registry of target families, by `model_type` of a checkpoint's config.json."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.targets import gemma4, gpt_oss, llama, qwen3, qwen3_moe
from peagle_jax.targets.config import TargetConfig
from peagle_jax.types import InputError


@dataclasses.dataclass(frozen=True)
class Family:
    config: type[TargetConfig]
    module: type[nnx.Module]
    table: Callable[..., weights.ParamTable]
    unused: Callable[..., frozenset[str]] | None = (
        None  # names a checkpoint may hold that the model has no use for
    )


GEMMA4 = Family(gemma4.Gemma4Config, gemma4.Gemma4, gemma4.table, gemma4.unused)
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
    where="config.json",
):
    """(family, config) of a checkpoint's config.json.

    Raises:
      InputError: a model_type that is not supported, or options that are not computed.
    """
    kind = weights.Fields(hf, where).get_str("model_type", None)
    refuse_heads(hf, where)
    if kind not in TARGETS:
        raise InputError(
            where, f"model_type must be one of {', '.join(TARGETS)}", kind, "use another target"
        )
    family = TARGETS[kind]
    return family, family.config.from_hf(
        hf,
        aux_hidden_state_layers=None
        if aux_hidden_state_layers is None
        else tuple(aux_hidden_state_layers),
        dtype=dtype,
        where=str(where),
    )


def refuse_heads(raw: Mapping, where) -> None:
    """Draft heads call themselves llama or qwen3 too."""
    if "speculators_model_type" in raw or "draft_vocab_size" in raw:
        raise InputError(where, "must be a target's config", "a draft head's", "name the target")
