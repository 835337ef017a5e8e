"""The model card of an exported head: what it is, how to serve it, where it comes from."""

import shlex
from collections.abc import Mapping

from peagle_jax.checkpoints.config_writing import serving_flags
from peagle_jax.draft.head import HeadConfig

ORIGIN = {
    "source": "converted from",
    "source_layout": "its layout",
    "command": "command",
    "writer": "written by",
    "left_out": "left out of it",
}


def head_card(
    cfg: HeadConfig,
    *,
    name: str,
    checkpoint_format: str,
    dtype: str,
    k: int | None,
    own_embedding: bool,
    facts: Mapping[str, str],
) -> str:
    """README.md of a folder in layout "vllm" or "speculators". `facts` is the metadata of its safetensors."""
    kind = "P-EAGLE" if cfg.parallel else "EAGLE-3"
    target, known, k = facts.get("target") or "TARGET", k, k or 3
    vllm = f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(serving_flags(cfg, name, k))}"
    alone = f"\nor, since the folder names its target and K:\n\n```\nvllm serve {shlex.quote(name)}\n```\n"
    rows = {
        "layout": checkpoint_format,
        "dtype": dtype,
        "layers": cfg.layers,
        "width": cfg.dim,
        "taps (inputs of the target's layers)": list(cfg.aux_hidden_state_layers),
        "width of a tap": cfg.target_dim,
        "vocabulary": cfg.vocab,
        "draft vocabulary": cfg.draft_vocab,
        "mask token": cfg.mask_token if cfg.parallel else "none",
        "K": known or "not recorded",
        "embedding": "its own" if own_embedding else "the target's",
    }

    def table(pairs):
        return "".join(f"| {key} | {value} |\n" for key, value in pairs.items())

    origin = {word: f"`{facts[key]}`" for key, word in ORIGIN.items() if key in facts}
    return (
        f"---\nlibrary_name: peagle_jax\ntags: [speculative-decoding, {kind.lower()}]\n---\n# {name}\n\n"
        f"{'A P-EAGLE' if cfg.parallel else 'An EAGLE-3'} draft head (arXiv:{'2602.01469' if cfg.parallel else '2503.01840'}): it drafts "
        f"tokens for its target, whose text it does not change.\n\n## Serving\n\n"
        "vLLM 0.16 or newer (parallel drafting came with it; 0.32 was tried). "
        f"`{name}` and `{target}` stand for a path or a hub id where vLLM runs:\n\n```\n{vllm}\n```\n"
        f"{alone if checkpoint_format == 'speculators' and facts.get('target') else ''}\n"
        f"SageMaker: the same JSON in the variable `SM_VLLM_SPECULATIVE_CONFIG`:\n\n```\n"
        f"SM_VLLM_SPECULATIVE_CONFIG={shlex.quote(serving_flags(cfg, name, k))}\n```\n\n"
        f"## What it is\n\n| | |\n| --- | --- |\n{table(rows)}\n## Where it comes from\n\n| | |\n| --- | --- |\n{table(origin)}"
    )
