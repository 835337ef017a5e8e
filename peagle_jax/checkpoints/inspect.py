"""What a folder is: a target, a draft head or a training run; and what it can be used with.

`describe` returns facts for programs (`peagle inspect --json`), `printable_rows` turns them into
words for people.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax import weights
from peagle_jax.checkpoints import config_reading, export_placeholders, param_mapping, runs
from peagle_jax.checkpoints.checkpoint_format import (
    AUX_LAYER_IDS,
    detect_format,
    is_drafter,
    may_count_outputs,
    names_aux_layers,
    names_mask_token,
)
from peagle_jax.checkpoints.gguf_writing import llama_cpp_lacks
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.target_io import read_facts
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.placeholders import DESIGNS, PAPER_DESIGN
from peagle_jax.layers import FINAL_HIDDEN_STATE
from peagle_jax.targets import TARGETS
from peagle_jax.types import InputError

OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias")
ANY_LAYERS = 8  # of the target, where only the number of aux hidden states matters
# (width, vocabulary) -> targets that heads were published for, with their numbers of layers; from
# their config.json
KNOWN_TARGETS = {
    (2880, 201088): ["openai/gpt-oss-20b (24 layers)", "openai/gpt-oss-120b (36 layers)"],
    (2048, 151936): ["Qwen/Qwen3-Coder-30B-A3B-Instruct (48 layers)"],
    (5376, 262144): ["google/gemma-4-31B-it (60 layers)"],
    (4096, 151936): ["Qwen/Qwen3-8B (36 layers)"],
    (4096, 128256): ["meta-llama/Llama-3.1-8B-Instruct (32 layers)"],
}

# Words for people: fact -> label, for the facts whose name is not a label already. A fact whose
# label is None is told with another one.
LABELS: dict[str, str | None] = {
    "aux_hidden_state_layers": "aux hidden states, vLLM numbering (input of layer i)",
    "aux_hidden_state_outputs": "aux hidden states, SpecForge numbering (output of layer i)",
    "method": "drafts",
    "parallel": None,
    "model_type": "style",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": None,
    "head_dim": None,
    "mask_token_id": "mask token",
    "num_depths": "trained for K",
    "vocab_size": "vocabulary",
    "draft_vocab_size": "draft vocabulary",
    "target_hidden_size": "fits targets of width",
    "min_target_layers": "fits targets with at least so many layers",
    "known_targets": "published targets of that shape",
    "placeholder_hidden": "placeholder, hidden side",
    "placeholder_token": "placeholder, token side",
    "placeholder_attention": "placeholders attend to",
    "placeholder_context": "keys and values of committed tokens",
    "export_status": "placeholders for vLLM",
    "llama_cpp_lacks": "for llama.cpp (GGUF)",
    "markov_rank": "Markov head, rank",
    "markov_kind": None,
    "confidence": "confidence head",
    "confidence_calibrated": None,
    "rope_type": "rope",
    "shares_embedding": "embedding",
    "num_fp8_matrices": "FP8 matrices",
    "problem": "problems",
    "open_questions": "what its config leaves open",
    "target": "target that its config names",
    "source": "came from",
    "num_tensors": "tensors",
    "num_parameters": "parameters",
    "num_bytes": "bytes",
    "num_files": "files",
    "has_tokenizer": "tokenizer",
}
# Facts of a head that people see only where they are not as the paper has them.
SHOWN_IF_CHANGED = ("placeholder_attention", "placeholder_context")
# What None or an empty list means, where "none" would not be right.
WORDS_FOR_NOTHING = {
    "aux_hidden_state_layers": "not named",
    "aux_hidden_state_outputs": "not named",
    "num_depths": "not recorded",
    "min_target_layers": "unknown",
    "known_targets": "none known here",
    "open_questions": "nothing",
    "llama_cpp_lacks": "as it is",
    "left_out": "nothing",
    "checkpoints": "none yet",
}
KINDS = {
    "target": "target",
    "unsupported_target": "target of a family that is not supported",
    "draft_head": "draft head",
    "training_run": "training run of a draft head (Orbax)",
}
HOW_IT_DRAFTS = {
    "peagle": "in parallel (P-EAGLE) or one by one",
    "eagle3": "one by one (EAGLE-3)",
    "eagle": "one by one, by predicted hidden states (EAGLE-1)",
}
WRITERS = {
    "vllm": "vllm (AWS and vLLM; format A in docs/checkpoints.md)",
    "speculators": "speculators (format B in docs/checkpoints.md)",
    "automodel": "automodel (NVIDIA NeMo Automodel; format C in docs/checkpoints.md)",
    "peagle_jax": "peagle_jax (this package alone; format E in docs/checkpoints.md)",
    "specforge": "specforge (SpecForge; format D in docs/checkpoints.md)",
}


def describe(path: str | Path, target: str | Path | None = None) -> dict[str, Any]:
    """Facts about a folder, in the order in which to print them.

    Reads no weights but the tables of a draft vocabulary; of a training run all bytes of the newest
    checkpoint, to compare their checksums.

    Args:
      path: a folder or a Hugging Face hub id.
      target: the target's folder, for a head that does not name its aux hidden state layers.

    Returns:
      Facts under snake_case keys, as JSON can hold them: numbers as numbers, and None where the
      folder says nothing. `kind` is "draft_head", "training_run", "target" or
      "unsupported_target", and says which other keys there are. `printable_rows` shows them.

    Raises:
      InputError: it is none of these, or damaged.
    """
    folder = weights.find_folder(path)
    if runs.is_run(folder):
        return _describe_run(folder)
    raw = weights.read_json(folder / "config.json")
    tensors = weights.open_folder(folder)
    if is_drafter(raw):
        target_layers = None if target is None else read_facts(target).layers
        facts = _describe_head(folder, raw, tensors, target_layers)
        facts |= _sizes(tensors)
    else:
        facts = _describe_target(folder, raw, tensors)
    facts["num_files"] = len(list(folder.glob("*.safetensors")))
    metadata = weights.read_metadata(folder)
    facts["metadata"] = {key: value for key, value in metadata.items() if key != "format"}
    return facts


def _describe_run(folder: Path) -> dict[str, Any]:
    steps = sorted(
        int(p.name) for p in (folder / "checkpoints").glob("[0-9]*") if p.name.isdecimal()
    )
    facts = {"kind": "training_run"} | _head_facts(runs.config_from_json(folder / runs.HEAD_FILE))
    facts["checkpoints"] = steps
    if not steps:  # the same keys as below: programs read them
        sizes = dict.fromkeys(("num_tensors", "num_parameters", "num_bytes"))
        return facts | sizes | {"dtypes": [], "source": None, "target": None, "left_out": []}
    head = runs.open_run(folder)
    origin = {"source": head.source, "target": head.target, "left_out": list(head.left_out)}
    return facts | _sizes(head.tensors) | origin


# of a target's config.json
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "head_dim", "max_position_embeddings")


def _describe_target(
    folder: Path, raw: Mapping, tensors: Mapping[str, weights.Tensor]
) -> dict[str, Any]:
    fields = weights.Fields(raw, folder / "config.json")
    is_supported = fields.get_str("model_type", None) in TARGETS
    text = fields.child("text_config").raw or raw  # of a multimodal model
    return {
        "kind": "target" if is_supported else "unsupported_target",
        "model_type": fields.get_str("model_type", None),
        **{key: value if type(value := text.get(key)) is int else None for key in SIZES},
        **_sizes(tensors),
        "has_tokenizer": (folder / "tokenizer.json").exists(),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def _describe_head(
    folder: Path, raw: Mapping, stored: Mapping[str, weights.Tensor], target_layers: int | None
) -> dict[str, Any]:
    """Facts about a head's folder; what its config leaves open becomes None and a question."""
    where = str(folder / "config.json")
    renamed = {param_mapping.plain_name(name): t for name, t in stored.items()}
    fp8 = weights.dequantize(renamed, raw, folder)
    tensors = fp8.tensors
    open_questions: list[str] = []
    mask_token = None
    layers_are_open = target_layers is None and not names_aux_layers(raw, where)
    if layers_are_open:
        open_questions.append(
            f"{AUX_LAYER_IDS}: vLLM then takes (2, L//2, L-3) of its target's L layers; "
            "inspect with --target"
        )
        target_layers = ANY_LAYERS
    if "mask_hidden" not in tensors and may_count_outputs(raw, where):
        open_questions.append(
            f"{AUX_LAYER_IDS} stands in eagle_config alone, as SpecForge writes it, which counts "
            "outputs of layers; it is read as vLLM reads it, as inputs: if the head is of "
            "SpecForge, convert with --aux-layer-numbering output"
        )
    mask_token_is_open = "mask_hidden" in tensors and not names_mask_token(raw, where)
    if mask_token_is_open:
        open_questions.append("the mask token's id: convert with --mask-token")
        mask_token = 0
    config = config_reading.read_config(
        raw, tensors, where, target_layers=target_layers, mask_token=mask_token
    )
    facts = _head_facts(config)
    if layers_are_open:
        facts["aux_hidden_state_layers"] = None
        facts["aux_hidden_state_outputs"] = None
        facts["min_target_layers"] = None
    if mask_token_is_open:
        facts["mask_token_id"] = None
    return {
        "kind": "draft_head",
        "checkpoint_format": detect_format(raw),
        **facts,
        "shares_embedding": param_mapping.EMBEDDING not in tensors,
        "num_fp8_matrices": len(fp8.quantized),
        "vocabulary_tables": sorted({"d2t", "t2d"} & tensors.keys()),
        "missing_tensors": _missing_tensors(config, tensors),
        "problem": _problem(folder, target_layers, mask_token),
        "open_questions": open_questions,
        "target": config_reading.read_target(raw, where)[0],
    }


