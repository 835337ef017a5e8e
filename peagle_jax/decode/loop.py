"""Decoding steps: one program takes them until a row is done.

A step drafts, verifies and commits. With K = 3, for a row that has just committed y after x:

    before    target cache .. x    tokens [y]    aux_hidden_states [h(x)]
    propose   the draft head reads y together with h(x), and drafts d1 d2 d3
    verify    the target reads y d1 d2 d3, and says what it would write after each of them
    accept    say d1 and d2 are right, and z is what the target writes after d2
    commit    d1 d2 z are added to the output
    after     target cache .. x y d1 d2    tokens [d1 d2 z]    aux_hidden_states [h(y) h(d1) h(d2)]

Between steps the last committed token is therefore in `tokens` and not in the target's cache. The
verification wrote d3 to the cache, too; only the cache's length says that it is not valid.

Plain decoding is the same loop with K = 0: nothing is proposed, and the target reads y alone.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from peagle_jax.decode.commit import commit, replicate_results
from peagle_jax.decode.confidence import Confident, count_expected, step_with_confidence
from peagle_jax.decode.drafters import synthetic_rates
from peagle_jax.decode.penalties import count_tokens, penalize
from peagle_jax.decode.sampling import KeyUse, logprobs_of, with_step_keys
from peagle_jax.decode.spec import DecodeSpec, needs_logits
from peagle_jax.decode.switching import last_token
from peagle_jax.decode.tree_step import tree_step
from peagle_jax.decode.verify import draw_accepted, verify_greedy, verify_sampled
from peagle_jax.kernels import vocab
from peagle_jax.kernels.graphs import jit_with_loops
from peagle_jax.layers import CachedAttention, Decoder
from peagle_jax.types import (
    DecodeState,
    KVCache,
    Params,
    RowOptions,
    SamplingParams,
    TargetOutput,
)


@functools.partial(jit_with_loops, static_argnames="spec", donate_argnames="state")
def decode(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    options: RowOptions,
    until_done: int | np.int32 | Int[Array, ""],
    max_steps: int | np.int32 | Int[Array, ""],
    state: DecodeState,
) -> tuple[Int[Array, ""], DecodeState]:
    """Takes steps until `until_done` rows are done, or until there were `max_steps`.

    It also ends where the next step of a running row would not fit its slots.

    Returns:
      How many steps there were, and the state after them.
    """

    def next_step(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        num_steps, state = carry
        return num_steps + 1, step(spec, target_params, draft_params, options, state)

    def goes_on(carry: tuple[Array, DecodeState]) -> Array:
        num_steps, state = carry
        longest = jnp.where(state.done, 0, state.cache.length).max()
        fits = longest + spec.num_ahead <= state.output.shape[1]
        return (state.done.sum() < until_done) & (num_steps < max_steps) & fits

    num_steps, state = jax.lax.while_loop(goes_on, next_step, (jnp.zeros((), jnp.int32), state))
    return num_steps, replicate_results(state)


def step(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    options: RowOptions,
    state: DecodeState,
) -> DecodeState:
    """One draft, one verification, one commit. Rows that are done stay as they are."""
    target = cast(Decoder, nnx.merge(spec.target, target_params))
    take_step = _chain_step if spec.num_nodes is None else tree_step
    return take_step(spec, target, draft_params, options, state)


def _chain_step(
    spec: DecodeSpec, target: Decoder, draft_params: Any, options: RowOptions, state: DecodeState
) -> DecodeState:
    """A step with K drafts that follow each other."""
    sampling = options.sampling
    drafts, draft_logits, draft, confidence = propose(spec, draft_params, sampling, state)
    block = jnp.concatenate([last_token(state), drafts], axis=1)
    out, cache = verify_forward(target, block, state.cache)
    logprobs = None
    if not needs_logits(options):
        tokens, accepted = verify_greedy(drafts, target.argmax_logits(out.hidden))
    else:
        raw = logits = target.compute_logits(out.hidden)
        if options.penalties is not None:
            counts = count_tokens(state, drafts, logits.shape[-1])
            logits = penalize(logits, counts, options.penalties, options.stop_ids)
        if sampling is None:
            tokens, accepted = verify_greedy(drafts, vocab.argmax(logits))
        else:
            fresh = with_step_keys(sampling, state.num_steps, KeyUse.VERIFY)
            tokens, accepted = verify_sampled(drafts, draft_logits, logits, fresh)
        if options.logprobs:
            logprobs = logprobs_of(raw, tokens)
    tokens = tokens.astype(jnp.int32)
    if (rates := synthetic_rates(spec.drafter)) is not None:
        accepted = draw_accepted(rates, accepted, state.num_steps, tokens)
    new = commit(spec, state, draft, cache, out, tokens, accepted, options, logprobs)
    return count_expected(spec.drafter, state, confidence, sampling, new)


def propose(
    spec: DecodeSpec, draft_params: Any, sampling: SamplingParams | None, state: DecodeState
) -> Confident:
    """Drafts K tokens per row, none in plain decoding.

    Returns:
      The drafts; the logits that they were sampled from, or None; the drafter's state; and the
      logits of a confidence head, or None.
    """
    if not spec.drafter:
        return state.tokens[:, :0], None, state.draft, None
    draft_sampling = None
    if sampling is not None and spec.sample_drafts:
        draft_sampling = with_step_keys(sampling, state.num_steps, KeyUse.DRAFT)
    draft = dataclasses.replace(state.draft, sampling=draft_sampling)
    # with a K that changes there are more places than such steps leave tokens in
    unread = state.tokens[:, : spec.k + 1], state.aux_hidden_states[:, : spec.k + 1]
    drafts, draft_logits, draft, confidence = step_with_confidence(
        spec.drafter, draft_params, draft, *unread, state.count
    )
    return drafts, draft_logits, dataclasses.replace(draft, sampling=None), confidence


def verify_forward(
    target: Decoder, block: Int[Array, "B R"], cache: KVCache
) -> tuple[TargetOutput, KVCache]:
    """The target's forward over the last committed token and the drafts after it.

    Returns:
      Its output, and the cache with the block written after `cache.length`, which stays as it is.
    """
    positions = cache.length[:, None] + jnp.arange(block.shape[1])[None]
    return target(block, positions, CachedAttention(positions), cache)
