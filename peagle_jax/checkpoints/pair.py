"""A target and its draft head, loaded so that they fit each other.

A head reads aux hidden states of particular layers, which its target must be told to give, and it
often shares its target's embedding, which it must be given. `load_pair` does both.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.checkpoints.head_reading import to_model
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.checkpoints.runs import open_head
from peagle_jax.checkpoints.target_io import TargetFacts, load_target, read_facts
from peagle_jax.draft.head import HeadConfig
from peagle_jax.layers import FINAL_HIDDEN_STATE, Decoder
from peagle_jax.types import InputError, Model


def load_pair(
    target: str | Path,
    drafter: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    fp8: bool = False,
    mxfp4: str = "packed",
    kv_cache_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> tuple[Model, Model]:
    """Loads a target and the draft head that was trained for it.

        target, head = peagle_jax.load_pair("TARGET", "HEAD")
        answers = peagle_jax.generate(target, head, [[1, 2, 3]], k=7, max_new_tokens=64)

    The target gives the aux hidden states that the head reads. The head uses the target's
    embedding where its folder has none.

    Args:
      target: a Hugging Face folder of a supported family, or a hub id.
      drafter: a head's folder of any checkpoint format, a hub id, or a training run.
      dtype: of the weights of both, and of activations on a GPU; on a CPU activations are float32.
      fp8: matrices of both in float8 with scales, and everything else in `dtype`.
      mxfp4: of the target's experts; see `load_target`.
      kv_cache_dtype: of the target's cached keys and values; see `load_target`.
      mesh: devices over which the target is spread; see `load_target`. The head stays on the
        default device.

    Returns:
      The target and the head.

    Raises:
      InputError: one of the folders is missing or damaged, or the head was made for another
        target.
    """
    folder = weights.find_folder(target)
    facts = read_facts(folder)
    state = open_head(drafter, facts.layers)
    check_made_for(state.config, facts, drafter)
    target_model = load_target(
        folder,
        aux_hidden_state_layers=state.config.aux_hidden_state_layers,
        dtype=dtype,
        fp8=fp8,
        mxfp4=mxfp4,
        kv_cache_dtype=kv_cache_dtype,
        mesh=mesh,
    )
    return target_model, _head_of(target_model, state, drafter, fp8)


def with_aux_layers(target: Model, layers: Sequence[int]) -> Model:
    """The target with other aux hidden states; it has the same arrays, and not copies of them.

    Args:
      target: a loaded target.
      layers: the `aux_hidden_state_layers` of a head.
    """
    module = cast(Decoder, target.bind(target.params))
    module.aux_hidden_state_layers = tuple(layers)
    config = dataclasses.replace(target.config, aux_hidden_state_layers=tuple(layers))
    return Model.from_module(module, config)


def load_drafter_for(target: Model, drafter: str | Path, *, fp8: bool = False) -> Model:
    """Loads a further draft head for a target that is loaded already, in the target's dtype.

    Args:
      target: loaded with the aux hidden state layers that the head reads. An EAGLE-1 head may be
        loaded beside heads of the other kinds; decoding with it then takes `with_aux_layers`.
      drafter: a head's folder of any checkpoint format, a hub id, or a training run.
      fp8: the head's matrices in float8 with scales.

    Returns:
      The head.

    Raises:
      InputError: the folder is missing or damaged, or the head does not fit the target.
    """
    state = open_head(drafter, target.config.layers)
    check_made_for(state.config, _facts_of(target), drafter)
    layers = state.config.aux_hidden_state_layers
    # EAGLE-1 heads never read what other heads read, and are measured beside them
    reads_final = target.config.aux_hidden_state_layers == (FINAL_HIDDEN_STATE,)
    if state.config.predicts_features != reads_final and max(layers) <= target.config.layers:
        target = with_aux_layers(target, layers)
    return _head_of(target, state, drafter, fp8)


def check_fit(target: Model, head: Model, where: str | Path = "drafter") -> None:
    """Checks that a head was made for a target, as far as their shapes tell.

    Args:
      target: the target, as it is loaded.
      head: the draft head.
      where: the head's folder, for the error.

    Raises:
      InputError: the widths or vocabularies differ, or the target does not give the aux hidden
        states that the head reads.
    """
    check_made_for(head.config, _facts_of(target), where)
    head_layers = list(head.config.aux_hidden_state_layers)
    target_layers = list(target.config.aux_hidden_state_layers)
    if head_layers != target_layers:
        rule = f"the target must give the head its aux_hidden_state_layers {head_layers}"
        next_step = (
            "load both with load_pair, or pass the head's layers to load_target as "
            "aux_hidden_state_layers"
        )
        raise InputError(where, rule, target_layers, next_step)


def check_made_for(head: HeadConfig, target: TargetFacts, where: str | Path) -> None:
    """Checks that a head was made for a target, before the weights of either are read.

    Args:
      head: the head's configuration.
      target: the target, as far as its config tells.
      where: the head's folder, for the error.

    Raises:
      InputError: the widths or vocabularies differ, or the head reads layers that the target does
        not have.
    """
    other_target = "use the target that the head was trained on"
    if target.dim not in (None, head.target_dim):
        rule = f"the head must read aux hidden states of the target's width {target.dim}"
        raise InputError(where, rule, head.target_dim, other_target)
    if head.predicts_features and target.dim not in (None, head.dim):
        rule = f"an EAGLE-1 head must have the target's width {target.dim}"
        raise InputError(where, rule, head.dim, other_target)
    if target.vocab not in (None, head.vocab):
        rule = f"the head must have the target's vocabulary of {target.vocab} tokens"
        raise InputError(where, rule, head.vocab, other_target)
    too_high = [layer for layer in head.aux_hidden_state_layers if layer > target.layers]
    if too_high:
        rule = f"the head must read hidden states of the target's layers 0..{target.layers}"
        raise InputError(where, rule, too_high, other_target)


def _facts_of(target: Model) -> TargetFacts:
    config = target.config
    return TargetFacts(layers=config.layers, dim=config.dim, vocab=config.vocab)


def _head_of(target: Model, state: HeadState, drafter: str | Path, fp8: bool) -> Model:
    lm_head = None
    if state.shares_lm_head:
        lm_head = cast(Decoder, target.bind(target.params)).lm_head_weight().T
    head = to_model(
        state,
        dtype=target.config.dtype,
        embedding=target.params["embed"]["table"],
        lm_head=lm_head,
        fp8=fp8,
    )
    check_fit(target, head, drafter)
    return head
