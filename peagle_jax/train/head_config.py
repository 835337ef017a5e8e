"""The configuration of the head that a training run makes."""

from typing import Any, cast

import jax.numpy as jnp

from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.markov import NO_MARKOV, check_rank
from peagle_jax.layers import Rope
from peagle_jax.targets.config import TargetConfig
from peagle_jax.train.config import HeadRun, Llama3Rope, PeagleRun
from peagle_jax.train.recipe_sections import PlaceholderConfig
from peagle_jax.types import InputError, Model


def head_config(run: HeadRun, target: Model, mask_token: int | None) -> HeadConfig:
    """The configuration of the run's head. Nulls in the recipe take the target's value.

    Args:
      run: the training run.
      target: its target; only its configuration is read.
      mask_token: the tokenizer's mask token, for recipes that name none.

    Raises:
      InputError: the run's head does not fit the target.
    """
    head, target_config = run.head, cast(TargetConfig, target.config)
    parallel = isinstance(run, PeagleRun)
    if head.mask_token is not None:
        mask_token = head.mask_token
    head_dim = _or_default(head.head_dim, target_config.head_dim)
    _check_head(run, target_config, head_dim, mask_token if parallel else None)
    if parallel and mask_token is None:
        rule, got = "P-EAGLE needs a mask token", "a tokenizer without one"
        next_step = "set head.mask_token to an id that the tokenizer leaves unused"
        raise InputError(run.target, rule, got, next_step)
    design, markov, confidence = PlaceholderConfig(), None, None
    if isinstance(run, PeagleRun):
        design, markov, confidence = run.placeholder, run.markov, run.confidence
    draft_vocab = _or_default(head.draft_vocab, target_config.vocab)
    if markov is not None:
        next_step = f"use {min(256, draft_vocab)}"
        check_rank(markov.rank, draft_vocab, parallel, "markov.rank", next_step)
    return HeadConfig(
        vocab=target_config.vocab,
        draft_vocab=draft_vocab,
        dim=_or_default(head.dim, target_config.dim),
        layers=head.layers,
        mlp_dim=_or_default(head.mlp_dim, target_config.mlp_dim),
        heads=_or_default(head.heads, target_config.heads),
        kv_heads=_or_default(head.kv_heads, target_config.kv_heads),
        head_dim=head_dim,
        rope=target_config.rope if head.rope is None else _rope(head.rope, head_dim),
        norm_eps=target_config.norm_eps,
        context=target_config.context,
        target_dim=target_config.dim,
        aux_hidden_state_layers=target_config.aux_hidden_state_layers,
        mask_token=mask_token if parallel else None,
        num_depths=run.num_depths,
        placeholder_hidden=design.hidden,
        placeholder_token=design.token,
        placeholder_attention=design.attention,
        placeholder_context=design.context,
        qk_norm=head.qk_norm,
        attention_bias=False,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.norm_before_fc,
        fc_norm=head.fc_norm,
        norm_output=head.norm_output,
        markov_rank=None if markov is None else markov.rank,
        markov_kind=NO_MARKOV["markov_kind"] if markov is None else markov.kind,
        confidence=confidence is not None,
        confidence_calibration=None,
        windows=(head.sliding_window,) * head.layers,
        dtype=jnp.float32,
    )


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_head(run: HeadRun, target: TargetConfig, head_dim: int, mask_token: int | None) -> None:
    """Raises InputError if the run's head does not fit the target."""
    head, rope_dim = run.head, 2 * len(target.rope.frequencies)
    if head.rope is None and rope_dim != head_dim:
        rule = f"the target's rotary embedding is for a head_dim of {rope_dim}"
        next_step = "set head.head_dim: null, or give head.rope"
        raise InputError("head.head_dim", rule, head_dim, next_step)
    if mask_token is not None and not 0 <= mask_token < target.vocab:
        next_step = "use an id that the tokenizer leaves unused"
        raise InputError(
            "head.mask_token", f"must lie in 0..{target.vocab - 1}", mask_token, next_step
        )
    heads, kv_heads = (
        _or_default(given, of_target)
        for given, of_target in ((head.heads, target.heads), (head.kv_heads, target.kv_heads))
    )
    if heads % kv_heads:
        rule = f"must be a multiple of head.kv_heads, {kv_heads}"
        next_step = f"set both; for example head.heads: {max(heads // kv_heads, 1) * kv_heads}"
        raise InputError("head.heads", rule, heads, next_step)
    layers = list(target.aux_hidden_state_layers)
    if layers != sorted(set(layers)):
        next_step = f"write {sorted(set(layers))}"
        raise InputError(
            "head.aux_hidden_state_layers", "must ascend, as vLLM collects them", layers, next_step
        )
    if head.draft_vocab is not None and not 1 <= head.draft_vocab <= target.vocab:
        next_step = "use null for the whole vocabulary"
        raise InputError(
            "head.draft_vocab", f"must lie in 1..{target.vocab}", head.draft_vocab, next_step
        )


def _rope(rope: Llama3Rope, head_dim: int) -> Rope:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": rope.rope_theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    return Rope.from_hf({"rope_parameters": parameters}, head_dim, "head.rope")
