"""Tiny random models of every family, made by transformers.

Every architectural option is set, and to a value that is not its default.
"""

import functools
import tempfile
from pathlib import Path

import jax
import numpy as np
import torch
import transformers

from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.layers import FINAL_HIDDEN_STATE, CachedAttention

V, T = 97, 21
SHAPE = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=3e-3,
    rope_parameters={"rope_type": "default", "rope_theta": 777.0},
    eos_token_id=11,
    tie_word_embeddings=False,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 777.0,
    "factor": 5.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 30,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 777.0,
    "factor": 3.0,
    "beta_fast": 20.0,
    "beta_slow": 2.0,
    "truncate": False,
    "original_max_position_embeddings": 40,
}
GEMMA_ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 777.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
}
S, F = "sliding_attention", "full_attention"
GEMMA = SHAPE | dict(
    rope_parameters=GEMMA_ROPE,
    global_head_dim=32,
    sliding_window=5,
    final_logit_softcapping=3.0,
    layer_types=[S, F, S, S, F],
    hidden_size_per_layer_input=0,
    tie_word_embeddings=True,
)
CASES = {
    "llama": ("Llama", SHAPE | dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True)),
    "llama_tied": (
        "Llama",
        SHAPE | dict(tie_word_embeddings=True, num_key_value_heads=None, head_dim=None),
    ),
    "qwen3": (
        "Qwen3",
        SHAPE
        | dict(
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=3,
            rope_parameters=YARN,
        ),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        SHAPE
        | dict(
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
        ),
    ),
    "qwen3_moe_raw": (
        "Qwen3Moe",
        SHAPE
        | dict(
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            attention_bias=True,
            rope_parameters=YARN,
        ),
    ),
    "gpt_oss": (
        "GptOss",
        SHAPE
        | dict(
            intermediate_size=64,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=5,
            rope_parameters=YARN,
            swiglu_limit=0.6,
            swiglu_alpha=1.3,
        ),
    ),
    "gemma4": ("Gemma4", GEMMA | dict(attention_k_eq_v=True, num_global_key_value_heads=1)),
    "gemma4_moe": (
        "Gemma4",
        GEMMA
        | dict(enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=24),
    ),
    "gemma4_ple": (
        "Gemma4",
        GEMMA
        | dict(
            num_hidden_layers=7,
            layer_types=[S, F, S, F, S, S, F],
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=V,
            attention_bias=True,
        ),
    ),
}
# 8 devices divide heads, experts, MLPs and vocabulary; they do not divide the KV heads
FOR_EIGHT_DEVICES = dict(
    vocab_size=104, num_attention_heads=8, num_key_value_heads=4, intermediate_size=64
)
EXPERT_COUNTS = ("num_experts", "num_local_experts")


@functools.cache
def make(case: str, for_eight_devices: bool = False):
    """(transformers' model, its folder)"""
    kind, shape = CASES[case]
    if for_eight_devices:
        shape = shape | FOR_EIGHT_DEVICES | {key: 8 for key in EXPERT_COUNTS if key in shape}
        if "vocab_size_per_layer_input" in shape:
            shape["vocab_size_per_layer_input"] = FOR_EIGHT_DEVICES["vocab_size"]
    config_name = "Gemma4TextConfig" if kind == "Gemma4" else f"{kind}Config"
    config = getattr(transformers, config_name)(**shape)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    parameters = dict(model.named_parameters())
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        is_norm_or_scale = any(word in name for word in ("norm", "scale", "layer_scalar"))
        if kind == "Gemma4" and ("q_norm" in name or "k_norm" in name):
            # Gemma's scores are not scaled: larger ones are ill-conditioned
            p.data.uniform_(0.3, 0.7)
        elif "per_layer_input_gate" in name:
            # 1 + tanh in GELU cancels where a gate is far below 0, and a norm magnifies that
            p.data.normal_(0, 0.05)
        elif is_norm_or_scale and "embed" not in name:
            p.data.uniform_(0.5, 1.5)
        elif name.endswith("sinks") or name.endswith("bias"):
            p.data.normal_(0, 0.5)
        elif "router" in name or "gate.weight" in name:
            p.data.normal_(0, 0.5)
        elif name in parameters:
            p.data.normal_(0, 0.15)
    folder = Path(tempfile.mkdtemp(prefix=f"peagle-{case}-"))
    model.save_pretrained(folder)
    return model, folder


@functools.cache
def truth(case: str, for_eight_devices: bool = False):
    """(tokens, logits, hidden states) of transformers."""
    tokens = np.random.default_rng(0).integers(0, V, (2, T))
    model, _ = make(case, for_eight_devices)
    with torch.no_grad():
        out = model(torch.from_numpy(tokens), output_hidden_states=True)
    return tokens, out.logits.numpy(), [h.numpy() for h in out.hidden_states]


@functools.cache
def ours(case: str, for_eight_devices: bool = False):
    _, folder = make(case, for_eight_devices)
    return load_target(folder, aux_hidden_state_layers=(0, 1, 4, FINAL_HIDDEN_STATE))


@functools.cache
def _forward(graph):
    import flax.nnx as nnx

    @jax.jit
    def forward(params, tokens, positions, real, cache):
        module = nnx.merge(graph, params)
        out, cache = module(tokens, positions, CachedAttention(positions, real), cache)
        return module.compute_logits(out.hidden), out.aux_hidden_states, cache

    return forward


def run(target, tokens, positions, cache, real=None):
    """(logits, aux hidden states, cache)"""
    return _forward(target.graph)(target.params, tokens, positions, real, cache)
