"""Tiny random targets of every family, made by transformers, which check_targets.py decodes.

    make(case, folder, tokenizer, prompts, new)     (from check_targets.py; needs torch)

Every architectural option has another value than its default, so that no key of a config.json can
go unread. Exceptions are what vLLM 0.32 has as constants or ignores: GPT-OSS' norm epsilon, clamp
and alpha, and biases and windows of Qwen3's attention.
"""

import json
import math
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

from peagle_jax import weights
from peagle_jax.bench.answer_statistics import repeated_share
from peagle_jax.types import InputError

VOCAB = 512
# Least gap between the two largest logits at every token of the greedy texts: ten times what counts
# as a near tie.
MIN_GAP = 1e-3
# Least and largest share of repeated 4-grams: a head learns something of such text, and not all.
REPEATED_SHARE = (0.2, 0.7)
MAX_SEEDS = 50
ROPE = {"rope_type": "default", "rope_theta": 777.0}
LLAMA3 = ROPE | {
    "rope_type": "llama3",
    "factor": 5.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 50,
}
YARN = ROPE | {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 20.0,
    "beta_slow": 2.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPE = {
    "full_attention": ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "sliding_attention": ROPE | {"rope_theta": 55.0},
}
S, F = "sliding_attention", "full_attention"
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    rms_norm_eps=3e-3,
    rope_parameters=ROPE,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=None,
)
GEMMA = SHAPE | dict(
    rope_parameters=GEMMA_ROPE,
    global_head_dim=64,
    sliding_window=20,
    final_logit_softcapping=8.0,
    layer_types=[S, F, S, S, F],
    hidden_size_per_layer_input=0,
    tie_word_embeddings=True,
)
K_IS_V = dict(attention_k_eq_v=True, num_global_key_value_heads=1)
# name -> transformers' class and its shape; the windows are shorter than the prompts
CASES = {
    "llama": ("Llama", SHAPE | dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True)),
    "qwen3": ("Qwen3", SHAPE | dict(tie_word_embeddings=True)),
    "qwen3_moe": (
        "Qwen3Moe",
        SHAPE
        | dict(
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=64,
            norm_topk_prob=True,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            rope_parameters=YARN,
        ),
    ),
    "gpt_oss": (
        "GptOss",
        SHAPE
        | dict(
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=3,
            sliding_window=20,
            rope_parameters=YARN,
            rms_norm_eps=1e-5,
        ),
    ),
    "gemma4": ("Gemma4", GEMMA | K_IS_V),
    "gemma4_moe": (
        "Gemma4",
        GEMMA
        | K_IS_V
        | dict(enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=64),
    ),
    "gemma4_ple": (
        "Gemma4",
        GEMMA
        | dict(
            num_hidden_layers=7,
            layer_types=[S, F, S, F, S, S, F],
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB,
        ),
    ),
}
# The first entry whose name is part of a parameter's name gives a standard deviation, or a range.
SCALES = (
    ("sinks", 1.0),
    ("bias", 0.2),
    ("router.scale", (0.5, 1.5)),
    ("router", 0.5),
    ("mlp.gate.weight", 0.5),
    ("embed", 0.3),
    ("lm_head", 0.3),
    ("norm", (0.5, 1.5)),
    ("scal", (0.5, 1.5)),
    ("", 0.09),
)
SCALES_OF = {
    # Its attention scores are not scaled, and larger ones are ill-conditioned. Without large norms
    # after a layer it repeats one token.
    "Gemma4": (
        ("q_norm", (0.3, 0.7)),
        ("k_norm", (0.3, 0.7)),
        ("per_expert_scale", (0.5, 1.5)),
        ("post_", (2.0, 4.0)),
    ),
    # A sixth of what experts compute lies beyond the clamp at 7.
    "GptOss": (
        ("_proj_bias", 0.1),
        ("gate_up_proj", 0.5),
        ("experts.down_proj", 0.0025),
        ("lm_head", 0.6),
    ),
}
logging.disable_progress_bar()


def make(case: str, folder: Path, tokenizer, prompts: list[list[int]], new: int) -> None:
    """Writes the target of the first seed whose greedy texts are of use.

    The folder has the tokenizer too and, in greedy.json, those texts.
    """
    least, most = REPEATED_SHARE
    for seed in range(MAX_SEEDS):
        model = random_model(case, seed)
        texts, gap = greedy(model, prompts, new)
        if gap < MIN_GAP or not least < repeated_share(texts) < most:
            continue
        with weights.new_folder(folder) as work:
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
            (work / "greedy.json").write_text(json.dumps(texts), encoding="utf-8")
        return
    rule = (
        f"one of {MAX_SEEDS} seeds must write text without near ties that repeats itself now and "
        "then"
    )
    raise InputError(case, rule, "none", "change its scales in scripts/peers/tiny_targets.py")


def random_model(case: str, seed: int):
    """A transformers model with random weights, biases, sinks and norm scales."""
    kind, shape = CASES[case]
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma4" else f"{kind}Config")(
        **shape
    )
    config._attn_implementation = "eager"  # the one that knows sinks
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    scalars = [
        (name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")
    ]
    for name, tensor in [*model.named_parameters(), *scalars]:
        scale = next(scale for part, scale in (*SCALES_OF.get(kind, ()), *SCALES) if part in name)
        tensor.data.uniform_(*scale) if isinstance(scale, tuple) else tensor.data.normal_(0, scale)
    return model


@torch.no_grad()
def greedy(model, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """Texts, and the smallest gap between the two largest logits of a token.

    Ends early at a gap below MIN_GAP.
    """
    tokens, smallest = torch.tensor(prompts), math.inf
    for _ in range(new):  # the whole text again for every token: no cache that could be wrong
        best = model(tokens, use_cache=False).logits[:, -1].topk(2)
        smallest = min(smallest, float((best.values[:, 0] - best.values[:, 1]).min()))
        if smallest < MIN_GAP:
            break
        tokens = torch.cat([tokens, best.indices[:, :1]], dim=1)
    return tokens[:, len(prompts[0]) :].tolist(), smallest
