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
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.decode.confidence import Confident, count_expected, step_with_confidence
from peagle_jax.decode.drafters import Drafter, ParallelDrafter, synthetic_rates
from peagle_jax.decode.penalties import count_tokens, penalize
from peagle_jax.decode.sampling import (
    KeyUse,
    logprobs_of,
    probabilities,
    sample,
    with_step_keys,
)
from peagle_jax.decode.switching import append_unread, pad
from peagle_jax.decode.tree import num_tree_nodes, walk
from peagle_jax.decode.verify import draw_accepted, verify_greedy, verify_sampled
from peagle_jax.kernels import vocab
from peagle_jax.kernels.graphs import jit_with_loops
from peagle_jax.layers import CachedAttention, Decoder, keep_path
from peagle_jax.targets.config import TargetConfig
from peagle_jax.types import (
    DecodeState,
    DraftState,
    KVCache,
    Params,
    RowOptions,
    SamplingParams,
    TargetOutput,
)


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static description of a generation. Equal specs and array shapes share a program.

    Attributes:
      target: the target's graph, without its arrays.
      target_config: sizes of the target and of its cache.
      drafter: what proposes tokens; None for plain decoding.
      sample_drafts: at a temperature above 0, draft by sampling, or argmaxes (vLLM's default).
      chunk: the most tokens of each prompt in one forward of the prefill; None for whole prompts.
      num_nodes: verify a tree of so many drafts; None for a chain of K.
      lookback: where K changes, a state has as many places for tokens that the drafter has not
        read, at least K + 1, and plain steps keep the newest in them; 0 where K never changes.
      ring_cache_size: None gives every layer slots for all positions. A number gives layers with a
        sliding window ring caches, if a ring has fewer slots than that; it takes a `chunk`.
      column_blocks: whether large matrices are in blocks of columns, which is another program.
    """

    target: nnx.GraphDef
    target_config: TargetConfig
    drafter: Drafter | None
    sample_drafts: bool
    chunk: int | None = None
    num_nodes: int | None = None
    lookback: int = 0
    ring_cache_size: int | None = None
    column_blocks: bool = False

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Kept, because a call of a jitted function hashes its static arguments: 1 ms each time."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def k(self) -> int:
        """Draft tokens per step; 0 in plain decoding."""
        return self.drafter.k if self.drafter else 0

    @property
    def num_drafts(self) -> int:
        """Drafts that a step verifies: K, or the nodes of a tree; 0 in plain decoding."""
        if self.num_nodes is None:
            return self.k
        assert isinstance(self.drafter, ParallelDrafter)
        return num_tree_nodes(self.k, self.num_nodes, self.drafter.config.draft_vocab)

    @property
    def num_places(self) -> int:
        """Places in `DecodeState.tokens`."""
        return self.lookback or self.k + 1

    @property
    def num_ahead(self) -> int:
        """Slots after a row's tokens that a step may write, its path of K + 1, or a change of K."""
        return max(self.num_drafts + 1, self.k + 1, self.lookback)

    def with_k(self, k: int) -> "DecodeSpec":
        """The same with K drafts per step, by a drafter that is a dataclass."""
        drafter = dataclasses.replace(cast(Any, self.drafter), k=k) if k else None
        return dataclasses.replace(self, drafter=drafter)

    @property
    def ring_block(self) -> int | None:
        """The most positions that are written at once, which a ring holds beside its window."""
        if self.ring_cache_size is None or self.chunk is None:
            return None
        return max(self.chunk, self.num_ahead)


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


def step(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    options: RowOptions,
    state: DecodeState,
) -> DecodeState:
    """One draft, one verification, one commit. Rows that are done stay as they are."""
    target = cast(Decoder, nnx.merge(spec.target, target_params))
    take_step = _chain_step if spec.num_nodes is None else _tree_step
    return take_step(spec, target, draft_params, options, state)


def _chain_step(
    spec: DecodeSpec, target: Decoder, draft_params: Any, options: RowOptions, state: DecodeState
) -> DecodeState:
    """A step with K drafts that follow each other."""
    sampling = options.sampling
    drafts, draft_logits, draft, confidence = propose(spec, draft_params, sampling, state)
    block = jnp.concatenate([_last_token(state), drafts], axis=1)
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


def _tree_step(
    spec: DecodeSpec, target: Decoder, draft_params: Any, options: RowOptions, state: DecodeState
) -> DecodeState:
    """A step with a tree of drafts, of which the path that the target goes is kept."""
    assert isinstance(spec.drafter, ParallelDrafter) and spec.num_nodes is not None
    before = state.draft, state.tokens, state.aux_hidden_states, state.count
    temperature = None if options.sampling is None else jnp.asarray(options.sampling.temperature)
    tree, draft = spec.drafter.tree(draft_params, *before, spec.num_nodes, temperature)
    block = jnp.concatenate([_last_token(state), tree.tokens], axis=1)
    positions = state.cache.length[:, None] + tree.depth
    attend = CachedAttention(positions, ancestors=tree.ancestors)
    out, cache = target(block, positions, attend, state.cache)

    rows = jnp.arange(len(block))
    if needs_logits(options):
        logits = target.compute_logits(out.hidden)

        def next_token(depth: int, node: Array, drafts: Array) -> Array:
            return _choose_token(options, state, logits[rows, node], drafts[:, :depth])

    else:
        argmax = target.argmax_logits(out.hidden)

        def next_token(depth: int, node: Array, drafts: Array) -> Array:
            return argmax[rows, node]

    path, tokens, accepted = walk(tree, spec.k, next_token)
    logprobs = None
    if options.logprobs:
        logprobs = logprobs_of(logits[rows[:, None], path], tokens)
    of_path = TargetOutput(
        hidden=jnp.take_along_axis(out.hidden, path[..., None], axis=1),
        aux_hidden_states=jnp.take_along_axis(out.aux_hidden_states, path[..., None], axis=1),
    )
    cache = keep_path(cache, path)
    return commit(spec, state, draft, cache, of_path, tokens, accepted, options, logprobs)


def needs_logits(options: RowOptions) -> bool:
    """Whether argmaxes are not enough. `argmax_logits` need not hold all logits at once."""
    return options.sampling is not None or options.penalties is not None or options.logprobs


def _last_token(state: DecodeState) -> Int[Array, "B 1"]:
    """The newest token of every row, which the target has not read."""
    place = (state.count - 1) % state.tokens.shape[1]  # `append_unread` counts on
    return jnp.take_along_axis(state.tokens, place[:, None], axis=1)


def _choose_token(
    options: RowOptions,
    state: DecodeState,
    logits: Float[Array, "B V"],
    drafts: Int[Array, "B depth"],
) -> Int[Array, " B"]:
    """The target's next token after drafts that were accepted in this step."""
    if options.penalties is not None:
        counts = count_tokens(state, drafts, logits.shape[-1])[:, -1:]
        logits = penalize(logits[:, None], counts, options.penalties, options.stop_ids)[:, 0]
    if options.sampling is None:
        return vocab.argmax(logits)
    fresh = with_step_keys(options.sampling, state.num_steps, KeyUse.VERIFY)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, drafts.shape[1]))(fresh.key)
    return sample(keys, probabilities(logits, fresh))


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
    keeps_unread = spec.lookback > 0 and not spec.k
    if keeps_unread:
        unread = append_unread(state, tokens, out.aux_hidden_states)
    else:
        places = spec.num_places
        unread = pad(tokens, places), pad(out.aux_hidden_states, places), accepted + 1
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
    return _freeze_done_rows(state, new, keeps_unread)


def _freeze_done_rows(old: DecodeState, new: DecodeState, keeps_unread: bool) -> DecodeState:
    """`new` for rows that were still running in `old`; the others stay as they were.

    Of the caches only the lengths are restored: what a step wrote for a finished row lies beyond
    its length. `output`, `is_draft` and `logprobs` are not written for finished rows anyway, and
    what plain steps keep for the draft head (`keeps_unread`) nobody reads of a finished row.
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
    if keeps_unread:
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
