"""The end of a step: tokens are added to the answers, and rows that are done stay as they are."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.decode.switching import append_unread, replace_unread
from peagle_jax.types import DecodeState, DraftState, KVCache, RowOptions, TargetOutput


def commit(
    spec: DecodeSpec,
    state: DecodeState,
    draft: DraftState,
    cache: KVCache,
    out: TargetOutput,
    tokens: Int[Array, "B R"],
    accepted: Int[Array, " B"],
    options: RowOptions,
    logprobs: Float[Array, "B R"] | None = None,
) -> DecodeState:
    """Adds the accepted drafts and the target's token to the answers, and rolls the cache back.

    Args:
      state: before the step.
      draft: the drafter's state after drafting.
      cache: the target's after verification, with the last token and all K drafts written to it.
      out: of the verification. Its aux hidden states are what the drafter reads next.
      tokens: from the acceptance rule; the first `accepted + 1` of each row are committed.
      accepted: drafts accepted, 0 to K.
      logprobs: of `tokens`; None where nobody wants them.
    """
    is_accepted = jnp.arange(spec.k)[None] < accepted[:, None]
    is_draft = jnp.pad(is_accepted, [(0, 0), (0, 1)])  # the last committed token is the target's
    emitted = emit(state, tokens, is_draft, accepted + 1, options, logprobs)
    is_read = jnp.arange(spec.k + 1)[None] <= accepted[:, None]
    failed = ~(is_finite(out.hidden) | ~is_read).all(axis=1)
    if spec.k_changes and not spec.k:
        unread = append_unread(state, tokens, out.aux_hidden_states)
    elif spec.k_changes:
        unread = replace_unread(state, tokens, out.aux_hidden_states, accepted + 1)
    else:
        unread = tokens, out.aux_hidden_states, accepted + 1
    num_positions = state.num_accepted_per_pos.shape[1]
    new = dataclasses.replace(
        emitted,
        length=jnp.where(failed, state.length, emitted.length),
        done=emitted.done | failed,
        failed=failed,
        cache=dataclasses.replace(cache, length=state.cache.length + accepted + 1),
        draft=draft,
        tokens=unread[0],
        aux_hidden_states=unread[1],
        count=unread[2],
        num_steps=state.num_steps + 1,
        num_drafts=state.num_drafts + (spec.k > 0),
        num_draft_tokens=state.num_draft_tokens + spec.num_drafts,
        num_accepted_per_pos=state.num_accepted_per_pos
        + jnp.pad(is_accepted, [(0, 0), (0, num_positions - spec.k)]),
    )
    return _freeze_done_rows(state, new, spec.k_changes)


def _freeze_done_rows(old: DecodeState, new: DecodeState, k_changes: bool) -> DecodeState:
    """`new` for rows that were still running in `old`; the others stay as they were.

    Of the caches only the lengths are restored: what a step wrote for a finished row lies beyond
    its length. `output`, `is_draft` and `logprobs` are not written for finished rows anyway. What
    the draft head reads next nobody reads of a finished row: where K changes (`k_changes`), and it
    has more places than a step writes, it is not restored either.
    """

    def unless_done(new_value: Array, old_value: Array) -> Array:
        done = old.done.reshape((-1,) + (1,) * (new_value.ndim - 1))
        return jnp.where(done, old_value, new_value)

    def with_frozen_length(new_cache: KVCache, old_cache: KVCache) -> KVCache:
        return dataclasses.replace(
            new_cache, length=unless_done(new_cache.length, old_cache.length)
        )

    draft = new.draft
    if draft.cache is not None and old.draft.cache is not None:
        draft = dataclasses.replace(draft, cache=with_frozen_length(draft.cache, old.draft.cache))
    written = {"cache", "draft", "output", "is_draft", "logprobs", "num_expected_per_pos"}
    if k_changes:
        written |= {"tokens", "aux_hidden_states"}
    # in the fields' order: a set's differs between processes, which would then share no programs
    names = [field.name for field in dataclasses.fields(new) if field.name not in written]
    frozen = {name: unless_done(getattr(new, name), getattr(old, name)) for name in names}
    cache = with_frozen_length(new.cache, old.cache)
    return dataclasses.replace(new, cache=cache, draft=draft, **frozen)


def is_finite(hidden: Float[Array, "*rows D"]) -> Bool[Array, "*rows"]:
    """Whether a row's hidden state, and so its logits, are free of NaN and infinity."""
    return jnp.isfinite(hidden).all(axis=-1)


def emit(
    state: DecodeState,
    tokens: Int[Array, "B R"],
    is_draft: Bool[Array, "B R"],
    count: Int[Array, " B"],
    options: RowOptions,
    logprobs: Float[Array, "B R"] | None = None,
) -> DecodeState:
    """Appends the first `count` of `tokens` to the answers of rows that are not done.

    A row is done when it emitted a stop token within its limit, or reached the limit. Tokens past
    the end are written, too; `length` leaves them out.
    """
    place = jnp.arange(tokens.shape[1])[None]
    index = state.emitted[:, None] + place
    is_emitted = (place < count[:, None]) & ~state.done[:, None]
    rows = jnp.arange(tokens.shape[0])[:, None]
    # an index past the buffer's end is dropped
    write_to = jnp.where(is_emitted, index, state.output.shape[1])
    output = state.output.at[rows, write_to].set(tokens, mode="drop")
    output_is_draft = state.is_draft.at[rows, write_to].set(is_draft, mode="drop")
    output_logprobs = state.logprobs
    if logprobs is not None:
        output_logprobs = output_logprobs.at[rows, write_to].set(logprobs, mode="drop")

    max_new_tokens = jnp.asarray(options.max_new_tokens)
    is_stop = (tokens[..., None] == options.stop_ids[:, None]).any(axis=-1)
    is_stop &= is_emitted & (index < max_new_tokens[:, None])
    stopped = is_stop.any(axis=1)
    emitted = state.emitted + count
    length_with_stop = state.emitted + is_stop.argmax(axis=1) + 1
    length = jnp.where(stopped, length_with_stop, jnp.minimum(emitted, max_new_tokens))
    return dataclasses.replace(
        state,
        output=output,
        is_draft=output_is_draft,
        logprobs=output_logprobs,
        emitted=emitted,
        length=jnp.where(state.done, state.length, length),
        done=state.done | stopped | (emitted >= max_new_tokens),
    )


def replicate_results(state: DecodeState) -> DecodeState:
    """On a mesh: the results on every device, so that each process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return state
    answers = ("output", "is_draft", "logprobs", "length", "done", "failed")
    counters = ("num_drafts", "num_draft_tokens", "num_accepted_per_pos", "num_expected_per_pos")
    replicated = {
        name: jax.lax.with_sharding_constraint(getattr(state, name), PartitionSpec())
        for name in (*answers, *counters)
        if getattr(state, name) is not None
    }
    length = jax.lax.with_sharding_constraint(state.cache.length, PartitionSpec())
    cache = dataclasses.replace(state.cache, length=length)
    return dataclasses.replace(state, cache=cache, **replicated)
