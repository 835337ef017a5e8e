"""What a folder is: a target, a draft head, or a training run; shapes, sizes, taps, and what it can be used with."""

import json
from pathlib import Path

import numpy as np

from peagle_jax import weights
from peagle_jax.draft import folders
from peagle_jax.pipelines.convert import HEAD_FILE, head_config_from_json
from peagle_jax.targets import TARGETS
from peagle_jax.types import InputError

OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias")


def describe(folder: Path) -> dict:
    """Facts about a folder, in the order to print them.

    Raises:
      InputError: it is none of the three, or damaged.
    """
    if (folder / HEAD_FILE).exists():
        return {"kind": "training run of a draft head (Orbax)"} | _head(head_config_from_json(folder / HEAD_FILE)) | {
            "checkpoints": sorted(p.name for p in (folder / "checkpoints").glob("[0-9]*"))
        }  # fmt: skip
    raw = weights.read_json(folder / "config.json")
    tensors = weights.open_folder(folder)
    size = {
        "tensors": len(tensors), "parameters": sum(int(t.size) for n, t in tensors.items() if n not in ("d2t", "t2d")),
        "bytes": sum(int(t.nbytes) for t in tensors.values()), "dtypes": sorted({str(t.dtype) for t in tensors.values()}),
    }  # fmt: skip
    if folders.is_drafter(raw):
        plain = {folders.plain_name(name): t for name, t in tensors.items()}
        if "fc.weight" not in plain:
            raise InputError(folder, "a draft head needs fc.weight", "no such tensor", "check that this is an EAGLE-3 or P-EAGLE head")
        config = folders.read_config(raw, plain, str(folder / "config.json"))
        lost = folders.table(config).keys() - plain.keys()
        shared = "embed_tokens.weight" in lost
        lost -= {"embed_tokens.weight"}
        return (
            {"kind": "draft head", "layout": folders.detect_layout(raw)} | _head(config) | size
            | {"embedding": "the target's, shared" if shared else "its own", "missing tensors": sorted(lost) or "none"}
            | {"target named": _named_target(raw)}
        )  # fmt: skip
    known = raw.get("model_type") in TARGETS
    shape = {
        key: raw.get(key) for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "head_dim", "max_position_embeddings")
    }
    return {"kind": "target" if known else "target of a family that is not supported"} | shape | size | {
        "tokenizer": (folder / "tokenizer.json").exists(), "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }  # fmt: skip


def _named_target(raw: dict) -> str:
    return ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path") or "none"


def _head(config) -> dict:
    return {
        "drafts": "in parallel (P-EAGLE) or one by one" if config.parallel else "one by one (EAGLE-3)", "layers": config.layers,
        "width": config.dim, "style": "qwen3" if config.qk_norm else "llama",
        "taps, vLLM numbering (input of layer i)": list(config.taps),
        "taps, SpecForge numbering (output of layer i)": [t - 1 for t in config.taps],
        "mask token": config.mask_token if config.parallel else "none", "trained for K": config.depths or "not recorded",
        "draft vocabulary": f"{config.draft_vocab} of {config.vocab}",
        "fits targets of": f"width {config.target_dim}, vocabulary {config.vocab}, more than {max(config.taps)} layers",
        "options": [o for o in OPTIONS if getattr(config, o)] or "none",
        "rope": json.loads(config.rope.source)["rope_type"],
    }  # fmt: skip


def printable(value) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int | np.integer) and not isinstance(value, bool) and value > 99_999 else str(value)
