"""Reads prompts, chunk by chunk, and commits the first token of every answer.

A chunk passes through the target, and its aux hidden states through the drafter, before the next
one is read: the memory of activations is that of one chunk. A chunk attends to all slots of a
cache, which therefore grows with what was read; chunks before the same number of slots share a
program.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from peagle_jax.decode import growth
from peagle_jax.decode.commit import emit, is_finite, replicate_results
from peagle_jax.decode.confidence import has_confidence
from peagle_jax.decode.first_call import first_call
from peagle_jax.decode.penalties import penalize
from peagle_jax.decode.sampling import KeyUse, logprobs_of, probabilities, sample, step_keys
from peagle_jax.decode.spec import DecodeSpec, needs_logits
from peagle_jax.kernels import vocab
from peagle_jax.layers import CachedAttention, Decoder, activation_dtype
from peagle_jax.targets import sharding
from peagle_jax.types import DecodeState, DraftState, KVCache, Params, RowOptions

# Prompts of at most so many tokens are padded to multiples of so many, and longer ones to multiples
# of WIDTH_STEP, so that similar requests share a program.
SHORT_WIDTHS = ((64, 16), (128, 32))
WIDTH_STEP = 64
# A cache begins with so many slots, and doubles. With fewer, attention takes little time beside the
# products, and each number of slots is a program to be compiled.
FIRST_SLOTS = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillState:
    """Prompts that were read in part.

    Attributes:
      cache: the target's KV cache.
      draft: the drafter's state.
      hidden: the target's final hidden state of each prompt's last token, once that was read.
      aux_hidden_state: the aux hidden states of the same token.
    """

    cache: KVCache
    draft: DraftState
    hidden: Float[Array, "B D"]
    aux_hidden_state: Float[Array, "B A"]


def chunk_size(spec: DecodeSpec, longest: int) -> int:
    """Tokens that one forward reads of each prompt, where the longest has `longest` tokens."""
    step = next((step for width, step in SHORT_WIDTHS if longest <= width), WIDTH_STEP)
    padded = -(-longest // step) * step
    return min(padded, spec.chunk) if spec.chunk else padded


def num_positions(spec: DecodeSpec, longest: int) -> int:
    """Positions of the cache that reading prompts writes: whole chunks."""
    chunk = chunk_size(spec, longest)
    return -(-longest // chunk) * chunk


def prefill(
    spec: DecodeSpec,
    slots: int,
    target_params: Params,
    draft_params: Any,
    prompts: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, " B"],
    options: RowOptions,
    *,
    chunk: int | None = None,
    prompt_of_answer: Int[np.ndarray, " answers"] | None = None,
) -> Generator[None, None, DecodeState]:
    """Reads the prompts; yields between two chunks, and returns the state after the first tokens.

    Args:
      slots: of the caches: at least `num_positions` of the prompts.
      prompts: token ids; what follows a row's prompt is padding.
      lengths: tokens of each prompt, 1 to T.
      options: of each answer.
      chunk: tokens of one forward; None for `chunk_size`.
      prompt_of_answer: the row of the prompt that each answer continues; None: its own.
    """
    batch, width = prompts.shape
    chunk = chunk or chunk_size(spec, width)
    sizes = cache_sizes(chunk, width, slots)
    size = sizes[0]
    with _first_call(options, "empty", spec, batch, size):
        state = empty(spec, batch, size)
    # one token more: the drafter reads every position together with the token after it
    padding = -width % chunk + 1
    module = np if isinstance(prompts, np.ndarray) else jnp
    prompts = module.pad(prompts, [(0, 0), (0, padding)])
    for start in range(0, width, chunk):
        if start:
            yield
        tokens = prompts[:, start : start + chunk + 1]
        before, size = size, sizes[start // chunk]
        with _first_call(options, "read_chunk", spec, batch, chunk, before, size):
            state = _grow(spec, state, size)
            place = np.int32(start)
            state = read_chunk(spec, target_params, draft_params, tokens, place, lengths, state)
    if prompt_of_answer is not None:
        with _first_call(options, "repeat", spec, batch, len(prompt_of_answer), slots):
            state = _with_rows(spec, state, prompt_of_answer, slots)
    return _with_first_tokens(spec, target_params, options, state, slots)


def _first_call(options: RowOptions, *program: Hashable) -> contextlib.AbstractContextManager:
    """`first_call`; nothing where reading prompts is a part of a program that is being traced, of
    which the arrays of `options` tell.
    """
    is_traced = isinstance(options.stop_ids, Tracer)
    return contextlib.nullcontext() if is_traced else first_call(*program)


def cache_sizes(chunk: int, width: int, slots: int) -> list[int]:
    """The slots of the caches while each chunk is read.

    Args:
      chunk: tokens of one forward.
      width: tokens of the longest prompt.
      slots: of the caches at the end.
    """
    assert slots >= -(-width // chunk) * chunk, "see num_positions"
    sizes, size = [], min(FIRST_SLOTS, slots)
    for start in range(0, width, chunk):
        while size < start + chunk:
            size = min(2 * size, slots)
        sizes.append(size)
    return [*sizes[:-1], slots]


def _grow(
    spec: DecodeSpec, state: PrefillState, slots: int, rows: np.ndarray | None = None
) -> PrefillState:
    """The state with so many slots in the target's cache, and K more in the drafter's.

    Args:
      rows: which rows of the caches to keep, in their new order; None for all.
    """
    draft = state.draft
    if draft.cache is not None:
        cache = growth.resize_cache(draft.cache, slots + spec.k, rows)
        draft = dataclasses.replace(draft, cache=cache)
    cache = growth.resize_cache(state.cache, slots, rows)
    return dataclasses.replace(state, cache=cache, draft=draft)


def _with_rows(
    spec: DecodeSpec, state: PrefillState, rows: Int[np.ndarray, " rows"], slots: int
) -> PrefillState:
    """The state with other rows; some may come several times."""
    state = _grow(spec, state, slots, rows)
    hidden, aux_hidden_state = state.hidden[rows], state.aux_hidden_state[rows]
    return dataclasses.replace(state, hidden=hidden, aux_hidden_state=aux_hidden_state)


def pad_prompts(
    prompts: Sequence[Sequence[int]], num_rows: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Prompts as rows of the longest one's length, and their lengths; further rows have one 0."""
    padded = np.zeros((num_rows, max(map(len, prompts))), np.int32)
    lengths = np.ones(num_rows, np.int32)
    for i, prompt in enumerate(prompts):
        lengths[i] = len(prompt)
        padded[i, : len(prompt)] = prompt
    return padded, lengths


