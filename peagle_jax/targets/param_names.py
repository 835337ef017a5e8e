"""Checkpoint names that families share, each with our path and layout."""

from peagle_jax.weights import IDENTITY, TRANSPOSE, ParamTransform

Names = dict[str, tuple[str, ParamTransform]]


def frame(tied: bool) -> Names:
    """Embedding, final norm, output matrix."""
    names: Names = {
        "model.embed_tokens.weight": ("embed.table", IDENTITY),
        "model.norm.weight": ("norm.scale", IDENTITY),
    }
    return names if tied else names | {"lm_head.weight": ("lm_head.kernel", TRANSPOSE)}


def block_norms(theirs: str, ours: str) -> Names:
    return {
        f"{theirs}.input_layernorm.weight": (f"{ours}.attn_norm.scale", IDENTITY),
        f"{theirs}.post_attention_layernorm.weight": (f"{ours}.mlp_norm.scale", IDENTITY),
    }


def attention(theirs: str, ours: str, *, bias: bool, qk_norm: bool) -> Names:
    names = (
        {
            f"{theirs}.self_attn.{p}_norm.weight": (f"{ours}.attn.{p}_norm.scale", IDENTITY)
            for p in "qk"
        }
        if qk_norm
        else {}
    )
    for p in "qkvo":
        names |= linear(f"{theirs}.self_attn.{p}_proj", f"{ours}.attn.{p}", bias=bias)
    return names


def mlp(theirs: str, ours: str, *, bias: bool) -> Names:
    names: Names = {}
    for p in ("gate", "up", "down"):
        names |= linear(f"{theirs}.mlp.{p}_proj", f"{ours}.mlp.{p}", bias=bias)
    return names


def linear(theirs: str, ours: str, *, bias: bool) -> Names:
    names: Names = {f"{theirs}.weight": (f"{ours}.kernel", TRANSPOSE)}
    return names | {f"{theirs}.bias": (f"{ours}.bias", IDENTITY)} if bias else names
