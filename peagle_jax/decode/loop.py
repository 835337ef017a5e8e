"""A whole generation as one jitted program: prefill, then draft - verify - accept until every row is done.

Plain decoding is the same loop with nothing to draft (K = 0), so the two share every line but the drafter.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from peagle_jax.decode.drafters import Drafter
from peagle_jax.decode.sampling import draw, probabilities
from peagle_jax.decode.verify import verify_greedy, verify_sampled
from peagle_jax.layers import CachedAttention
from peagle_jax.targets import sharding
from peagle_jax.types import DecodeState, DraftState, KVCache, Params, SamplingParams, TargetOutput


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static part of a generation. Two calls with equal programs and shapes share one compiled function."""

    target: nnx.GraphDef
    target_config: object  # has `empty_cache`
    drafter: Drafter | None
    cache_size: int  # of the target's cache: prompt + new tokens + K
    sample_drafts: (
        bool  # with a temperature: sample the drafts too (False: argmax drafts, as vLLM's default)
    )
    chunk: int | None = None  # prompt tokens read at once; None: all of them
    sliding_cache: bool = (
        False  # sliding layers keep their window and one block instead of everything
    )

    @property
    def k(self) -> int:
        return self.drafter.k if self.drafter else 0

    def block(self, width: int) -> int | None:
        """Positions that the target's cache takes at once, at most, if that matters; prompts are `width` wide."""
        return max(min(width, self.chunk or width), self.k + 1) if self.sliding_cache else None


@functools.partial(jax.jit, static_argnames="spec")
def run(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    limits: Int[Array, " B"],
    stop_ids: Int[Array, " stops"],
    sampling: SamplingParams | None,
) -> DecodeState:
    """Generates for every row of a padded batch. One call, one device program.

    Args:
      lengths: real tokens of each prompt, 1..T.
      limits: new tokens wanted by each row, >= 1; `lengths + limits + K` must fit `program.slots`.
      stop_ids: a row ends with the first of these; pad with -1.
      sampling: None decodes greedily.
    """
    body = functools.partial(step, spec, target_params, draft_params, limits, stop_ids, sampling)
    start = prefill(spec, target_params, draft_params, prompts, lengths, limits, stop_ids, sampling)
    return _everywhere(jax.lax.while_loop(lambda state: ~state.done.all(), body, start))


def prefill(
    spec: DecodeSpec, target_params, draft_params, prompts, lengths, limits, stop_ids, sampling
) -> DecodeState:
    """Reads the prompts, and commits the first token of every answer."""
    target = nnx.merge(spec.target, target_params)
    B, T = prompts.shape
    R = spec.k + 1
    hidden, aux_hidden_states, cache = _prefill_target(spec, target, prompts, lengths)
    last = (lengths - 1)[:, None, None]
    if sampling is None:
        first = target.argmax_logits(hidden).astype(jnp.int32)
    else:
        first = draw(
            _keys(sampling, 0, 0), probabilities(target.compute_logits(hidden), sampling)
        ).astype(jnp.int32)

    draft = DraftState(None, None)
    if spec.drafter:
        # rows past K - 1 slots beyond the target's are never read; two K more hold a step's placeholders and padding
        draft = DraftState(spec.drafter.init(B, spec.cache_size + spec.k), None)
        draft = spec.drafter.read(
            draft_params, draft, prompts[:, 1:], aux_hidden_states[:, :-1], lengths - 1
        )

    def pad(x):
        return jnp.pad(x, [(0, 0), (0, R - 1), *[(0, 0)] * (x.ndim - 2)])

    zero = jnp.zeros(B, jnp.int32)
    state = DecodeState(
        cache=cache,
        draft=draft,
        tokens=pad(first[:, None]),
        aux_hidden_states=pad(jnp.take_along_axis(aux_hidden_states, last, axis=1)),
        count=zero + 1,
        output=jnp.zeros((B, spec.cache_size), jnp.int32),
        is_draft=jnp.zeros((B, spec.cache_size), bool),
        emitted=zero,
        length=zero,
        done=zero < 0,
        num_drafts=zero,
        num_accepted_per_pos=jnp.zeros((B, spec.k), jnp.int32),
    )
    return _emit(state, state.tokens, jnp.zeros((B, R), bool), zero + 1, limits, stop_ids)


