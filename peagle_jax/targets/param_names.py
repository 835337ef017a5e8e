"""Checkpoint tensor names that several families share, each with our parameter's path.

In every function `hf_name` and `path` are prefixes: of the tensors' names in a Hugging Face
checkpoint, and of the dotted paths of our parameters.
"""

from peagle_jax.weights import IDENTITY, TRANSPOSE, ParamTransform

Names = dict[str, tuple[str, ParamTransform]]


def embedding_norm_and_lm_head(*, tied: bool) -> Names:
    """What lies before and behind the layers: embedding, final norm, output matrix.

    Args:
      tied: there is no output matrix, because the embedding's transpose takes its place.
    """
    names: Names = {
        "model.embed_tokens.weight": ("embed.table", IDENTITY),
        "model.norm.weight": ("norm.scale", IDENTITY),
    }
    if not tied:
        names["lm_head.weight"] = ("lm_head.kernel", TRANSPOSE)
    return names


def pre_norms(hf_name: str, path: str) -> Names:
    """The norms before a layer's attention and before its MLP."""
    return {
        f"{hf_name}.input_layernorm.weight": (f"{path}.attn_norm.scale", IDENTITY),
        f"{hf_name}.post_attention_layernorm.weight": (f"{path}.mlp_norm.scale", IDENTITY),
    }


def attention(hf_name: str, path: str, *, bias: bool, qk_norm: bool) -> Names:
    """The projections of a layer's attention, and the norms of queries and keys."""
    names: Names = {}
    if qk_norm:
        for p in "qk":
            name = f"{hf_name}.self_attn.{p}_norm.weight"
            names[name] = (f"{path}.attn.{p}_norm.scale", IDENTITY)
    for p in "qkvo":
        names |= linear(f"{hf_name}.self_attn.{p}_proj", f"{path}.attn.{p}", bias=bias)
    return names


def mlp(hf_name: str, path: str, *, bias: bool) -> Names:
    """The three matrices of a layer's gated MLP."""
    names: Names = {}
    for p in ("gate", "up", "down"):
        names |= linear(f"{hf_name}.mlp.{p}_proj", f"{path}.mlp.{p}", bias=bias)
    return names


def linear(hf_name: str, path: str, *, bias: bool) -> Names:
    """One matrix, and its bias if it has one."""
    names: Names = {f"{hf_name}.weight": (f"{path}.kernel", TRANSPOSE)}
    if bias:
        names[f"{hf_name}.bias"] = (f"{path}.bias", IDENTITY)
    return names
