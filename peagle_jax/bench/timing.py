"""Seconds of the two parts of a step: drafting K tokens, and the target's forward over K + 1.

Each part runs many times in one jitted loop, so that the time to launch it does not count.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from peagle_jax.decode.drafters import Drafter
from peagle_jax.layers import CachedAttention, Decoder, full_precision
from peagle_jax.types import DraftState, KVCache, Model


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median wall seconds of `call`, including the wait for its result.

    `call` runs `repeats` + 1 times. The first run compiles and is not counted.
    """
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def drafting_seconds(
    head: Model,
    drafter: Drafter,
    *,
    batch: int,
    context: int,
    committed: int = 2,
    repeats: int = 5,
    steps: int = 20,
) -> float:
    """Seconds to draft K tokens once, for every row of a batch.

    Every step reads `committed` tokens and then rolls its cache back, so that all steps cost the
    same.

    Args:
      batch: rows.
      context: tokens that the draft head has read before.
      committed: tokens that a step reads, 1 to K + 1. Two is a common case.
      repeats: timed runs, of which the median counts.
      steps: drafts per run.
    """
    cache_size = context + 4 * drafter.k + 8
    aux_width = len(head.config.aux_hidden_state_layers) * head.config.target_dim
    tokens = jnp.ones((batch, drafter.k + 1), jnp.int32)
    aux_hidden_states = jnp.ones((batch, drafter.k + 1, aux_width), head.config.dtype)
    count = jnp.full(batch, committed, jnp.int32)

    @jax.jit
    def loop(params, cache):
        def body(_, carry):
            tokens, cache = carry
            # the barrier keeps the fusion of the aux hidden states inside of the loop
            aux, tokens = jax.lax.optimization_barrier((aux_hidden_states, tokens))
            drafts, _, state = drafter.step(params, DraftState(cache, None), tokens, aux, count)
            assert state.cache is not None
            # the next step reads these drafts, so that no step can be dropped or moved
            tokens = jnp.concatenate([drafts[:, :1], drafts], axis=1)
            return tokens, dataclasses.replace(state.cache, length=cache.length)

        return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]

    cache = drafter.init(batch, cache_size)
    assert cache is not None, "a drafter that runs a draft head has a cache"
    cache = _with_length(cache, context)
    with full_precision(head):
        return median_seconds(functools.partial(loop, head.params, cache), repeats) / steps


def verifying_seconds(
    target: Model, k: int, *, batch: int, context: int, repeats: int = 5, steps: int = 20
) -> float:
    """Seconds of one forward of the target over K + 1 tokens per row, with logits and argmax.

    Args: as of `drafting_seconds`; `context` tokens are in the target's cache.
    """
    cache_size = context + k + 8

    @jax.jit
    def loop(params, cache):
        module = cast(Decoder, target.bind(params))

        def body(_, carry):
            tokens, cache = carry
            positions = cache.length[:, None] + jnp.arange(k + 1)[None]
            out, written = module(tokens, positions, CachedAttention(positions), cache)
            tokens = module.argmax_logits(out.hidden).astype(jnp.int32)
            return tokens, dataclasses.replace(written, length=cache.length)

        tokens = jnp.ones((batch, k + 1), jnp.int32)
        return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]

    cache = _with_length(target.config.empty_cache(batch, cache_size), context)
    with full_precision(target):
        return median_seconds(functools.partial(loop, target.params, cache), repeats) / steps


def _with_length(cache: KVCache, length: int) -> KVCache:
    """The cache as after `length` tokens per row, whatever these were."""
    return dataclasses.replace(cache, length=jnp.full_like(cache.length, length))
