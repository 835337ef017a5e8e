"""Whose checkpoint format a config.json is in, and what it says of its reader's choices."""

from collections.abc import Mapping
from pathlib import Path

from peagle_jax.weights import Fields

# In the order in which vLLM looks for them, after dflash_config.mask_token_id.
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Of this package's own format, which holds what the others cannot: no other reader knows it.
OWN_ARCHITECTURE = "PeagleJaxDraftHead"
CALIBRATION = "confidence_calibration"
EAGLE1_ARCHITECTURE = "EagleLlamaForCausalLM"
# The writers of these formats name the layer whose OUTPUT the head reads. In the others, as in
# vLLM and speculators, an id names the layer whose INPUT it reads.
COUNTS_OUTPUTS = ("automodel", "specforge")


def detect_format(raw: Mapping) -> str:
    """The checkpoint format of a config.json, told by the keys that only one writer writes.

    Returns:
      "speculators", "automodel", "specforge", "peagle_jax" or, where nothing tells otherwise,
      "vllm".
    """
    architectures = architectures_of(raw)
    if "speculators_model_type" in raw:
        return "speculators"
    if "LlamaEagle3DraftModel" in architectures:
        return "automodel"
    if "PEagleDraftModel" in architectures:
        return "specforge"
    if OWN_ARCHITECTURE in architectures:
        return "peagle_jax"
    return "vllm"


def is_drafter(raw: Mapping) -> bool:
    """Whether a config.json describes a draft head rather than a target."""
    return (
        "speculators_model_type" in raw
        or any("agle" in name for name in architectures_of(raw))  # Eagle3..., PEagle...
        or "draft_vocab_size" in raw
    )


def is_eagle1(raw: Mapping) -> bool:
    """Whether a config.json is an EAGLE-1 head's, as vLLM's llama_eagle.py reads it."""
    return EAGLE1_ARCHITECTURE in architectures_of(raw)


def architectures_of(raw: Mapping) -> list[str]:
    """The names under `architectures`; none where there are none."""
    names = raw.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def names_aux_layers(raw: Mapping, where: str | Path) -> bool:
    """Whether the config says which aux hidden states the head reads."""
    top = Fields(raw, where)
    if is_eagle1(raw):
        return True
    return bool(top.get(AUX_LAYER_IDS, None) or top.child("eagle_config").get(AUX_LAYER_IDS, None))


def may_count_outputs(raw: Mapping, where: str | Path) -> bool:
    """Whether ids of layers stand where SpecForge writes an EAGLE-3 head's, and counts outputs.

    That is in `eagle_config` alone, where P-EAGLE heads for vLLM may have them, too.
    """
    top = Fields(raw, where)
    if detect_format(raw) in COUNTS_OUTPUTS or top.get(AUX_LAYER_IDS, None):
        return False
    return bool(top.child("eagle_config").get(AUX_LAYER_IDS, None))


def names_mask_token(raw: Mapping, where: str | Path) -> bool:
    """Whether the config names the mask token, under any of its keys."""
    if any(raw.get(key) is not None for key in MASK_TOKEN_KEYS):
        return True
    return Fields(raw, where).child("dflash_config").get("mask_token_id", None) is not None
