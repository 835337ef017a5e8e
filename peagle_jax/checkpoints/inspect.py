"""What a folder is: a target, a draft head, or a training run; shapes, sizes, taps, what is missing, and what it can be used with."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from peagle_jax import weights
from peagle_jax.checkpoints import config_reading, export_placeholders, param_mapping, runs
from peagle_jax.checkpoints.config_reading import AUX_LAYER_IDS, detect_format, is_drafter
from peagle_jax.checkpoints.head_io import read_head
from peagle_jax.checkpoints.target_io import read_facts
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.placeholders import HIDDEN_DESIGNS, TOKEN_DESIGNS
from peagle_jax.targets import TARGETS
from peagle_jax.types import InputError

OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias")
ANY_LAYERS = 8  # of the target, where only the number of taps matters
CHECKPOINT_FORMATS = {
    "vllm": "A, vLLM and AWS",
    "speculators": "B, speculators",
    "automodel": "C, NeMo Automodel",
    "specforge": "D, SpecForge",
}
# (width, vocabulary) -> targets that heads were published for; from their config.json
KNOWN = {
    (2880, 201088): "openai/gpt-oss-20b (24 layers), openai/gpt-oss-120b (36)",
    (2048, 151936): "Qwen/Qwen3-Coder-30B-A3B-Instruct (48)",
    (5376, 262144): "google/gemma-4-31B-it (60)",
    (4096, 151936): "Qwen/Qwen3-8B (36)",
    (4096, 128256): "meta-llama/Llama-3.1-8B-Instruct (32)",
}


def describe(path: str | Path, target: str | Path | None = None) -> dict:
    """Facts about a folder or hub id, in the order to print them. Reads no weights but the vocabulary's tables.

    Args:
      target: folder of the target, for a head whose config names no taps.

    Raises:
      InputError: it is none of the three, or damaged.
    """
    folder = weights.find_folder(path)
    if runs.is_run(folder):
        steps = sorted(
            (p.name for p in (folder / "checkpoints").glob("[0-9]*")),
            key=lambda name: (len(name), name),
        )
        facts = {"kind": "training run of a draft head (Orbax)"} | _head(
            runs.config_from_json(folder / runs.HEAD_FILE)
        )
        if not steps:
            return facts | {"checkpoints": "none yet"}
        form = runs.open_run(folder)
        origin = {
            "came from": form.source,
            "target named": form.target or "none",
            "left out": " ".join(form.left_out) or "nothing",
        }
        return facts | {"checkpoints": steps} | _size(form.tensors) | origin
    raw = weights.read_json(folder / "config.json")
    tensors = weights.open_folder(folder)
    metadata = weights.read_metadata(folder)
    size = _size(tensors) | {"files": len(list(folder.glob("*.safetensors")))}
    origin = {f"file says: {key}": value for key, value in metadata.items() if key != "format"}
    if is_drafter(raw):
        return (
            _drafter(folder, raw, tensors, None if target is None else read_facts(target).layers)
            | size
            | origin
        )
    known = weights.Fields(raw, folder / "config.json").get_str("model_type", None) in TARGETS
    text = (
        weights.Fields(raw, folder / "config.json").child("text_config").raw or raw
    )  # of a multimodal model
    shape = {"model_type": raw.get("model_type")} | {
        key: text.get(key)
        for key in (
            "num_hidden_layers",
            "hidden_size",
            "vocab_size",
            "head_dim",
            "max_position_embeddings",
        )
    }
    return (
        {"kind": "target" if known else "target of a family that is not supported"}
        | shape
        | size
        | {
            "tokenizer": (folder / "tokenizer.json").exists(),
            "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        }
        | origin
    )


def _size(tensors: Mapping[str, weights.Tensor]) -> dict:
    return {
        "tensors": len(tensors),
        "parameters": sum(int(t.size) for n, t in tensors.items() if _is_parameter(n)),
        "bytes": sum(int(t.nbytes) for t in tensors.values()),
        "dtypes": sorted({str(t.dtype) for t in tensors.values()}),
    }


def _is_parameter(name: str) -> bool:
    return name not in ("d2t", "t2d") and not name.endswith(("_scale", "_scale_inv"))


def _drafter(folder: Path, raw: Mapping, stored: Mapping, target_layers: int | None) -> dict:
    where = str(folder / "config.json")
    fp8 = weights.dequantize(
        {param_mapping.plain(name): t for name, t in stored.items()}, raw, folder
    )
    open_points, numbers = [], {}
    fields = weights.Fields(raw, where)
    if (
        not fields.get(AUX_LAYER_IDS, None)
        and not fields.child("eagle_config").get(AUX_LAYER_IDS, None)
        and target_layers is None
    ):
        open_points.append(
            f"{AUX_LAYER_IDS}: vLLM then takes (2, L//2, L-3) of its target's L layers; inspect with --target"
        )
        numbers["target_layers"] = ANY_LAYERS
    if "mask_hidden" in fp8.tensors and all(
        raw.get(key) is None for key in config_reading.MASK_TOKEN_KEYS
    ):
        if fields.child("dflash_config").get("mask_token_id", None) is None:
            open_points.append("the mask token's id: convert with --mask-token")
            numbers["mask_token"] = 0
    config = config_reading.read_config(
        raw, fp8.tensors, where, **{"target_layers": target_layers, **numbers}
    )
    facts = _head(config)
    if "target_layers" in numbers:
        facts |= {key: "not named" for key in facts if key.startswith("taps")} | {
            "fits targets of": _fits(config, aux_hidden_state_layers=False)
        }
    if "mask_token" in numbers:
        facts["mask token"] = "not named"
    lost = param_mapping.table(config).keys() - fp8.tensors.keys()
    if "d2t" in lost and "t2d" in fp8.tensors:
        lost -= {"d2t"}
    shared, lost = (
        param_mapping.EMBEDDING in lost,
        sorted(lost - {param_mapping.EMBEDDING, *(n for n in lost if n.endswith("o_proj.bias"))}),
    )
    checkpoint_format = detect_format(raw)
    return {
        "kind": "draft head",
        "layout": checkpoint_format,
        "layout is": CHECKPOINT_FORMATS[checkpoint_format],
        **facts,
        "embedding": "the target's, shared" if shared else "its own",
        "fp8 matrices": len(fp8.quantized),
        "vocabulary tables": sorted({"d2t", "t2d"} & fp8.tensors.keys()) or "none",
        "missing tensors": lost or "none",
        "problems": _problems(folder, numbers, target_layers),
        "open": open_points or "nothing",
        "target named": config_reading.read_target(raw, where)[0] or "none",
    }


def _problems(folder: Path, numbers: dict, target_layers: int | None) -> str:
    """What an attempt to load would say, but for what is open."""
    try:
        read_head(folder, **{"target_layers": target_layers, **numbers}).check()
    except InputError as error:
        return str(error).removeprefix(f"{folder}: ")
    return "none"


def _head(config: HeadConfig) -> dict:
    return {
        "drafts": "in parallel (P-EAGLE) or one by one"
        if config.parallel
        else "one by one (EAGLE-3)",
        "layers": config.layers,
        "width": config.dim,
        "heads": f"{config.heads}, {config.kv_heads} of keys and values, {config.head_dim} wide",
        "style": "qwen3" if config.qk_norm else "llama",
        "taps, vLLM numbering (input of layer i)": list(config.aux_hidden_state_layers),
        "taps, SpecForge numbering (output of layer i)": [
            t - 1 for t in config.aux_hidden_state_layers
        ],
        "mask token": config.mask_token if config.parallel else "none",
        "trained for K": config.num_depths or "not recorded",
        "draft vocabulary": f"{config.draft_vocab} of {config.vocab}",
        "fits targets of": _fits(config),
        "published targets of that shape": KNOWN.get(
            (config.target_dim, config.vocab), "none known here"
        ),
        "options": [o for o in OPTIONS if getattr(config, o)] or "none",
        "placeholders": _designs(config) if config.parallel else "none",
        "placeholders for vLLM": export_placeholders.how(config),
        "sliding windows": list(config.windows) if any(config.windows) else "none",
        "rope": json.loads(config.rope.source)["rope_type"],
    }


def _designs(config: HeadConfig) -> list[str]:
    sides = (
        ("hidden", HIDDEN_DESIGNS[config.placeholder_hidden]),
        ("token", TOKEN_DESIGNS[config.placeholder_token]),
    )
    return [
        f"{side} {getattr(config, f'placeholder_{side}')}: {design.about}" for side, design in sides
    ]


def _fits(config: HeadConfig, aux_hidden_state_layers: bool = True) -> str:
    return f"width {config.target_dim}, vocabulary {config.vocab}" + (
        f", more than {max(config.aux_hidden_state_layers)} layers"
        if aux_hidden_state_layers
        else ""
    )


def printable(value) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return (
        f"{value:,}"
        if isinstance(value, int | np.integer) and not isinstance(value, bool) and value > 99_999
        else str(value)
    )
