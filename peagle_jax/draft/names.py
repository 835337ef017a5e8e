"""Checkpoint tensor names of a draft head <-> our parameters; every layout's spelling -> one."""

import re

from peagle_jax.draft import placeholders
from peagle_jax.draft.head import HeadConfig
from peagle_jax.weights import LINEAR, SAME, Layout, Table

MASK_HIDDEN = Layout(
    "mask_hidden",
    lambda t: t.reshape(-1),
    lambda t: t.reshape(1, 1, -1),
    fits=lambda got, want: got[-1:] == want[-1:] and set(got[:-1]) <= {1},  # [1, 1, A], [1, A] and [A] are in use
)
EMBEDDING = "embed_tokens.weight"
VERIFIERS = ("verifier_norm.weight", "verifier_lm_head.weight")  # the target's, which speculators keeps in memory and may have saved


def plain(name: str) -> str:
    """speculators' spelling: no leading `model.` (Automodel), `layers.0.` for vLLM's `midlayer.`."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def table(cfg: HeadConfig) -> Table:
    """Checkpoint name (with `layers.0.` for the first layer) -> (our path, layout)."""
    names = {
        EMBEDDING: ("embed.table", SAME), "fc.weight": ("fusion.fc.kernel", LINEAR),
        "norm.weight": ("norm.scale", SAME), "lm_head.weight": ("lm_head.kernel", LINEAR),
    }  # fmt: skip
    if cfg.parallel and placeholders.HIDDEN[cfg.placeholder_hidden].mask_hidden:
        names["mask_hidden"] = ("mask_hidden", MASK_HIDDEN)
    if cfg.parallel:  # of other designs than the paper's; no layout but our own training runs has them
        names |= {f"placeholder.{name}": (f"placeholder.{name}", SAME) for name in placeholders.own_shapes(cfg, cfg.sizes)}
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
