"""Every draft-head folder <-> our head: config keys, tensor names, both directions.

Layouts: "vllm" (AWS and vLLM; Automodel's leading `model.` and SpecForge's names are read as well) and "speculators".
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.draft import vocab as draft_vocab
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.layers import Rope
from peagle_jax.types import InputError, Model
from peagle_jax.weights import LINEAR, SAME, Layout, Table

LAYOUTS = ("vllm", "speculators")
MASK_HIDDEN = Layout("mask_hidden", lambda t: t.reshape(-1), lambda t: t.reshape(1, 1, -1))
NOT_OURS = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")  # the target's; t2d follows from d2t
SHAPE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in vLLM's order

# ---------------------------------------------------------------- reading


def detect_layout(raw: Mapping) -> str:
    return "speculators" if "speculators_model_type" in raw else "vllm"


def is_drafter(raw: Mapping) -> bool:
    """Whether a config.json describes a draft head rather than a target."""
    names = " ".join(raw.get("architectures") or [])
    return "speculators_model_type" in raw or "agle" in names or "draft_vocab_size" in raw


def load_drafter(path: str | Path, *, dtype: DTypeLike | None = None, embedding: np.ndarray | jax.Array | None = None) -> Model:
    """Loads a draft head folder of any layout.

    Args:
      path: folder with config.json and safetensors weights.
      dtype: of weights and activations; None keeps the file's.
      embedding: the target's [V D], for a head whose folder has no `embed_tokens` and shares it.

    Raises:
      InputError: the folder is missing, damaged, or asks for something that this head does not compute.
    """
    folder = Path(path)
    where = folder / "config.json"
    raw = weights.read_json(where)
    tensors = {plain_name(name): t for name, t in weights.open_folder(folder).items()}
    tensors = {name: t for name, t in tensors.items() if name not in NOT_OURS}
    if "embed_tokens.weight" not in tensors:
        if embedding is None:
            raise InputError(folder, "needs embed_tokens.weight, or the target's embedding", "neither", "give --target or embedding=")
        tensors["embed_tokens.weight"] = np.asarray(embedding)
    if "fc.weight" not in tensors:
        raise InputError(folder, "a draft head needs fc.weight", "no such tensor", "check that this is an EAGLE-3 or P-EAGLE head")
    config = read_config(raw, tensors, str(where))
    config = dataclasses.replace(config, dtype=np.dtype(dtype) if dtype is not None else tensors["fc.weight"].dtype)
    d2t = tensors.get("d2t")
    if d2t is not None and config.draft_vocab == config.vocab:
        if np.any(d2t):
            raise InputError(
                folder, "d2t must be the identity (all zero) at full vocabulary", "another map", "reorder lm_head and drop d2t"
            )
        del tensors["d2t"]
    if d2t is not None:
        _check_d2t(np.asarray(d2t), config, folder)
    return weights.load(lambda: DraftHead(config, rngs=nnx.Rngs(0)), config, tensors, table(config), folder)


def plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _check_d2t(d2t: np.ndarray, config: HeadConfig, folder: Path) -> None:
    ids = np.arange(len(d2t)) + d2t
    if len(d2t) != config.draft_vocab or ids.min() < 0 or ids.max() >= config.vocab or len(np.unique(ids)) != len(ids):
        raise InputError(folder, f"d2t must name {config.draft_vocab} different ids in 0..{config.vocab - 1}",
                         f"{len(d2t)} offsets, ids {ids.min()}..{ids.max()}", "restore the file")  # fmt: skip


def read_config(raw: Mapping, tensors: Mapping[str, np.ndarray], where: str) -> HeadConfig:
    """HeadConfig from any layout's config.json; what a config may leave out is read off the tensors."""
    shape = raw.get("transformer_layer_config", raw)
    eagle = raw.get("eagle_config") or {}
    speculators = detect_layout(raw) == "speculators"
    option = lambda key, default=False: bool(eagle.get(key, raw.get(key, default)))  # noqa: E731
    weights.check_positive(shape, (*SHAPE_KEYS, "head_dim", "num_key_value_heads") if shape.get("head_dim") else SHAPE_KEYS, where)
    try:
        dim, heads = shape["hidden_size"], shape["num_attention_heads"]
        head_dim = shape.get("head_dim") or dim // heads
        taps = raw.get("eagle_aux_hidden_state_layer_ids") or eagle["eagle_aux_hidden_state_layer_ids"]
        mask_token = next((raw[key] for key in MASK_TOKEN_KEYS if raw.get(key) is not None), None)
        if "mask_hidden" not in tensors:
            mask_token = None
        elif mask_token is None:
            raise InputError(where, f"a head with mask_hidden needs one of {', '.join(MASK_TOKEN_KEYS)}", "none", "add it to the config")
        config = HeadConfig(
            vocab=shape["vocab_size"], draft_vocab=raw.get("draft_vocab_size") or shape["vocab_size"], dim=dim,
            layers=shape["num_hidden_layers"], mlp_dim=shape["intermediate_size"], heads=heads,
            kv_heads=shape.get("num_key_value_heads") or heads, head_dim=head_dim, rope=Rope.from_hf(shape, head_dim, where),
            norm_eps=shape["rms_norm_eps"], context=shape["max_position_embeddings"],
            target_dim=raw.get("target_hidden_size") or tensors["fc.weight"].shape[1] // len(taps), taps=tuple(taps),
            mask_token=mask_token, depths=_depths(raw), qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
            attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
            # an absent norm_before_residual means True in speculators' EAGLE-3 alone
            norm_before_residual=option("norm_before_residual", raw.get("speculators_model_type") == "eagle3" and speculators),
            norm_before_fc=option("norm_before_fc"), fc_norm=option("fc_norm"), norm_output=option("norm_output"),
            windows=_windows(shape), dtype=np.float32,
        )  # fmt: skip
    except KeyError as missing:
        raise InputError(where, f"a draft head's config needs the key {missing}", "none", "take the head's own config") from None
    if shape.get("hidden_act", "silu") != "silu":
        raise InputError(where, "hidden_act must be silu", shape["hidden_act"], "use another head")
    if config.heads % config.kv_heads:
        raise InputError(
            where, "num_attention_heads must be a multiple of num_key_value_heads", f"{config.heads} and {config.kv_heads}", "mend it"
        )
    if mask_token is not None and not 0 <= mask_token < config.vocab:
        raise InputError(where, f"the mask token must lie in 0..{config.vocab - 1}", mask_token, "mend the config")
    return config


