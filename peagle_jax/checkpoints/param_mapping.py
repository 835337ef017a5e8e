"""Names of a draft head's tensors in checkpoints <-> paths of our parameters."""

import re

import numpy as np

from peagle_jax.draft import placeholders
from peagle_jax.draft.head import HeadConfig
from peagle_jax.weights import IDENTITY, TRANSPOSE, ParamTable, ParamTransform


def _is_vector_of_same_size(got: tuple, want: tuple) -> bool:
    """[1, 1, A], [1, A] and [A] are in use for mask_hidden."""
    return got[-1:] == want[-1:] and set(got[:-1]) <= {1}


def _to_vector(tensor: np.ndarray) -> np.ndarray:
    """A checkpoint's mask_hidden as our parameter [A]."""
    return tensor.reshape(-1)


def _to_rank_3(tensor: np.ndarray) -> np.ndarray:
    """Our parameter [A] in the shape [1, 1, A], in which checkpoints are written."""
    return tensor.reshape(1, 1, -1)


MASK_HIDDEN = ParamTransform("mask_hidden", _to_vector, _to_rank_3, fits=_is_vector_of_same_size)
EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
MARKOV = "markov_head."  # what the names of a Markov head's tensors begin with
CONFIDENCE = "confidence_head."  # likewise of a confidence head
# The target's, which speculators has in memory while it trains and may have saved with the head.
VERIFIER_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight")
# What no head reads: frequencies that older writers saved, which the config gives; and a norm of
# the target's hidden states in layers that do not read them, for which vLLM has a place.
UNREAD = re.compile(
    r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|layers\.[1-9]\d*\.hidden_norm\.weight"
)


def is_left_out(name: str) -> bool:
    """Whether a tensor, by its plain name, says nothing about a head."""
    return name in VERIFIER_TENSORS or UNREAD.fullmatch(name) is not None


def plain_name(name: str) -> str:
    """Any format's name of a tensor -> speculators' name.

    That is without Automodel's leading `model.`, and with `layers.0.` for vLLM's `midlayer.`.
    """
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def table(cfg: HeadConfig) -> ParamTable:
    """Speculators' name of each tensor -> (path of our parameter, how it is transformed)."""
    names = {
        EMBEDDING: ("embed.table", IDENTITY),
        LM_HEAD: ("lm_head.kernel", TRANSPOSE),
    }
    if cfg.predicts_features:
        names["fc.weight"] = ("fc.kernel", TRANSPOSE)
    else:
        names["fc.weight"] = ("fusion.fc.kernel", TRANSPOSE)
        names["norm.weight"] = ("norm.scale", IDENTITY)
    if cfg.parallel:
        names |= _placeholder_names(cfg)
    if cfg.draft_vocab != cfg.vocab:
        names["d2t"] = ("d2t", IDENTITY)
    if cfg.markov_rank is not None:
        names |= _markov_names(cfg)
    if cfg.confidence:  # under DSpark's names, as a Markov head
        names[f"{CONFIDENCE}proj.weight"] = ("confidence.kernel", TRANSPOSE)
        names[f"{CONFIDENCE}proj.bias"] = ("confidence.bias", IDENTITY)
    if cfg.norm_before_fc:
        names["input_norm.weight"] = ("fusion.input_norm.scale", IDENTITY)
    if cfg.fc_norm:
        for i in range(len(cfg.aux_hidden_state_layers)):
            names[f"fc_norm.{i}.weight"] = (f"fusion.fc_norm.{i}.scale", IDENTITY)
    for i in range(cfg.layers):
        names |= _layer_names(cfg, i)
    return names


def _markov_names(cfg: HeadConfig) -> dict[str, tuple[str, ParamTransform]]:
    """DSpark's names of a Markov head, as vLLM's and DeepSpec's DSpark folders have them."""
    names = {
        f"{MARKOV}markov_w1.weight": ("markov.w1.table", IDENTITY),
        f"{MARKOV}markov_w2.weight": ("markov.w2.kernel", TRANSPOSE),
    }
    if cfg.markov_kind != "vanilla":
        name = "gate" if cfg.markov_kind == "gated" else "joint"
        names[f"{MARKOV}{name}_proj.weight"] = (f"markov.{name}.kernel", TRANSPOSE)
        names[f"{MARKOV}{name}_proj.bias"] = (f"markov.{name}.bias", IDENTITY)
    return names


def _placeholder_names(cfg: HeadConfig) -> dict[str, tuple[str, ParamTransform]]:
    """`mask_hidden`, and what other designs than the paper's have: only our training runs do."""
    names = {}
    if placeholders.HIDDEN_DESIGNS[cfg.placeholder_hidden].mask_hidden:
        names["mask_hidden"] = ("mask_hidden", MASK_HIDDEN)
    for name in placeholders.own_shapes(cfg, cfg.sizes):
        names[f"placeholder.{name}"] = (f"placeholder.{name}", IDENTITY)
    if cfg.placeholder_context == "injected":
        for i in range(1, cfg.layers):
            for norm in ("context_norm", "context_token_norm"):
                name = f"layers.{i}.{norm}"
                names[f"{name}.weight"] = (f"{name}.scale", IDENTITY)
    return names


def _layer_names(cfg: HeadConfig, index: int) -> dict[str, tuple[str, ParamTransform]]:
    layer = f"layers.{index}"
    names = {f"{layer}.post_attention_layernorm.weight": (f"{layer}.mlp_norm.scale", IDENTITY)}
    reads_features = index == 0 and cfg.predicts_features  # and has no norm before attention
    if not reads_features:
        names[f"{layer}.input_layernorm.weight"] = (f"{layer}.input_norm.scale", IDENTITY)
    if index == 0 and not reads_features:
        names[f"{layer}.hidden_norm.weight"] = (f"{layer}.hidden_norm.scale", IDENTITY)
    for q in "qkvo":
        names[f"{layer}.self_attn.{q}_proj.weight"] = (f"{layer}.attn.{q}.kernel", TRANSPOSE)
        if cfg.attention_bias:
            names[f"{layer}.self_attn.{q}_proj.bias"] = (f"{layer}.attn.{q}.bias", IDENTITY)
    if cfg.qk_norm:
        for q in "qk":
            names[f"{layer}.self_attn.{q}_norm.weight"] = (f"{layer}.attn.{q}_norm.scale", IDENTITY)
    for matrix in ("gate", "up", "down"):
        names[f"{layer}.mlp.{matrix}_proj.weight"] = (f"{layer}.mlp.{matrix}.kernel", TRANSPOSE)
    return names
