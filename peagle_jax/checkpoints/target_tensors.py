"""What a target's folder may hold, and under which names: quantizations, tied matrices, experts."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from peagle_jax import weights
from peagle_jax.targets import qwen3_moe
from peagle_jax.targets.config import TargetConfig
from peagle_jax.types import InputError
from peagle_jax.weights.tensors import release

# A multimodal checkpoint holds its text model under TEXT_PART, and other models beside it.
TEXT_PART = "model.language_model."
OTHER_PARTS = (
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUANTIZATIONS = ("quantization_config", "compression_config")
# of modelopt: one scale for a matrix, or one for each row
FLOAT8_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
FUSED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def quantization_of(hf: Mapping) -> object:
    """What config.json says of a quantization, under each of its names; None for nothing."""
    text = hf.get("text_config")
    for raw in (hf, text if isinstance(text, Mapping) else {}):
        for name in QUANTIZATIONS:
            if raw.get(name):
                return raw[name]
    return None


def without_quantization(hf: Mapping) -> dict:
    """The config without what `quantization_of` finds."""
    kept = {name: x for name, x in hf.items() if name not in QUANTIZATIONS}
    if isinstance(text := kept.get("text_config"), Mapping):
        kept["text_config"] = {name: x for name, x in text.items() if name not in QUANTIZATIONS}
    return kept


def stored_format(hf: Mapping) -> str | None:
    """How config.json says that matrices are stored.

    Returns:
      "plain", "fp8" or "mxfp4"; None for another quantization, which cannot be read.
    """
    quantization = quantization_of(hf)
    if not quantization:
        return "plain"
    if not isinstance(quantization, Mapping):
        return None
    method = str(quantization.get("quant_method")).lower().replace("_", "-")
    sparsity = quantization.get("sparsity_config")
    if method == "compressed-tensors" and not quantization.get("config_groups"):
        # pruned matrices that are stored whole
        is_dense = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"
        return "plain" if is_dense else None
    inner = quantization.get("quantization")  # as modelopt writes it by itself
    algorithm = (inner if isinstance(inner, Mapping) else quantization).get("quant_algo")
    is_float8 = (
        method in ("fp8", "fbgemm-fp8")
        or str(algorithm).upper() in FLOAT8_ALGORITHMS
        or method == "compressed-tensors"
        and has_float8_groups(quantization)
        or method == "quark"
        and _is_quark_float8(quantization)
    )
    if is_float8:
        return "fp8"
    return "mxfp4" if method == "mxfp4" else None


def has_float8_groups(quantization: Mapping) -> bool:
    """Whether every group of compressed-tensors that stores weights has 8-bit floats."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        return False
    # a group without weights is of keys and values
    stored = [group["weights"] for group in groups.values() if group.get("weights")]
    return bool(stored) and all(
        isinstance(w, Mapping) and (w.get("type"), w.get("num_bits")) == ("float", 8)
        for w in stored
    )


def _is_quark_float8(quantization: Mapping) -> bool:
    """Whether Quark's setting for all layers, and each for some, has weights of E4M3."""
    every, some = quantization.get("global_quant_config"), quantization.get("layer_quant_config")
    settings = [every, *(some.values() if isinstance(some, Mapping) else ())]
    weights_of = [one.get("weight") if isinstance(one, Mapping) else None for one in settings]
    return all(isinstance(w, Mapping) and w.get("dtype") == "fp8_e4m3" for w in weights_of)


def check_format(hf: Mapping, where: Path) -> None:
    """Checks that a target's matrices are stored in a way that can be read.

    Args:
      hf: config.json.
      where: its path, for errors.

    Raises:
      InputError: they are not, as with AWQ, GPTQ, bitsandbytes, NVFP4 or BitNet, of which some look
        like plain matrices.
    """
    if stored_format(hf) is None:
        quantization = quantization_of(hf)
        names = "quant_method", "quant_algo", "format"
        said = quantization if isinstance(quantization, Mapping) else {}
        got = ", ".join(str(said[name]) for name in names if said.get(name)) or repr(quantization)
        raise InputError(
            where,
            rule="a target may be stored plain, as MXFP4, or as float8 (fp8, fbgemm_fp8, modelopt, "
            "quark, compressed-tensors of 8-bit floats)",
            got=f"quantization_config of {got[:80]}",
            next_step="use the checkpoint that this one was quantized from, or its FP8 version",
        )


