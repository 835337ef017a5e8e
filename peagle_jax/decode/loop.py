"""A whole generation: one program reads the prompts, another takes steps until all rows are done.

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
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.decode import growth
from peagle_jax.decode.drafters import Drafter
from peagle_jax.decode.sampling import KeyUse, probabilities, sample, step_keys, with_step_keys
from peagle_jax.decode.verify import verify_greedy, verify_sampled
from peagle_jax.layers import CachedAttention, Decoder, activation_dtype
from peagle_jax.targets import sharding
from peagle_jax.targets.config import TargetConfig
from peagle_jax.types import DecodeState, DraftState, KVCache, Params, SamplingParams, TargetOutput


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static description of a generation.

    Calls with equal specs and equal array shapes share one compiled program.

    Attributes:
      target: the target's graph, without its arrays.
      target_config: sizes of the target and of its cache.
      drafter: what proposes tokens; None for plain decoding.
      cache_size: positions that are reserved: at least prompt + new tokens + K. Caches begin with
        fewer slots and grow, see `growth`.
      sample_drafts: at a temperature above 0, sample the drafts (True), or draft argmaxes (False,
        vLLM's default). Both leave the target's distribution as it is.
      chunk: prompt tokens of one forward of the prefill; None for the whole prompt.
      sliding_cache: ring caches for layers with a sliding window.
    """

    target: nnx.GraphDef
    target_config: TargetConfig
    drafter: Drafter | None
    cache_size: int
    sample_drafts: bool
    chunk: int | None = None
    sliding_cache: bool = False

    @property
    def k(self) -> int:
        """Draft tokens per step; 0 in plain decoding."""
        return self.drafter.k if self.drafter else 0

    def block(self, prompt_width: int) -> int | None:
        """The `block` of `KVCache.empty` for prompts that are padded to `prompt_width` tokens."""
        if not self.sliding_cache:
            return None
        return max(min(prompt_width, self.chunk or prompt_width), self.k + 1)

    def padded_width(self, prompt_width: int) -> int:
        """Positions that reading prompts of `prompt_width` tokens writes: whole chunks."""
        chunk = min(prompt_width, self.chunk or prompt_width)
        return -(-prompt_width // chunk) * chunk


def run(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    prompts: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, " B"],
    max_new_tokens: Int[Array | np.ndarray, " B"],
    stop_ids: Int[Array | np.ndarray, " stops"],
    sampling: SamplingParams | None,
) -> DecodeState:
    """Generates for every row of a padded batch.

    The host is asked once for every size of the caches, and not in every step.

    Args:
      prompts: token ids; what follows a row's prompt is padding.
      lengths: tokens of each prompt, 1 to T.
      max_new_tokens: of each row, 1 or more. Length + new tokens + K must fit `spec.cache_size`.
      stop_ids: an answer ends with the first of these. At least one entry; -1 stands for none.
      sampling: None decodes greedily.
    """
    needed = max(int(np.max(lengths)) + spec.k + 1, spec.padded_width(prompts.shape[1]))
    slots = growth.num_slots(needed, spec.cache_size, spec.k)
    limits = max_new_tokens, stop_ids, sampling
    state = read_prompts(spec, slots, target_params, draft_params, prompts, lengths, *limits)
    while True:
        state = decode(spec, target_params, draft_params, *limits, state)
        if np.all(state.done):
            return state
        slots = growth.num_slots(slots + 1, spec.cache_size, spec.k)
        state = growth.grow(state, slots)


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="state")
def decode(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    max_new_tokens: Int[Array, " B"],
    stop_ids: Int[Array, " stops"],
    sampling: SamplingParams | None,
    state: DecodeState,
) -> DecodeState:
    """Takes steps until every row is done, or until a row's next step would not fit its slots."""

    def next_state(state: DecodeState) -> DecodeState:
        return step(spec, target_params, draft_params, max_new_tokens, stop_ids, sampling, state)

    def goes_on(state: DecodeState) -> Array:
        slots = state.output.shape[1]
        fits = state.cache.length.max() + spec.k + 1 <= slots
        return ~state.done.all() & fits

    return _replicate_results(jax.lax.while_loop(goes_on, next_state, state))


