"""The model card of an exported head: what it is, how to serve it, where it comes from."""

import shlex
from collections.abc import Mapping

from peagle_jax.checkpoints.config_writing import serving_flags
from peagle_jax.draft.head import HeadConfig

ASSUMED_K = 3  # in the example command, where the head does not say what it was trained for
# Keys of the safetensors metadata -> what the card calls them.
ORIGIN_ROWS = {
    "source": "converted from",
    "source_format": "its checkpoint format",
    "command": "command",
    "writer": "written by",
    "left_out": "tensors left out",
}
KINDS = {
    "peagle": ("A", "P-EAGLE", "2602.01469"),
    "eagle3": ("An", "EAGLE-3", "2503.01840"),
    "eagle": ("An", "EAGLE-1", "2401.15077"),
}
CARD = """\
---
library_name: peagle_jax
tags: [speculative-decoding, {tag}]
---
# {name}

{article} {kind} draft head (arXiv:{arxiv}): it drafts tokens for its target, whose text it does not
change.

## Serving

vLLM 0.16 or newer (parallel drafting came with it; 0.32 was tried). `{name}` and `{target}` stand
for a path or a hub id where vLLM runs:

```
{vllm}
```
{by_folder_name}
SageMaker: the same JSON in the variable `SM_VLLM_SPECULATIVE_CONFIG`:

```
{sagemaker}
```

## What it is

{facts}
## Where it comes from

{origin}"""
BY_FOLDER_NAME = """
or, since the folder names its target and K:

```
vllm serve {name}
```
"""


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
    """README.md of a head's folder.

    Args:
      cfg: the head.
      name: of the folder.
      checkpoint_format: "vllm" or "speculators".
      dtype: name of the weights' dtype.
      k: tokens to draft in one step; None where nobody said.
      own_embedding: whether the folder holds an embedding.
      facts: the metadata of its safetensors.
    """
    target = facts.get("target") or "TARGET"
    flags = shlex.quote(serving_flags(cfg, name, k or ASSUMED_K))
    names_target = checkpoint_format == "speculators" and facts.get("target")
    rows = {
        "checkpoint format": checkpoint_format,
        "dtype": dtype,
        "layers": cfg.layers,
        "width": cfg.dim,
        "aux hidden states (inputs of the target's layers)": (
            "the final hidden state, after the norm"
            if cfg.predicts_features
            else list(cfg.aux_hidden_state_layers)
        ),
        "width of an aux hidden state": cfg.target_dim,
        "vocabulary": cfg.vocab,
        "draft vocabulary": cfg.draft_vocab,
        "mask token": cfg.mask_token if cfg.parallel else "none",
        "K": k or "not recorded",
        "embedding": "its own" if own_embedding else "the target's",
    }
    origin = {label: f"`{facts[key]}`" for key, label in ORIGIN_ROWS.items() if key in facts}
    article, kind, arxiv = KINDS[cfg.method]
    return CARD.format(
        tag=kind.lower(),
        name=name,
        article=article,
        kind=kind,
        arxiv=arxiv,
        target=target,
        vllm=f"vllm serve {shlex.quote(target)} --speculative-config {flags}",
        by_folder_name=BY_FOLDER_NAME.format(name=shlex.quote(name)) if names_target else "",
        sagemaker=f"SM_VLLM_SPECULATIVE_CONFIG={flags}",
        facts=_table(rows),
        origin=_table(origin),
    )


def _table(rows: Mapping[str, object]) -> str:
    return "| | |\n| --- | --- |\n" + "".join(
        f"| {label} | {value} |\n" for label, value in rows.items()
    )