def _missing_tensors(config: HeadConfig, tensors: Mapping[str, weights.Tensor]) -> list[str]:
    """Tensors without which the head cannot be read."""
    missing = param_mapping.table(config).keys() - tensors.keys()
    missing -= {param_mapping.EMBEDDING}  # the target's is used
    if config.draft_vocab == config.vocab:
        missing -= {param_mapping.LM_HEAD}  # likewise
    missing = {name for name in missing if not name.endswith("o_proj.bias")}  # read as zeros
    if "t2d" in tensors:  # one of the two tables is enough
        missing -= {"d2t"}
    return sorted(missing)


def _problem(folder: Path, target_layers: int | None, mask_token: int | None) -> str | None:
    """What an attempt to load the head would say, beside what its config leaves open."""
    try:
        read_head(folder, target_layers=target_layers, mask_token=mask_token).check()
    except InputError as error:
        return str(error).removeprefix(f"{folder}: ")
    return None


def _head_facts(config: HeadConfig) -> dict[str, Any]:
    aux_layers, reads_final = config.aux_hidden_state_layers, config.predicts_features
    return {
        "method": config.method,
        "parallel": config.parallel,
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_hidden_layers": config.layers,
        "hidden_size": config.dim,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "aux_hidden_state_layers": list(aux_layers),
        "aux_hidden_state_outputs": None if reads_final else [i - 1 for i in aux_layers],
        "mask_token_id": config.mask_token,
        "num_depths": config.num_depths,
        "vocab_size": config.vocab,
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.target_dim,
        "min_target_layers": 1 if reads_final else max(1, *aux_layers),
        "known_targets": KNOWN_TARGETS.get((config.target_dim, config.vocab), []),
        "options": [name for name in OPTIONS if getattr(config, name)],
        "placeholder_hidden": config.placeholder_hidden if config.parallel else None,
        "placeholder_token": config.placeholder_token if config.parallel else None,
        "placeholder_attention": config.placeholder_attention if config.parallel else None,
        "placeholder_context": config.placeholder_context if config.parallel else None,
        "export_status": export_placeholders.export_status(config),
        "llama_cpp_lacks": llama_cpp_lacks(config),
        "markov_rank": config.markov_rank,
        "markov_kind": config.markov_kind,
        "confidence": config.confidence,
        "confidence_calibrated": config.confidence_calibration is not None,
        "sliding_windows": list(config.windows),
        "rope_type": json.loads(config.rope.source)["rope_type"],
    }