@functools.partial(jax.jit, static_argnames=("spec", "slots"))
def read_prompts(spec: DecodeSpec, slots: int, *arguments: Any) -> DecodeState:
    """`prefill` as a program of its own."""
    return _replicate_results(prefill(spec, *arguments, slots=slots))


def prefill(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    max_new_tokens: Int[Array, " B"],
    stop_ids: Int[Array, " stops"],
    sampling: SamplingParams | None,
    *,
    slots: int,
) -> DecodeState:
    """Reads the prompts, and commits the first token of every answer. Arguments as of `run`.

    Args:
      slots: of the caches: at least `spec.padded_width` of the prompts.
    """
    target = cast(Decoder, nnx.merge(spec.target, target_params))
    B, _ = prompts.shape
    R = spec.k + 1
    hidden, aux_hidden_states, cache = _prefill_target(spec, target, prompts, lengths, slots)
    first_token = _next_token(target, hidden, sampling)
    last = (lengths - 1)[:, None, None]
    last_aux_hidden_state = jnp.take_along_axis(aux_hidden_states, last, axis=1)

    draft = DraftState(None, None)
    if spec.drafter:
        # a step's placeholders and their padding reach up to K positions beyond the target's cache
        draft = DraftState(spec.drafter.init(B, slots + spec.k), None)
        draft = spec.drafter.prefill(
            draft_params, draft, prompts[:, 1:], aux_hidden_states[:, :-1], lengths - 1
        )

    def pad_to_block(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, R - 1), *[(0, 0)] * (x.ndim - 2)])

    zero = jnp.zeros(B, jnp.int32)
    state = DecodeState(
        cache=cache,
        draft=draft,
        tokens=pad_to_block(first_token[:, None]),
        aux_hidden_states=pad_to_block(last_aux_hidden_state),
        count=zero + 1,
        output=jnp.zeros((B, slots), jnp.int32),
        is_draft=jnp.zeros((B, slots), bool),
        emitted=zero,
        length=zero,
        done=zero < 0,
        num_drafts=zero,
        num_accepted_per_pos=jnp.zeros((B, spec.k), jnp.int32),
    )
    no_drafts = jnp.zeros((B, R), bool)
    return _emit(state, state.tokens, no_drafts, state.count, max_new_tokens, stop_ids)


def _next_token(
    target: Decoder, hidden: Float[Array, "B D"], sampling: SamplingParams | None
) -> Int[Array, " B"]:
    """The first token of each answer."""
    if sampling is None:
        return target.argmax_logits(hidden).astype(jnp.int32)
    probs = probabilities(target.compute_logits(hidden), sampling)
    return sample(step_keys(sampling, 0, KeyUse.FIRST_TOKEN), probs).astype(jnp.int32)