def text_part(
    tensors: Mapping[str, weights.Tensor],
    unused: frozenset[str],
    config: TargetConfig,
    folder: Path,
) -> tuple[TargetConfig, dict[str, weights.Tensor]]:
    """Without the other parts of a multimodal checkpoint, and without what no layer uses.

    Args:
      tensors: as they are stored, without quantization.
      unused: names of the latter.
      config: of the target, for shapes.
      folder: for errors.

    Returns:
      The config, whose matrices are not tied where two that differ are stored; and the tensors.
    """
    if any(name.startswith(TEXT_PART) for name in tensors):
        tensors = {
            name.replace(TEXT_PART, "model.", 1): t
            for name, t in tensors.items()
            if not name.startswith(OTHER_PARTS)
        }
    # frequencies that older writers saved, as with Llama 2; the config gives them
    tensors = {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in unused}
    if isinstance(config, qwen3_moe.Qwen3MoeConfig):
        sizes = config.experts, config.dim, config.expert_dim
        tensors = one_by_one(tensors, *sizes, folder)
    if config.tied_embeddings:
        tied = as_tied(tensors, (config.vocab, config.dim))
        if tied is None:
            return dataclasses.replace(config, tied_embeddings=False), tensors
        tensors = tied
    return config, tensors


def as_tied(
    tensors: dict[str, weights.Tensor], shape: tuple[int, int]
) -> dict[str, weights.Tensor] | None:
    """The tensors of a target whose output matrix is its embedding, which is stored once.

    Some writers store it twice, or under the other name.

    Args:
      shape: of both matrices.

    Returns:
      None where the two are stored and differ, as where an adapter was merged: transformers 5.24
      and vLLM 0.32 then use both, whatever `tie_word_embeddings` says.
    """
    if LM_HEAD not in tensors:
        return tensors
    if EMBEDDING not in tensors:
        return {EMBEDDING if name == LM_HEAD else name: x for name, x in tensors.items()}
    both = tensors[LM_HEAD], tensors[EMBEDDING]
    if all(tuple(x.shape) == shape for x in both) and not _are_equal(*both):
        return None
    return {name: x for name, x in tensors.items() if name != LM_HEAD}


def _are_equal(a: weights.Tensor, b: weights.Tensor) -> bool:
    """Whether two matrices of one shape are the same, some rows at a time."""
    one, other = np.asarray(a), np.asarray(b)
    step = max(1, (1 << 24) // max(1, one.shape[-1]))

    def are_equal_from(i: int) -> bool:
        parts = one[i : i + step], other[i : i + step]
        if one.dtype == other.dtype:  # bits compare four times as fast as bfloat16
            parts = tuple(np.ascontiguousarray(x).view(np.uint8) for x in parts)
        return np.array_equal(parts[0], parts[1])

    try:
        return all(are_equal_from(i) for i in range(0, len(one), step))
    finally:
        release(a)
        release(b)


def one_by_one(
    tensors: Mapping[str, weights.Tensor], experts: int, dim: int, width: int, folder: Path
) -> dict[str, weights.Tensor]:
    """Experts that are stored together, as three matrices each, as most checkpoints have them.

    transformers 5 has `gate_up_proj` [E 2I D] and `down_proj` [E D I], which it writes with
    `save_original_format=False`. Nothing is copied.

    Args:
      experts, dim, width: E, D and I.

    Raises:
      InputError: such tensors are of another shape or float8, or an expert is stored twice.
    """
    result = {}
    for name, tensor in tensors.items():
        match = FUSED_EXPERTS.fullmatch(name)
        if match is None:
            result.setdefault(name, tensor)
            continue
        is_gate_up = match[2] == "gate_up_proj"
        want = (experts, 2 * width, dim) if is_gate_up else (experts, dim, width)
        is_twice = f"{match[1]}.0.down_proj.weight" in tensors
        if not isinstance(tensor, np.ndarray) or tuple(tensor.shape) != want or is_twice:
            kind = "numbers" if isinstance(tensor, np.ndarray) else "float8 numbers, decoded"
            raise InputError(
                folder,
                rule=f"{name} must hold plain numbers {list(want)}, and the experts once",
                got=f"{kind} {list(tensor.shape)}{' beside single experts' if is_twice else ''}",
                next_step="save the experts one by one (save_pretrained with its defaults)",
            )
        for e, expert in enumerate(tensor):
            parts = (
                {"gate": expert[:width], "up": expert[width:]} if is_gate_up else {"down": expert}
            )
            for part, matrix in parts.items():
                result[f"{match[1]}.{e}.{part}_proj.weight"] = matrix
    return result