def distinct_prompts(
    prompts: Sequence[Sequence[int]], num_rows: int
) -> tuple[list[tuple[int, ...]], Int[np.ndarray, " num_rows"] | None]:
    """The prompts without repetitions; and for each of `num_rows` answers which one it continues.

    All prompts, and None, where that makes no smaller batch. Answers beyond the prompts continue
    the first one.
    """
    hashable = [tuple(prompt) for prompt in prompts]
    place = {prompt: i for i, prompt in enumerate(dict.fromkeys(hashable))}
    if growth.num_rows(len(place), num_rows) == num_rows:
        return hashable, None
    rows = np.zeros(num_rows, np.int32)
    rows[: len(prompts)] = [place[prompt] for prompt in hashable]
    return list(place), rows


def next_chunk(reading: Generator[None, None, DecodeState]) -> DecodeState | None:
    """Reads a chunk of prompts; the rows that they become after the last one, and None before."""
    try:
        next(reading)
    except StopIteration as end:
        return jax.block_until_ready(end.value)
    return None


def run_to_end(reading: Generator[None, None, DecodeState]) -> DecodeState:
    """The state that `prefill` returns."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value


@functools.partial(jax.jit, static_argnames=("spec", "batch", "slots"))
def empty(spec: DecodeSpec, batch: int, slots: int) -> PrefillState:
    """The state before the first token is read."""
    config = spec.target_config
    cache = config.empty_cache(
        batch, spec.ring_cache_size or slots, block=spec.ring_block, slots=slots
    )
    draft = DraftState(None, None)
    if spec.drafter:
        # a step's placeholders and their padding reach up to K positions beyond the target's cache
        draft = DraftState(spec.drafter.init(batch, slots + spec.k), None)
    dtype = activation_dtype(config.dtype)
    aux_width = len(config.aux_hidden_state_layers) * config.dim
    hidden, aux = jnp.zeros((batch, config.dim), dtype), jnp.zeros((batch, aux_width), dtype)
    return PrefillState(_shard_cache(cache), draft, hidden, aux)


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="state")
def read_chunk(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    tokens: Int[Array, "B width"],
    start: Int[Array, ""],
    lengths: Int[Array, " B"],
    state: PrefillState,
) -> PrefillState:
    """Reads the positions `start` to `start` + chunk of every prompt.

    Args:
      tokens: of these positions, and one after them: width is chunk + 1.
      lengths: tokens of each prompt. What lies beyond them is padding.
    """
    target = cast(Decoder, nnx.merge(spec.target, target_params))
    batch, chunk = tokens.shape[0], tokens.shape[1] - 1
    positions = start + jnp.broadcast_to(jnp.arange(chunk), (batch, chunk))
    is_real = positions < lengths[:, None]
    attend = CachedAttention(positions, is_real)
    out, cache = target(tokens[:, :chunk], positions, attend, state.cache)
    draft = state.draft
    if spec.drafter:
        # the prompt's last token has no token after it
        count = jnp.clip(lengths - 1 - start, 0, chunk)
        draft = spec.drafter.prefill(
            draft_params, draft, tokens[:, 1:], out.aux_hidden_states, count
        )
    last = lengths - 1 - start
    is_here = ((last >= 0) & (last < chunk))[:, None]

    def of_last_token(x: Float[Array, "B chunk D"], before: Float[Array, "B D"]) -> Array:
        at = jnp.clip(last, 0, chunk - 1)[:, None, None]
        return jnp.where(is_here, jnp.take_along_axis(x, at, axis=1)[:, 0], before)

    return PrefillState(
        cache=dataclasses.replace(cache, length=jnp.minimum(lengths, start + chunk)),
        draft=draft,
        hidden=of_last_token(out.hidden, state.hidden),
        aux_hidden_state=of_last_token(out.aux_hidden_states, state.aux_hidden_state),
    )


@functools.partial(jax.jit, static_argnames="spec")
def first_tokens(
    spec: DecodeSpec, target_params: Params, options: RowOptions, hidden: Float[Array, "B D"]
) -> tuple[Int[Array, " B"], Float[Array, " B"] | None]:
    """The first token of every answer, and its log-probability where a row wants it.

    It takes no caches, and stop ids only with penalties, so that one program serves all sizes of
    them. `begin`, which has little to compute, has one for each number of slots.

    Args:
      options: how the rows sample, their penalties, and whether they want log-probabilities.
      hidden: of the `PrefillState` after whole prompts.
    """
    target = cast(Decoder, nnx.merge(spec.target, target_params))
    sampling, penalties = options.sampling, options.penalties
    if not needs_logits(options):
        return target.argmax_logits(hidden).astype(jnp.int32), None
    raw = logits = target.compute_logits(hidden)
    if penalties is not None:
        no_counts = jnp.zeros((len(logits), 1, logits.shape[1]), jnp.int32)
        logits = penalize(logits[:, None], no_counts, penalties, options.stop_ids)[:, 0]
    if sampling is None:
        tokens = vocab.argmax(logits)
    else:
        keys = step_keys(sampling, 0, KeyUse.FIRST_TOKEN)
        tokens = sample(keys, probabilities(logits, sampling))
    logprobs = logprobs_of(raw[:, None], tokens[:, None])[:, 0] if options.logprobs else None
    return tokens.astype(jnp.int32), logprobs


@functools.partial(jax.jit, static_argnames=("spec", "slots"))
def begin(
    spec: DecodeSpec,
    options: RowOptions,
    tokens: Int[Array, " B"],
    logprobs: Float[Array, " B"] | None,
    state: PrefillState,
    slots: int,
) -> DecodeState:
    """The state in which every answer has its first token, with the caches of `state`.

    Args:
      options: of which limits and stop ids count.
      tokens, logprobs: as `first_tokens` gives them.
      state: after whole prompts. Of its cache only the lengths count: without layers, and without
        a draft state, one program serves caches of all kinds.
      slots: of the caches.
    """
    batch, num_places = len(tokens), spec.num_places

    def pad_to_block(x: Array) -> Array:
        return jnp.pad(x[:, None], [(0, 0), (0, num_places - 1), *[(0, 0)] * (x.ndim - 1)])

    zero = jnp.zeros(batch, jnp.int32)
    failed = ~is_finite(state.hidden)
    counts_expected = spec.k_changes and has_confidence(spec.drafter)
    expected = jnp.zeros((batch, spec.k), jnp.float32) if counts_expected else None
    new = DecodeState(
        cache=state.cache,
        draft=state.draft,
        tokens=pad_to_block(tokens),
        aux_hidden_states=pad_to_block(state.aux_hidden_state),
        count=zero + 1,
        output=jnp.zeros((batch, slots), jnp.int32),
        is_draft=jnp.zeros((batch, slots), bool),
        logprobs=jnp.zeros((batch, slots), jnp.float32),
        emitted=zero,
        length=zero,
        done=failed,
        failed=failed,
        num_steps=zero,
        num_drafts=zero,
        num_draft_tokens=zero,
        num_accepted_per_pos=jnp.zeros((batch, spec.k), jnp.int32),
        num_expected_per_pos=expected,
    )
    no_drafts = jnp.zeros((batch, num_places), bool)
    if logprobs is not None:
        logprobs = pad_to_block(logprobs)
    return replicate_results(emit(new, new.tokens, no_drafts, new.count, options, logprobs))


def _with_first_tokens(
    spec: DecodeSpec, target_params: Params, options: RowOptions, state: PrefillState, slots: int
) -> DecodeState:
    """The state of answers that have their first token."""
    batch, num_stop_ids = options.stop_ids.shape
    choices = options
    if options.penalties is None:  # which may forbid stop tokens
        choices = dataclasses.replace(options, stop_ids=options.stop_ids[:, :0])
    shape = choices.stop_ids.shape
    with _first_call(options, "first_tokens", spec, shape, jax.tree.structure(choices)):
        tokens, logprobs = first_tokens(spec, target_params, choices, state.hidden)
    limits = dataclasses.replace(options, sampling=None, penalties=None, logprobs=False)
    # caches without their layers: only the rows' lengths are passed through the program
    draft, groups = state.draft, state.cache.groups
    cache = dataclasses.replace(state.cache, groups=())
    state = dataclasses.replace(state, cache=cache, draft=DraftState(None, None))
    with _first_call(options, "begin", spec, batch, num_stop_ids, logprobs is None, slots):
        new = begin(spec, limits, tokens, logprobs, state, slots)
    return dataclasses.replace(
        new, cache=dataclasses.replace(new.cache, groups=groups), draft=draft
    )


def _shard_cache(cache: KVCache) -> KVCache:
    """On a mesh: the cache, spread over its devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return cache
    return jax.lax.with_sharding_constraint(cache, sharding.cache_sharding(cache, mesh))