def _prefill_target(
    spec: DecodeSpec,
    target: Decoder,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    slots: int,
) -> tuple[Float[Array, "B D"], Float[Array, "B T A"], KVCache]:
    """Reads the prompts in chunks of `spec.chunk` tokens, which bounds the memory of activations.

    Returns:
      The final hidden state of each prompt's last token, the aux hidden states of all tokens, and
      the cache.
    """
    B, T = prompts.shape
    chunk = min(T, spec.chunk or T)
    empty_cache = spec.target_config.empty_cache(
        B, spec.cache_size, block=spec.block(T), slots=slots
    )

    def prefill_chunk(carry, chunk_input):
        cache, hidden = carry
        tokens, start = chunk_input
        positions = start + jnp.broadcast_to(jnp.arange(chunk), (B, chunk))
        is_real = positions < lengths[:, None]
        out, cache = target(tokens, positions, CachedAttention(positions, is_real), cache)
        # the prompt's last token, if it is in this chunk
        last = (lengths - 1 - start)[:, None, None]
        hidden_here = jnp.take_along_axis(out.hidden, jnp.clip(last, 0, chunk - 1), axis=1)[:, 0]
        is_here = (last[:, 0] >= 0) & (last[:, 0] < chunk)
        hidden = jnp.where(is_here, hidden_here, hidden)
        cache = dataclasses.replace(cache, length=jnp.minimum(lengths, start + chunk))
        return (cache, hidden), out.aux_hidden_states

    hidden = jnp.zeros((B, spec.target_config.dim), activation_dtype(spec.target_config.dtype))
    carry = _shard_cache(empty_cache), hidden
    if chunk == T:
        (cache, hidden), aux = prefill_chunk(carry, (prompts, jnp.zeros((), jnp.int32)))
        return hidden, aux, cache
    num_chunks = -(-T // chunk)
    padded = jnp.pad(prompts, [(0, 0), (0, num_chunks * chunk - T)])
    chunks = jnp.moveaxis(padded.reshape(B, num_chunks, chunk), 1, 0)
    starts = chunk * jnp.arange(num_chunks)
    (cache, hidden), aux = jax.lax.scan(prefill_chunk, carry, (chunks, starts))
    aux = jnp.moveaxis(aux, 0, 1).reshape(B, num_chunks * chunk, -1)[:, :T]
    return hidden, aux, cache


def _shard_cache(cache: KVCache) -> KVCache:
    """On a mesh: the cache, spread over its devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return cache
    return jax.lax.with_sharding_constraint(cache, sharding.cache_sharding(cache, mesh))


def _replicate_results(state: DecodeState) -> DecodeState:
    """On a mesh: the results on every device, so that each process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return state
    names = ("output", "is_draft", "length", "done", "num_drafts", "num_accepted_per_pos")
    replicated = {
        name: jax.lax.with_sharding_constraint(getattr(state, name), PartitionSpec())
        for name in names
    }
    return dataclasses.replace(state, **replicated)


def step(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    max_new_tokens: Int[Array, " B"],
    stop_ids: Int[Array, " stops"],
    sampling: SamplingParams | None,
    state: DecodeState,
) -> DecodeState:
    """One draft, one verification, one commit. Rows that are done stay as they are."""
    target = cast(Decoder, nnx.merge(spec.target, target_params))
    drafts, draft_logits, draft = propose(spec, draft_params, sampling, state)
    last_token = jnp.take_along_axis(state.tokens, (state.count - 1)[:, None], axis=1)
    block = jnp.concatenate([last_token, drafts], axis=1)
    out, cache = verify_forward(target, block, state.cache)
    if sampling is None:
        tokens, accepted = verify_greedy(drafts, target.argmax_logits(out.hidden))
    else:
        fresh = with_step_keys(sampling, state.num_drafts, KeyUse.VERIFY)
        logits = target.compute_logits(out.hidden)
        tokens, accepted = verify_sampled(drafts, draft_logits, logits, fresh)
    tokens = tokens.astype(jnp.int32)
    return commit(spec, state, draft, cache, out, tokens, accepted, max_new_tokens, stop_ids)


def propose(
    spec: DecodeSpec, draft_params: Any, sampling: SamplingParams | None, state: DecodeState
) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None, DraftState]:
    """Drafts K tokens per row, none in plain decoding.

    Returns:
      The drafts; the logits that they were sampled from, or None; and the drafter's state.
    """
    if not spec.drafter:
        return state.tokens[:, :0], None, state.draft
    draft_sampling = None
    if sampling is not None and spec.sample_drafts:
        draft_sampling = with_step_keys(sampling, state.num_drafts, KeyUse.DRAFT)
    draft = dataclasses.replace(state.draft, sampling=draft_sampling)
    drafts, draft_logits, draft = spec.drafter.step(
        draft_params, draft, state.tokens, state.aux_hidden_states, state.count
    )
    return drafts, draft_logits, dataclasses.replace(draft, sampling=None)