def _sizes(tensors: Mapping[str, weights.Tensor]) -> dict[str, Any]:
    return {
        "num_tensors": len(tensors),
        "num_parameters": sum(int(t.size) for name, t in tensors.items() if _is_parameter(name)),
        "num_bytes": sum(int(t.nbytes) for t in tensors.values()),
        "dtypes": sorted({str(t.dtype) for t in tensors.values()}),
    }


def _is_parameter(name: str) -> bool:
    return name not in ("d2t", "t2d") and not name.endswith(("_scale", "_scale_inv"))


# ---------------------------------------------------------------- words for people


def printable_rows(facts: Mapping[str, Any]) -> dict[str, str]:
    """The facts of `describe` in words: label -> text, in the same order."""
    rows = {}
    for key, value in facts.items():
        if key == "metadata":
            rows |= {f"file says: {name}": text for name, text in value.items()}
            continue
        if key in SHOWN_IF_CHANGED and value in (None, PAPER_DESIGN[key]):
            continue
        label = LABELS.get(key, key.replace("_", " "))
        if facts["kind"] in ("target", "unsupported_target"):
            label = key.replace("_", " ")  # config.json's own names
        if label is not None:
            rows[label] = _in_words(key, value, facts)
    return rows


def _in_words(key: str, value: Any, facts: Mapping[str, Any]) -> str:
    """One fact as text."""
    if key == "mask_token_id" and value is None and facts["parallel"]:
        return "not named"
    if key == "llama_cpp_lacks" and value == [] and facts.get("num_fp8_matrices"):
        return "with --dtype bfloat16 or float32"
    if value is None or value == []:
        return WORDS_FOR_NOTHING.get(key, "none")
    if key == "llama_cpp_lacks":
        return f"refused: it would {', '.join(value)}"
    if key == "kind":
        return KINDS[value]
    if key == "checkpoint_format":
        return WRITERS[value]
    if key == "method":
        return HOW_IT_DRAFTS[value]
    if key == "aux_hidden_state_layers" and value == [FINAL_HIDDEN_STATE]:
        return "the final hidden state, after the norm"
    if key == "num_attention_heads":
        kv_heads, head_dim = facts["num_key_value_heads"], facts["head_dim"]
        return f"{value}, {kv_heads} of keys and values, {head_dim} wide"
    if key == "shares_embedding":
        return "the target's, shared" if value else "its own"
    if key == "markov_rank":
        return f"{value}, {facts['markov_kind']}"
    if key == "confidence":
        if not value:
            return "none"
        is_calibrated = facts["confidence_calibrated"]
        return "calibrated" if is_calibrated else "not calibrated (peagle calibrate)"
    if key in DESIGNS:
        design = DESIGNS[key][value]
        return f"{value}: {design if isinstance(design, str) else design.about}"
    if key == "sliding_windows" and all(window is None for window in value):
        return "none"
    return printable(value)


def printable(value: Any) -> str:
    """A value as people read it: lists joined, large numbers with separators, None as "none"."""
    if value is None or value == []:
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if is_number and value > 99_999:
        return f"{value:,}"
    return str(value)
