"""What targets and draft heads share.

Norms, rotary embeddings, attention, MLPs, experts, and the frame of a decoder.
"""

from peagle_jax.layers.attention import Attention, CachedAttention, keep_path, take_rows
from peagle_jax.layers.basic import (
    MLP,
    Embedding,
    LateRMSNorm,
    Linear,
    RMSNorm,
    gelu_tanh,
    normal,
    normalize,
    soft_cap,
)
from peagle_jax.layers.decoder import FINAL_HIDDEN_STATE, Decoder, PreNormBlock
from peagle_jax.layers.moe import GLU, Experts
from peagle_jax.layers.products import (
    activation_dtype,
    attention_operands,
    default_cache_dtype,
    float32_product,
    full_precision,
    product,
)
from peagle_jax.layers.rope import Rope

__all__ = [
    "FINAL_HIDDEN_STATE",
    "MLP",
    "Attention",
    "CachedAttention",
    "Decoder",
    "Embedding",
    "Experts",
    "GLU",
    "LateRMSNorm",
    "Linear",
    "PreNormBlock",
    "RMSNorm",
    "Rope",
    "activation_dtype",
    "attention_operands",
    "default_cache_dtype",
    "float32_product",
    "full_precision",
    "gelu_tanh",
    "keep_path",
    "normal",
    "normalize",
    "product",
    "soft_cap",
    "take_rows",
]