def _depths(raw: Mapping) -> int | None:
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return raw.get("num_depths") or methods[0].get("speculative_tokens")


def _windows(shape: Mapping) -> tuple[int | None, ...]:
    kinds, layers = shape.get("layer_types") or [], shape["num_hidden_layers"]
    sliding = [i < len(kinds) and kinds[i] == "sliding_attention" for i in range(layers)]
    return tuple(shape["sliding_window"] if s else None for s in sliding)


def table(cfg: HeadConfig) -> Table:
    """Checkpoint name (with `layers.0.` for the first layer) -> (our path, layout)."""
    names = {
        "embed_tokens.weight": ("embed.table", SAME), "fc.weight": ("fusion.fc.kernel", LINEAR),
        "norm.weight": ("norm.scale", SAME), "lm_head.weight": ("lm_head.kernel", LINEAR),
    }  # fmt: skip
    if cfg.parallel:
        names["mask_hidden"] = ("mask_hidden", MASK_HIDDEN)
    if cfg.draft_vocab != cfg.vocab:
        names["d2t"] = ("d2t", SAME)
    if cfg.norm_before_fc:
        names["input_norm.weight"] = ("fusion.input_norm.scale", SAME)
    if cfg.fc_norm:
        names |= {f"fc_norm.{i}.weight": (f"fusion.fc_norm.{i}.scale", SAME) for i in range(len(cfg.taps))}
    for i in range(cfg.layers):
        p = f"layers.{i}"
        names[f"{p}.input_layernorm.weight"] = (f"{p}.input_norm.scale", SAME)
        names[f"{p}.post_attention_layernorm.weight"] = (f"{p}.mlp_norm.scale", SAME)
        if i == 0:
            names[f"{p}.hidden_norm.weight"] = (f"{p}.hidden_norm.scale", SAME)
        for q in "qkvo":
            names[f"{p}.self_attn.{q}_proj.weight"] = (f"{p}.attn.{q}.kernel", LINEAR)
            if cfg.attention_bias:
                names[f"{p}.self_attn.{q}_proj.bias"] = (f"{p}.attn.{q}.bias", SAME)
        for q in "qk" if cfg.qk_norm else "":
            names[f"{p}.self_attn.{q}_norm.weight"] = (f"{p}.attn.{q}_norm.scale", SAME)
        for q in ("gate", "up", "down"):
            names[f"{p}.mlp.{q}_proj.weight"] = (f"{p}.mlp.{q}.kernel", LINEAR)
    return names


# ---------------------------------------------------------------- writing


