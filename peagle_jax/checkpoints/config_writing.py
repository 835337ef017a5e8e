"""HeadConfig -> config.json in vLLM's layout or in speculators'; and what serves a folder."""

import json

from peagle_jax.checkpoints.config_reading import AUX_LAYER_IDS
from peagle_jax.draft.head import HeadConfig
from peagle_jax.types import InputError


def _shape(cfg: HeadConfig, dtype: str) -> dict:
    rope = json.loads(cfg.rope.source)
    sliding = next((w for w in cfg.windows if w is not None), None)
    if (
        len(set(cfg.windows)) > 1
    ):  # "All drafting layers should belong to the same kv cache group" (0.32)
        raise InputError(
            "drafter",
            "vLLM drafts with one cache: all layers have one sliding window, or none",
            cfg.windows,
            "train it so",
        )
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
    if sliding is not None:
        kinds = ["full_attention" if w is None else "sliding_attention" for w in cfg.windows]
        shape |= {
            "sliding_window": sliding,
            "layer_types": kinds,
            "use_sliding_window": True,
            "max_window_layers": 0,
        }
    if len(cfg.aux_hidden_state_layers) != 3:  # vLLM assumes three, unless this says otherwise
        shape["num_aux_hidden_states"] = len(cfg.aux_hidden_state_layers)
    return shape


def _options(cfg: HeadConfig) -> dict:
    return {
        "draft_vocab_size": cfg.draft_vocab,
        "target_hidden_size": cfg.target_dim,
        "norm_before_residual": cfg.norm_before_residual,
        "norm_before_fc": cfg.norm_before_fc,
        "fc_norm": cfg.fc_norm,
        "norm_output": cfg.norm_output,
        AUX_LAYER_IDS: list(cfg.aux_hidden_state_layers),
    } | ({"mask_token_id": cfg.mask_token} if cfg.parallel else {})


def vllm_config(cfg: HeadConfig, dtype: str, k: int | None) -> dict:
    """vLLM reads the taps at top level or in `eagle_config`, and counts them in the latter: both are written."""
    architecture = "Eagle3Qwen3ForCausalLM" if cfg.qk_norm else "LlamaForCausalLMEagle3"
    config = {"architectures": [architecture]} | _shape(cfg, dtype) | _options(cfg)
    config["eagle_config"] = {
        AUX_LAYER_IDS: list(cfg.aux_hidden_state_layers),
        "use_aux_hidden_state": True,
    }
    if cfg.parallel:
        config["ptd_token_id"] = cfg.mask_token
    return config | ({"num_depths": k} if k else {})


def speculators_config(
    cfg: HeadConfig, dtype: str, k: int, target: str | None, target_architecture: str | None
) -> dict:
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


def serving_flags(cfg: HeadConfig, path: str, k: int, revision: str | None = None) -> str:
    """vLLM's --speculative-config (also SageMaker's SM_VLLM_SPECULATIVE_CONFIG), as JSON. `revision` is a hub id's."""
    config = (
        {"method": "eagle3", "model": path}
        | ({"revision": revision} if revision else {})
        | {"num_speculative_tokens": k}
    )
    return json.dumps(config | ({"parallel_drafting": True} if cfg.parallel else {}))
