"""What a target's folder may hold, and under which names: quantizations, tied matrices, experts."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from peagle_jax import weights
from peagle_jax.types import InputError

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOAT8_METHODS = ("fp8", "fbgemm_fp8")
FUSED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def stored_format(hf: Mapping) -> str | None:
    """How `quantization_config` says that matrices are stored.

    Returns:
      "plain", "fp8" or "mxfp4"; None for another quantization, which cannot be read.
    """
    quantization = hf.get("quantization_config")
    if not quantization:
        return "plain"
    if not isinstance(quantization, Mapping):
        return None
    method = quantization.get("quant_method")
    if method in FLOAT8_METHODS:
        return "fp8"
    if method == "modelopt" and quantization.get("quant_algo") == "FP8":
        return "fp8"
    if method == "compressed-tensors" and has_float8_groups(quantization):
        return "fp8"
    return "mxfp4" if method == "mxfp4" else None


def has_float8_groups(quantization: Mapping) -> bool:
    """Whether every group of compressed-tensors stores weights as 8-bit floats."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return False
    weights_of = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    return len(weights_of) == len(groups) and all(
        isinstance(w, Mapping) and (w.get("type"), w.get("num_bits")) == ("float", 8)
        for w in weights_of
    )


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
        quantization = hf["quantization_config"]
        is_object = isinstance(quantization, Mapping)
        names = ("quant_method", "quant_algo", "format") if is_object else ()
        said = ", ".join(str(quantization[name]) for name in names if quantization.get(name))
        raise InputError(
            where,
            rule="a target may be stored plain, as MXFP4, or as float8 (fp8, fbgemm_fp8, "
            "modelopt's FP8, compressed-tensors of 8-bit floats)",
            got=f"quantization_config of {said or quantization}",
            next_step="use the checkpoint that this one was quantized from, or its FP8 version",
        )


def as_tied(tensors: dict[str, weights.Tensor], folder: Path) -> dict[str, weights.Tensor]:
    """The tensors of a target whose output matrix is its embedding, which is stored once.

    Some writers store it twice, or under the other name.

    Raises:
      InputError: two different matrices are stored. transformers 5 then takes both, vLLM the
        embedding for both.
    """
    if LM_HEAD not in tensors:
        return tensors
    if EMBEDDING not in tensors:
        return {EMBEDDING if name == LM_HEAD else name: x for name, x in tensors.items()}
    if not _are_equal(tensors[LM_HEAD], tensors[EMBEDDING]):
        raise InputError(
            folder,
            rule=f"with tie_word_embeddings {LM_HEAD} must be {EMBEDDING}",
            got="another matrix",
            next_step="set tie_word_embeddings to false in config.json to use both, as "
            f"transformers does; vLLM would leave {LM_HEAD} out",
        )
    return {name: x for name, x in tensors.items() if name != LM_HEAD}


def _are_equal(a: weights.Tensor, b: weights.Tensor) -> bool:
    """Whether two matrices are the same, row by row."""
    one, other = np.asarray(a), np.asarray(b)
    if one.shape != other.shape:
        return False
    step = max(1, (1 << 24) // max(1, one.shape[-1]))
    return all(
        np.array_equal(one[i : i + step], other[i : i + step]) for i in range(0, len(one), step)
    )


def one_by_one(tensors: Mapping[str, weights.Tensor], folder: Path) -> dict[str, weights.Tensor]:
    """Experts that are stored together, as three matrices each, as most checkpoints have them.

    transformers 5 has `gate_up_proj` [E 2I D] and `down_proj` [E D I], which it writes with
    `save_original_format=False`. Nothing is copied.

    Raises:
      InputError: such tensors are no experts, or are float8.
    """
    result = {}
    for name, tensor in tensors.items():
        match = FUSED_EXPERTS.fullmatch(name)
        if match is None:
            result[name] = tensor
            continue
        is_gate_up = match[2] == "gate_up_proj"
        shape = tuple(tensor.shape)
        if not isinstance(tensor, np.ndarray) or len(shape) != 3 or is_gate_up and shape[1] % 2:
            raise InputError(
                folder,
                rule=f"{name} must be plain numbers [experts, outputs, inputs], of gate and up",
                got=f"{tensor.dtype} {list(shape)}",
                next_step="save the experts one by one (save_pretrained with its defaults)",
            )
        for e, expert in enumerate(tensor):
            parts = {"down": expert}
            if is_gate_up:
                half = shape[1] // 2
                parts = {"gate": expert[:half], "up": expert[half:]}
            for part, matrix in parts.items():
                result[f"{match[1]}.{e}.{part}_proj.weight"] = matrix
    return result