def save_drafter(
    head: Model, path: str | Path, *, layout: str = "vllm", dtype: DTypeLike | None = None, target: str | None = None,
    target_architecture: str = "Qwen3ForCausalLM", k: int | None = None, metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None, own_embedding: bool = True,
) -> None:  # fmt: skip
    """Writes a folder that vLLM (>= 0.16) or speculators loads; it appears whole or not at all.

    Args:
      layout: "vllm" or "speculators".
      dtype: of the floating tensors; None keeps the head's.
      target: name or path of the target, which speculators' layout carries.
      target_architecture: of the target, likewise.
      k: tokens to draft a step; None takes what the head was trained for.
      metadata: provenance, into the safetensors header.
      max_shard_bytes: split the weights into files of at most so many bytes; None writes one file.
      own_embedding: False leaves `embed_tokens` out: vLLM and `load_drafter` then share the target's, as published EAGLE-3 heads do.

    Raises:
      InputError: the layout cannot express the head.
    """
    if layout not in LAYOUTS:
        raise InputError("--to", f"must be one of {', '.join(LAYOUTS)}", layout, "choose one of them")
    cfg = head.config
    dtype = np.dtype(cfg.dtype if dtype is None else dtype)
    k = k or cfg.depths
    if list(cfg.taps) != sorted(set(cfg.taps)):
        raise InputError(
            path, "vLLM collects taps once each and in layer order: tap ids must ascend", list(cfg.taps), "train with ascending taps"
        )
    if layout == "speculators":
        if lost := [o for o in ("fc_norm", "norm_output") if getattr(cfg, o)] if cfg.parallel else []:
            raise InputError(path, "vLLM's reading of a speculators peagle folder ignores some options", ", ".join(lost), "use --to vllm")
        if k is None:
            raise InputError(path, "speculators' layout carries K", "none", "give it with --k")
    tensors = weights.cast(weights.export(head.params, table(cfg)), dtype)
    if not own_embedding and layout != "vllm":
        raise InputError(path, "speculators' layout has its own embedding", "a shared one", "use --to vllm")
    if not own_embedding:
        del tensors["embed_tokens.weight"]
    if "d2t" in tensors:
        ids = np.arange(cfg.draft_vocab) + tensors["d2t"]
        tensors["d2t"], tensors["t2d"] = draft_vocab.tables(ids, cfg.vocab)
    if layout == "vllm":
        tensors = {("midlayer." + n.removeprefix("layers.0.") if n.startswith("layers.0.") else n): t for n, t in tensors.items()}
        config = vllm_config(cfg, dtype.name, k)
    else:
        config = speculators_config(cfg, dtype.name, k, target, target_architecture)
    with weights.new_folder(Path(path)) as folder:
        weights.write_folder(folder, config, tensors, metadata or {}, max_shard_bytes)


def _shape(cfg: HeadConfig, dtype: str) -> dict:
    rope = json.loads(cfg.rope.source)
    sliding = next((w for w in cfg.windows if w is not None), None)
    if len({w for w in cfg.windows if w is not None}) > 1:
        raise InputError("drafter", "a config.json has one sliding window for all layers", cfg.windows, "train it with one")
    shape = {
        "model_type": "qwen3" if cfg.qk_norm else "llama", "vocab_size": cfg.vocab, "hidden_size": cfg.dim,
        "intermediate_size": cfg.mlp_dim, "num_hidden_layers": cfg.layers, "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_dim, "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.context, "attention_bias": cfg.attention_bias, "hidden_act": "silu",
        "rope_parameters": rope, "rope_theta": rope["rope_theta"], "tie_word_embeddings": False, "mlp_bias": False,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "dtype": dtype,
    }  # fmt: skip
    if rope["rope_type"] != "default":  # readers older than transformers 5 look here
        shape["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if sliding is not None:
        kinds = ["full_attention" if w is None else "sliding_attention" for w in cfg.windows]
        shape |= {"sliding_window": sliding, "layer_types": kinds, "use_sliding_window": True, "max_window_layers": 0}
    return shape


def _options(cfg: HeadConfig) -> dict:
    return {
        "draft_vocab_size": cfg.draft_vocab, "target_hidden_size": cfg.target_dim, "norm_before_residual": cfg.norm_before_residual,
        "norm_before_fc": cfg.norm_before_fc, "fc_norm": cfg.fc_norm, "norm_output": cfg.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(cfg.taps),
    } | ({"mask_token_id": cfg.mask_token} if cfg.parallel else {})  # fmt: skip


def vllm_config(cfg: HeadConfig, dtype: str, k: int | None) -> dict:
    """vLLM reads the taps at top level or in `eagle_config`, and counts them in the latter: both are written."""
    architecture = "Eagle3Qwen3ForCausalLM" if cfg.qk_norm else "LlamaForCausalLMEagle3"
    config = {"architectures": [architecture]} | _shape(cfg, dtype) | _options(cfg)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(cfg.taps), "use_aux_hidden_state": True}
    if cfg.parallel:
        config["ptd_token_id"] = cfg.mask_token
    return config | ({"num_depths": k} if k else {})


def speculators_config(cfg: HeadConfig, dtype: str, k: int, target: str | None, target_architecture: str) -> dict:
    algorithm = "peagle" if cfg.parallel else "eagle3"
    shape = _shape(cfg, dtype)
    options = _options(cfg)
    if cfg.target_dim == cfg.dim:
        options["target_hidden_size"] = None  # speculators writes it only where the widths differ
    return {
        "architectures": ["PEagleDraftModel" if cfg.parallel else "Eagle3DraftModel"],
        "speculators_model_type": algorithm, "speculators_version": "0.9.0", "dtype": dtype, "tie_word_embeddings": False,
        "transformer_layer_config": shape, "embed_requires_grad": cfg.parallel, **options,
        "speculators_config": {
            "algorithm": algorithm, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": [target_architecture]},
        },
    }  # fmt: skip


def serving_flags(cfg: HeadConfig, path: str, k: int) -> str:
    """vLLM's --speculative-config (also SageMaker's SM_VLLM_SPECULATIVE_CONFIG), as JSON."""
    config = {"method": "eagle3", "model": path, "num_speculative_tokens": k}
    return json.dumps(config | ({"parallel_drafting": True} if cfg.parallel else {}))
