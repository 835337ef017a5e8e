"""HeadConfig -> config.json in the formats that are written; and the flag that serves a head."""

import json

from peagle_jax.checkpoints.checkpoint_format import (
    AUX_LAYER_IDS,
    CALIBRATION,
    EAGLE1_ARCHITECTURE,
    OWN_ARCHITECTURE,
)
from peagle_jax.draft.head import HeadConfig


def _shape(cfg: HeadConfig, dtype: str) -> dict:
    """The keys that a Llama or Qwen3 config of this shape has."""
    rope = json.loads(cfg.rope.source)
    shape = {
        "model_type": "qwen3" if cfg.qk_norm else "llama",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.dim,
        "intermediate_size": cfg.mlp_dim,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.context,
        "attention_bias": cfg.attention_bias,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
    }
    if rope["rope_type"] != "default":  # readers older than transformers 5 look here
        shape["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if cfg.windows and cfg.windows[0] is not None:
        shape |= {
            "sliding_window": cfg.windows[0],
            "layer_types": ["sliding_attention"] * len(cfg.windows),
            "use_sliding_window": True,
            "max_window_layers": 0,
        }
    # vLLM assumes three of an EAGLE-3 head, unless this says otherwise
    if len(cfg.aux_hidden_state_layers) != 3 and not cfg.predicts_features:
        shape["num_aux_hidden_states"] = len(cfg.aux_hidden_state_layers)
    return shape


def _options(cfg: HeadConfig) -> dict:
    """The keys that only draft heads have, in both formats."""
    options = {
        "draft_vocab_size": cfg.draft_vocab,
        "target_hidden_size": cfg.target_dim,
        "norm_before_residual": cfg.norm_before_residual,
        "norm_before_fc": cfg.norm_before_fc,
        "fc_norm": cfg.fc_norm,
        "norm_output": cfg.norm_output,
        AUX_LAYER_IDS: list(cfg.aux_hidden_state_layers),
    }
    if cfg.parallel:
        options["mask_token_id"] = cfg.mask_token
    return options


def vllm_config(cfg: HeadConfig, dtype: str, k: int | None) -> dict:
    """config.json in the vllm format.

    vLLM reads the aux hidden state layers at top level or in `eagle_config`, and counts them in
    the latter, so both have them.

    Args:
      cfg: the head; its placeholder design is not looked at (see export_placeholders.py).
      dtype: name of the weights' dtype.
      k: tokens to draft in one step; None leaves it out.
    """
    if cfg.predicts_features:
        config = {"architectures": [EAGLE1_ARCHITECTURE], "draft_vocab_size": cfg.draft_vocab}
        return config | _shape(cfg, dtype) | ({"num_depths": k} if k else {})
    architecture = "Eagle3Qwen3ForCausalLM" if cfg.qk_norm else "LlamaForCausalLMEagle3"
    config = {"architectures": [architecture]} | _shape(cfg, dtype) | _options(cfg)
    config["eagle_config"] = {
        AUX_LAYER_IDS: list(cfg.aux_hidden_state_layers),
        "use_aux_hidden_state": True,
    }
    if cfg.parallel:
        config["ptd_token_id"] = cfg.mask_token
    if k:
        config["num_depths"] = k
    return config


def own_config(cfg: HeadConfig, dtype: str, k: int | None) -> dict:
    """config.json in the peagle_jax format: the vllm format's keys, and those of further heads.

    The architecture is one that no other reader knows: vLLM would leave a Markov head out.
    """
    config = vllm_config(cfg, dtype, k) | {"architectures": [OWN_ARCHITECTURE]}
    if cfg.markov_rank is not None:
        config["markov_rank"] = cfg.markov_rank
        config["markov_head_type"] = cfg.markov_kind
    if cfg.confidence:
        config["enable_confidence_head"] = True
        config["confidence_head_with_markov"] = cfg.markov_rank is not None
    if cfg.confidence_calibration is not None:
        config[CALIBRATION] = cfg.confidence_calibration.to_json()
    return config


def speculators_config(
    cfg: HeadConfig, dtype: str, k: int, target: str | None, target_architecture: str | None
) -> dict:
    """config.json in the speculators format (speculators 0.9).

    Args:
      cfg: the head.
      dtype: name of the weights' dtype.
      k: tokens to draft in one step.
      target: name or path of the target; with it vLLM serves the folder by its name alone.
      target_architecture: of the target, for example "Qwen3ForCausalLM".
    """
    algorithm = "peagle" if cfg.parallel else "eagle3"
    options = _options(cfg)
    if cfg.target_dim == cfg.dim:
        options["target_hidden_size"] = None  # speculators writes it only where the widths differ
    return {
        "architectures": ["PEagleDraftModel" if cfg.parallel else "Eagle3DraftModel"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "dtype": dtype,
        "tie_word_embeddings": False,
        "transformer_layer_config": _shape(cfg, dtype),
        "embed_requires_grad": cfg.parallel,
        **options,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": k,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target,
                "architectures": [target_architecture] if target_architecture else [],
            },
        },
    }


def serving_notes(cfg: HeadConfig, target_context: int | None) -> list[str]:
    """What else vLLM's options decide for a head, in sentences (read in vLLM 0.32 and 0.33).

    Args:
      cfg: the head.
      target_context: max_position_embeddings of the target; None where it is not known.
    """
    notes = []
    if cfg.parallel:
        notes.append(
            "vLLM 0.16 and later drafts in parallel, by its V1 model runner alone, which it then "
            "chooses by itself: do not set VLLM_USE_V2_MODEL_RUNNER=1"
        )
    else:
        notes.append("both model runners of vLLM, V1 and V2, serve such a head")
    notes.append(
        "at a temperature above 0 vLLM drafts the likeliest tokens; with "
        '"draft_sample_method": "probabilistic" in this JSON drafts are sampled'
    )
    # vLLM multiplies a context by the factor of a linearly scaled rotation
    rope = json.loads(cfg.rope.source)
    factor = rope.get("factor", 1.0) if rope["rope_type"] == "linear" else 1.0
    context = int(cfg.context * factor)
    if target_context is not None and context < target_context:
        runner = "vLLM" if cfg.parallel else "vLLM's V1 model runner"
        notes.append(
            f"{runner} drafts nothing in texts of more than {context} tokens, which the head's "
            f"config.json allows; its target reads {target_context}"
        )
    return notes


def serving_flags(cfg: HeadConfig, path: str, k: int, revision: str | None = None) -> str:
    """vLLM's `--speculative-config` as JSON; SageMaker's SM_VLLM_SPECULATIVE_CONFIG is the same.

    Args:
      cfg: the head.
      path: the head's folder or hub id, as vLLM will find it.
      k: tokens to draft in one step.
      revision: of a hub id.
    """
    method = "eagle" if cfg.predicts_features else "eagle3"
    flags: dict[str, object] = {"method": method, "model": path}
    if revision:
        flags["revision"] = revision
    flags["num_speculative_tokens"] = k
    if cfg.parallel:
        flags["parallel_drafting"] = True
    return json.dumps(flags)