def verify_forward(
    target: Decoder, block: Int[Array, "B R"], cache: KVCache
) -> tuple[TargetOutput, KVCache]:
    """The target's forward over the last committed token and the drafts after it.

    Returns:
      Its output, and the cache with the block written after `cache.length`, which stays as it is.
    """
    positions = cache.length[:, None] + jnp.arange(block.shape[1])[None]
    return target(block, positions, CachedAttention(positions), cache)


def commit(
    spec: DecodeSpec,
    state: DecodeState,
    draft: DraftState,
    cache: KVCache,
    out: TargetOutput,
    tokens: Int[Array, "B R"],
    accepted: Int[Array, " B"],
    max_new_tokens: Int[Array, " B"],
    stop_ids: Int[Array, " stops"],
) -> DecodeState:
    """Adds the accepted drafts and the target's token to the answers, and rolls the cache back.

    Args:
      state: before the step.
      draft: the drafter's state after drafting.
      cache: the target's after verification, with the last token and all K drafts written to it.
      out: of the verification. Its aux hidden states are what the drafter reads next.
      tokens: from the acceptance rule; the first `accepted + 1` of each row are committed.
      accepted: drafts accepted, 0 to K.
    """
    is_accepted = jnp.arange(spec.k)[None] < accepted[:, None]
    is_draft = jnp.pad(is_accepted, [(0, 0), (0, 1)])  # the last committed token is the target's
    new = dataclasses.replace(
        _emit(state, tokens, is_draft, accepted + 1, max_new_tokens, stop_ids),
        cache=dataclasses.replace(cache, length=state.cache.length + accepted + 1),
        draft=draft,
        tokens=tokens,
        aux_hidden_states=out.aux_hidden_states,
        count=accepted + 1,
        num_drafts=state.num_drafts + 1,
        num_accepted_per_pos=state.num_accepted_per_pos + is_accepted,
    )
    return _freeze_done_rows(state, new)


def _freeze_done_rows(old: DecodeState, new: DecodeState) -> DecodeState:
    """`new` for rows that were still running in `old`; the others stay as they were.

    Of the caches only the lengths are restored: what a step wrote for a finished row lies beyond
    its length. `output` and `is_draft` are not written for finished rows in the first place.
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
    return dataclasses.replace(
        new,
        cache=with_frozen_length(new.cache, old.cache),
        draft=draft,
        tokens=unless_done(new.tokens, old.tokens),
        aux_hidden_states=unless_done(new.aux_hidden_states, old.aux_hidden_states),
        count=unless_done(new.count, old.count),
        emitted=unless_done(new.emitted, old.emitted),
        length=unless_done(new.length, old.length),
        done=unless_done(new.done, old.done),
        num_drafts=unless_done(new.num_drafts, old.num_drafts),
        num_accepted_per_pos=unless_done(new.num_accepted_per_pos, old.num_accepted_per_pos),
    )


def _emit(
    state: DecodeState,
    tokens: Int[Array, "B R"],
    is_draft: Bool[Array, "B R"],
    count: Int[Array, " B"],
    max_new_tokens: Int[Array, " B"],
    stop_ids: Int[Array, " stops"],
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

    is_stop = (tokens[..., None] == stop_ids[None, None]).any(axis=-1)
    is_stop &= is_emitted & (index < max_new_tokens[:, None])
    stopped = is_stop.any(axis=1)
    emitted = state.emitted + count
    length_with_stop = state.emitted + is_stop.argmax(axis=1) + 1
    return dataclasses.replace(
        state,
        output=output,
        is_draft=output_is_draft,
        emitted=emitted,
        length=jnp.where(stopped, length_with_stop, jnp.minimum(emitted, max_new_tokens)),
        done=state.done | stopped | (emitted >= max_new_tokens),
    )
