"""The model card of an exported head: what it is, how to serve it, where it comes from."""

import shlex
from collections.abc import Mapping

from peagle_jax.checkpoints.config_writing import serving_flags
from peagle_jax.draft.head import HeadConfig

NO_TARGET = "TARGET"  # in the example command, where the head names none
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

{serving}
## What it is

{facts}
## Where it comes from

{origin}"""
BY_VLLM = """\
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
"""
BY_PEAGLE = """\
peagle_jax alone reads this folder:

```
peagle generate --target {target} --drafter {name} --prompt "..."
```

{without}

```
peagle convert {name} OUT --to vllm {flags}
```
"""
WITHOUT_MARKOV = """\
vLLM and speculators read the head without its Markov head. DSpark (arXiv:2607.05147) reports more
accepted drafts with one than without; `peagle bench` measures both for this head:"""
WITHOUT_CONFIDENCE = """\
vLLM and speculators read the head without its confidence head. Its drafts are the same:"""
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
      checkpoint_format: "vllm", "speculators" or "peagle_jax".
      dtype: name of the weights' dtype.
      k: tokens to draft in one step; None where nobody said.
      own_embedding: whether the folder holds an embedding.
      facts: the metadata of its safetensors.
    """
    target = facts.get("target") or NO_TARGET
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
    if cfg.markov_rank is not None:
        rows["Markov head (arXiv:2607.05147)"] = f"rank {cfg.markov_rank}, {cfg.markov_kind}"
    if cfg.confidence:
        is_calibrated = cfg.confidence_calibration is not None
        calibrated = "calibrated" if is_calibrated else "not calibrated"
        rows["confidence head (arXiv:2607.05147)"] = calibrated
    origin = {label: f"`{facts[key]}`" for key, label in ORIGIN_ROWS.items() if key in facts}
    article, kind, arxiv = KINDS[cfg.method]
    return CARD.format(
        tag=kind.lower(),
        name=name,
        article=article,
        kind=kind,
        arxiv=arxiv,
        serving=_serving(cfg, name, target, checkpoint_format, k),
        facts=_table(rows),
        origin=_table(origin),
    )


def _serving(cfg: HeadConfig, name: str, target: str, checkpoint_format: str, k: int | None) -> str:
    """How the folder is decoded with."""
    quoted = shlex.quote(name)
    if checkpoint_format == "peagle_jax":
        without = WITHOUT_CONFIDENCE if cfg.markov_rank is None else WITHOUT_MARKOV
        dropped = ["--drop-markov"] if cfg.markov_rank is not None else []
        dropped += ["--drop-confidence"] if cfg.confidence else []
        return BY_PEAGLE.format(
            name=quoted, target=shlex.quote(target), without=without, flags=" ".join(dropped)
        )
    flags = shlex.quote(serving_flags(cfg, name, k or ASSUMED_K))
    names_target = checkpoint_format == "speculators" and target != NO_TARGET
    return BY_VLLM.format(
        name=name,
        target=target,
        vllm=f"vllm serve {shlex.quote(target)} --speculative-config {flags}",
        by_folder_name=BY_FOLDER_NAME.format(name=quoted) if names_target else "",
        sagemaker=f"SM_VLLM_SPECULATIVE_CONFIG={flags}",
    )


def _table(rows: Mapping[str, object]) -> str:
    return "| | |\n| --- | --- |\n" + "".join(
        f"| {label} | {value} |\n" for label, value in rows.items()
    )
