"""Checkpoint tensor names of a draft head <-> our parameters; every layout's spelling -> one."""

import re

from peagle_jax.draft import placeholders
from peagle_jax.draft.head import HeadConfig
from peagle_jax.weights import IDENTITY, TRANSPOSE, ParamTable, ParamTransform

MASK_HIDDEN = ParamTransform(
    "mask_hidden",
    lambda t: t.reshape(-1),
    lambda t: t.reshape(1, 1, -1),
    fits=lambda got, want: (
        got[-1:] == want[-1:] and set(got[:-1]) <= {1}
    ),  # [1, 1, A], [1, A] and [A] are in use
)
EMBEDDING = "embed_tokens.weight"
VERIFIERS = (
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)  # the target's, which speculators keeps in memory and may have saved


def plain(name: str) -> str:
    """speculators' spelling: no leading `model.` (Automodel), `layers.0.` for vLLM's `midlayer.`."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def table(cfg: HeadConfig) -> ParamTable:
    """Checkpoint name (with `layers.0.` for the first layer) -> (our path, layout)."""
    names = {
        EMBEDDING: ("embed.table", IDENTITY),
        "fc.weight": ("fusion.fc.kernel", TRANSPOSE),
        "norm.weight": ("norm.scale", IDENTITY),
        "lm_head.weight": ("lm_head.kernel", TRANSPOSE),
    }
    if cfg.parallel and placeholders.HIDDEN_DESIGNS[cfg.placeholder_hidden].mask_hidden:
        names["mask_hidden"] = ("mask_hidden", MASK_HIDDEN)
    if (
        cfg.parallel
    ):  # of other designs than the paper's; no layout but our own training runs has them
        names |= {
            f"placeholder.{name}": (f"placeholder.{name}", IDENTITY)
            for name in placeholders.own_shapes(cfg, cfg.sizes)
        }
    if cfg.draft_vocab != cfg.vocab:
        names["d2t"] = ("d2t", IDENTITY)
    if cfg.norm_before_fc:
        names["input_norm.weight"] = ("fusion.input_norm.scale", IDENTITY)
    if cfg.fc_norm:
        names |= {
            f"fc_norm.{i}.weight": (f"fusion.fc_norm.{i}.scale", IDENTITY)
            for i in range(len(cfg.aux_hidden_state_layers))
        }
    for i in range(cfg.layers):
        p = f"layers.{i}"
        names[f"{p}.input_layernorm.weight"] = (f"{p}.input_norm.scale", IDENTITY)
        names[f"{p}.post_attention_layernorm.weight"] = (f"{p}.mlp_norm.scale", IDENTITY)
        if i == 0:
            names[f"{p}.hidden_norm.weight"] = (f"{p}.hidden_norm.scale", IDENTITY)
        for q in "qkvo":
            names[f"{p}.self_attn.{q}_proj.weight"] = (f"{p}.attn.{q}.kernel", TRANSPOSE)
            if cfg.attention_bias:
                names[f"{p}.self_attn.{q}_proj.bias"] = (f"{p}.attn.{q}.bias", IDENTITY)
        for q in "qk" if cfg.qk_norm else "":
            names[f"{p}.self_attn.{q}_norm.weight"] = (f"{p}.attn.{q}_norm.scale", IDENTITY)
        for q in ("gate", "up", "down"):
            names[f"{p}.mlp.{q}_proj.weight"] = (f"{p}.mlp.{q}.kernel", TRANSPOSE)
    return names