def _prefill_target(
    spec: DecodeSpec, target, prompts: Int[Array, "B T"], lengths: Int[Array, " B"]
):
    """(final hidden state of each row's last token [B D], taps [B T A], cache); chunk by chunk, so that activations stay small."""
    B, T = prompts.shape
    chunk = min(T, spec.chunk or T)
    cache = _spread(spec.target_config.empty_cache(B, spec.cache_size, block=spec.block(T)))

    def prefill_chunk(carry, part):
        (cache, hidden), (tokens, start) = carry, part
        positions = start + jnp.broadcast_to(jnp.arange(chunk), (B, chunk))
        real = positions < lengths[:, None]
        out, cache = target(tokens, positions, CachedAttention(positions, real), cache)
        last = (lengths - 1 - start)[:, None, None]
        here = jnp.take_along_axis(out.hidden, jnp.clip(last, 0, chunk - 1), axis=1)[:, 0]
        hidden = jnp.where((last[:, 0] >= 0) & (last[:, 0] < chunk), here, hidden)
        return (
            dataclasses.replace(cache, length=jnp.minimum(lengths, start + chunk)),
            hidden,
        ), out.aux_hidden_states

    start = cache, jnp.zeros((B, spec.target_config.dim), spec.target_config.dtype)
    if chunk == T:
        (cache, hidden), aux_hidden_states = prefill_chunk(
            start, (prompts, jnp.zeros((), jnp.int32))
        )
        return hidden, aux_hidden_states, cache
    parts = -(-T // chunk)
    tokens = jnp.moveaxis(
        jnp.pad(prompts, [(0, 0), (0, parts * chunk - T)]).reshape(B, parts, chunk), 1, 0
    )
    (cache, hidden), aux_hidden_states = jax.lax.scan(
        prefill_chunk, start, (tokens, chunk * jnp.arange(parts))
    )
    return hidden, jnp.moveaxis(aux_hidden_states, 0, 1).reshape(B, parts * chunk, -1)[:, :T], cache


def _spread(cache: KVCache) -> KVCache:
    """On a mesh, where the cache lies."""
    mesh = jax.sharding.get_abstract_mesh()
    return (
        cache
        if mesh.empty
        else jax.lax.with_sharding_constraint(cache, sharding.cache_sharding(cache, mesh))
    )


def _everywhere(state: DecodeState) -> DecodeState:
    """On a mesh, results on every device: each process may read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return state
    names = ("output", "is_draft", "length", "num_drafts", "num_accepted_per_pos")
    return dataclasses.replace(
        state,
        **{n: jax.lax.with_sharding_constraint(getattr(state, n), PartitionSpec()) for n in names},
    )


def step(
    spec: DecodeSpec, target_params, draft_params, limits, stop_ids, sampling, state: DecodeState
) -> DecodeState:
    """One draft forward (P-EAGLE), one verify forward, one acceptance scan. Rows that are done stay as they are."""
    target = nnx.merge(spec.target, target_params)
    drafts, draft_logits, draft = propose(spec, draft_params, sampling, state)
    last = jnp.take_along_axis(state.tokens, (state.count - 1)[:, None], axis=1)
    out, cache = verify_forward(target, jnp.concatenate([last, drafts], axis=1), state.cache)
    if sampling is None:
        tokens, accepted = verify_greedy(drafts, target.argmax_logits(out.hidden))
    else:
        fresh = dataclasses.replace(sampling, key=_keys(sampling, state.num_drafts, 2))
        tokens, accepted = verify_sampled(
            drafts, draft_logits, target.compute_logits(out.hidden), fresh
        )
    return commit(
        spec, state, draft, cache, out, tokens.astype(jnp.int32), accepted, limits, stop_ids
    )


def propose(spec: DecodeSpec, draft_params, sampling: SamplingParams | None, state: DecodeState):
    """Drafts [B K], none in plain decoding; the logits that they were sampled from, or None; the drafter's state."""
    if not spec.drafter:
        return state.tokens[:, :0], None, state.draft
    keyed = (
        sampling
        and spec.sample_drafts
        and dataclasses.replace(sampling, key=_keys(sampling, state.num_drafts, 1))
    )
    draft = dataclasses.replace(state.draft, sampling=keyed or None)
    drafts, draft_logits, draft = spec.drafter.step(
        draft_params, draft, state.tokens, state.aux_hidden_states, state.count
    )
    return drafts, draft_logits, dataclasses.replace(draft, sampling=None)


def verify_forward(
    target, block: Int[Array, "B R"], cache: KVCache
) -> tuple[TargetOutput, KVCache]:
    """The target over the last token and the drafts behind it."""
    positions = cache.length[:, None] + jnp.arange(block.shape[1])[None]
    return target(block, positions, CachedAttention(positions), cache)


def commit(
    spec, state: DecodeState, draft, cache, out: TargetOutput, tokens, accepted, limits, stop_ids
) -> DecodeState:
    """Rolls both caches to what was accepted, emits it, and hands the drafter its tokens and taps."""
    going = ~state.done
    kept = jnp.arange(spec.k)[None] < accepted[:, None]
    new = dataclasses.replace(
        _emit(state, tokens, jnp.pad(kept, [(0, 0), (0, 1)]), accepted + 1, limits, stop_ids),
        cache=dataclasses.replace(cache, length=state.cache.length + accepted + 1),
        draft=draft,
        tokens=tokens,
        aux_hidden_states=out.aux_hidden_states,
        count=accepted + 1,
        num_drafts=state.num_drafts + 1,
        num_accepted_per_pos=state.num_accepted_per_pos + kept,
    )

    def choose(new, old):
        return jnp.where(going.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    small = (
        "tokens",
        "aux_hidden_states",
        "count",
        "emitted",
        "length",
        "done",
        "num_drafts",
        "num_accepted_per_pos",
    )
    frozen = {name: choose(getattr(new, name), getattr(state, name)) for name in small}
    # of the caches only the lengths are held back: what a finished row writes lies past its length
    frozen["cache"] = dataclasses.replace(
        new.cache, length=choose(new.cache.length, state.cache.length)
    )
    if draft.cache is not None:
        frozen["draft"] = dataclasses.replace(
            draft,
            cache=dataclasses.replace(
                draft.cache, length=choose(draft.cache.length, state.draft.cache.length)
            ),
        )
    return dataclasses.replace(new, **frozen)


def _emit(
    state: DecodeState,
    tokens: Int[Array, "B R"],
    is_draft: Bool[Array, "B R"],
    count,
    limits,
    stop_ids,
) -> DecodeState:
    """Appends `count` tokens to the answers of rows still going, and ends those that reached a stop or their limit."""
    place = jnp.arange(tokens.shape[1])[None]
    where = state.emitted[:, None] + place
    real = (place < count[:, None]) & ~state.done[:, None]
    index = jnp.where(real, where, state.output.shape[1])
    rows = jnp.arange(tokens.shape[0])[:, None]
    stop = (
        real & (where < limits[:, None]) & (tokens[..., None] == stop_ids[None, None]).any(axis=-1)
    )
    stopped, emitted = stop.any(axis=1), state.emitted + count
    return dataclasses.replace(
        state,
        output=state.output.at[rows, index].set(tokens, mode="drop"),
        is_draft=state.is_draft.at[rows, index].set(is_draft, mode="drop"),
        emitted=emitted,
        length=jnp.where(
            stopped, state.emitted + stop.argmax(axis=1) + 1, jnp.minimum(emitted, limits)
        ),
        done=state.done | stopped | (emitted >= limits),
    )


def _keys(how: SamplingParams, step, use: int) -> Array:
    """Fresh keys a row, step and use (0 first token, 1 drafting, 2 verifying): a seed fixes the row's text alone."""
    step = jnp.broadcast_to(jnp.asarray(step), how.key.shape)
    return jax.vmap(lambda key, s: jax.random.fold_in(jax.random.fold_in(key, s), use))(
        how.key, step
    )
