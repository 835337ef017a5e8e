"""The head that a training run begins with: its configuration, and its parameters before step 1."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from transformers import PreTrainedTokenizerBase

from peagle_jax.checkpoints import head_reading
from peagle_jax.checkpoints.runs import open_head
from peagle_jax.draft import draft_vocab
from peagle_jax.draft.head import HeadConfig, random_head
from peagle_jax.draft.init import init_from_head, init_from_target, init_placeholders
from peagle_jax.draft.markov import check_rank
from peagle_jax.draft.placeholders import FIXED_DESIGNS
from peagle_jax.layers import Decoder, Rope
from peagle_jax.targets import sharding
from peagle_jax.targets.config import TargetConfig
from peagle_jax.train.config import HeadRun, Llama3Rope, PeagleRun, PlaceholderConfig
from peagle_jax.train.data import PackedRows
from peagle_jax.train.hidden_states import compute_hidden_states
from peagle_jax.train.mesh import put, to_host
from peagle_jax.types import Batch, InputError, Model, Params

MEAN_TOKENS = 8192  # over which the mean aux hidden states are taken


def new_head(
    run: HeadRun, target: Model, rows: PackedRows, tokenizer: PreTrainedTokenizerBase
) -> Model:
    """The head to train, before its first step.

    Its layers begin as random numbers, as the target's last layer (`run.init`), or as those of a
    trained head (`run.init_from`). Placeholders begin alike: as small random numbers, as the mean
    aux hidden states, or as those of the trained head; what the latter's design does not have
    begins as without it.

    Args:
      run: the training run.
      target: its target.
      rows: its packed rows, which decide a reduced draft vocabulary.
      tokenizer: the target's.

    Raises:
      InputError: the run's head does not fit the target, or the trained head cannot be read.
    """
    config = head_config(run, target, cast(int | None, tokenizer.mask_token_id))
    cap = getattr(target.config, "logit_cap", None)
    if config.predicts_features and cap is not None:
        # a perfect prediction would have a loss: the head's logits have no cap, as in vLLM
        rule = "an EAGLE-1 head needs a target whose logits have no soft cap"
        raise InputError("task", rule, f"a cap of {cap:g}", "use task: eagle3")
    ids = None
    if config.draft_vocab != config.vocab:
        counts = rows.token_counts(config.vocab)
        ids = draft_vocab.choose(counts, config.draft_vocab)
    # what a head begins from is small, and may be spread over devices
    begins_from = _last_parts(target)
    module = cast(Decoder, begins_from.bind(begins_from.params))
    embedding, output = module.embed.table[...], module.lm_head_weight()
    head = random_head(config, seed=run.seed, embedding=embedding, output=output, ids=ids)

    mean_aux_hidden_states = None
    is_fixed = config.parallel and config.placeholder_hidden in FIXED_DESIGNS
    if run.init == "target" or is_fixed:
        mean_aux_hidden_states = _mean_aux_hidden_states(target, rows)
    if run.init == "target":
        head = init_from_target(head, begins_from)
    trained = None
    if run.init_from is not None:
        trained = head_reading.to_model(
            open_head(run.init_from), dtype=config.dtype, embedding=embedding, lm_head=output.T
        )
        head = init_from_head(head, trained, run.init_from)
    if config.parallel:
        # last, because placeholders begin from the head's embedding and fusion
        head = init_placeholders(
            head,
            mean_aux_hidden_states,
            seed=run.seed,
            starts_at_mean=run.init == "target",
        )
    if config.parallel and trained is not None and trained.config.parallel:
        params = dict(trained.params)
        if is_fixed and trained.config.placeholder_hidden != config.placeholder_hidden:
            params.pop("mask_hidden", None)  # what was learned is no mean
        trained = dataclasses.replace(trained, params=params)
        head = init_from_head(head, trained, str(run.init_from))
    return head


def _last_parts(target: Model) -> Model:
    """The target with its embedding, last layer, final norm and output matrix on one device.

    On a mesh the other parameters stay where they are.
    """
    if sharding.mesh_of(target.params) is None:
        return target
    last = max(target.params["blocks"])

    def fetched(path: tuple, x: Array) -> Array:
        keys = [key.key for key in path]
        is_needed = keys[0] != "blocks" or keys[1] == last
        return jnp.asarray(to_host(x)) if is_needed else x

    return dataclasses.replace(target, params=jax.tree.map_with_path(fetched, target.params))


def _mean_aux_hidden_states(target: Model, rows: PackedRows) -> Float[Array, " A"]:
    """Mean aux hidden states over the first rows of the corpus."""
    num_rows = min(-(-MEAN_TOKENS // rows.seq_len), len(rows))
    mesh = sharding.mesh_of(target.params)

    def mean(params: Params, batch: Batch) -> Float[Array, " A"]:
        aux_hidden_states, _ = compute_hidden_states(cast(Decoder, target.bind(params)), batch)
        is_token = (batch.segment_ids >= 0)[..., None]
        return jnp.mean(aux_hidden_states, axis=(0, 1), where=is_token)

    batch = rows.take(range(num_rows))
    if mesh is None:
        return mean(target.params, jax.tree.map(jnp.asarray, batch))
    everywhere = NamedSharding(mesh, PartitionSpec())
    batch = jax.tree.map(lambda x: put(x, everywhere), batch)
    return jnp.asarray(to_host(jax.jit(mean, out_shardings=everywhere)(target.params, batch)))


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
    design, markov = PlaceholderConfig(), None
    if isinstance(run, PeagleRun):
        design, markov = run.placeholder, run.markov
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
        qk_norm=head.qk_norm,
        attention_bias=False,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.norm_before_fc,
        fc_norm=head.fc_norm,
        norm_output=head.norm_output,
        markov_rank=None if markov is None else markov.rank,
        markov_gated=markov is not None and markov.gated,
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
