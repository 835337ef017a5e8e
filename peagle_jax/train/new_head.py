"""The head that a training run begins with: its parameters before step 1."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from transformers import PreTrainedTokenizerBase

from peagle_jax.checkpoints import head_reading
from peagle_jax.checkpoints.runs import open_head
from peagle_jax.draft import draft_vocab
from peagle_jax.draft.head import random_head
from peagle_jax.draft.init import init_from_head, init_from_target, init_placeholders
from peagle_jax.draft.placeholders import FIXED_DESIGNS
from peagle_jax.layers import Decoder
from peagle_jax.targets import sharding
from peagle_jax.train.config import HeadRun
from peagle_jax.train.data import PackedRows
from peagle_jax.train.head_config import head_config
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
