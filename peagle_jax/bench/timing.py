"""The parts of a step, each in its own jitted loop: drafting K tokens, and the target's forward over K+1."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from peagle_jax.decode.drafters import Drafter
from peagle_jax.decode.generate import full_precision
from peagle_jax.layers import CachedAttention
from peagle_jax.types import DraftState, Model


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median wall seconds of `call`, whose result is waited for; the first call compiles and is not counted."""
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
    """Seconds to draft K tokens once, by `steps` drafts in one jitted loop, with a cache that holds `context` tokens.

    Every step takes in `committed` tokens (two: a common case) and rolls its cache back, so all steps cost the same.
    """
    cache_size = context + 4 * drafter.k + 8
    width = len(head.config.aux_hidden_state_layers) * head.config.target_dim
    tokens = jnp.ones((batch, drafter.k + 1), jnp.int32)
    aux_hidden_states = jnp.ones((batch, drafter.k + 1, width), head.config.dtype)
    count = jnp.full(batch, committed, jnp.int32)

    @jax.jit
    def loop(params, cache):
        def body(_, carry):
            tokens, cache = carry
            same, tokens = jax.lax.optimization_barrier(
                (aux_hidden_states, tokens)
            )  # so that fusing them stays in the loop
            ids, _, state = drafter.step(params, DraftState(cache, None), tokens, same, count)
            # the next step reads this one's drafts, so that no step can be dropped or moved out of the loop
            return jnp.concatenate([ids[:, :1], ids], axis=1), dataclasses.replace(
                state.cache, length=cache.length
            )

        return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]

    cache = drafter.init(batch, cache_size)
    cache = dataclasses.replace(cache, length=jnp.full(batch, context, jnp.int32))
    with full_precision(head):
        return median_seconds(functools.partial(loop, head.params, cache), repeats) / steps


def verifying_seconds(
    target: Model, k: int, *, batch: int, context: int, repeats: int = 5, steps: int = 20
) -> float:
    """Seconds of one target forward over K+1 tokens, logits and argmax included, likewise."""
    cache_size = context + k + 8

    @jax.jit
    def loop(params, cache):
        module = target.bind(params)

        def body(_, carry):
            tokens, cache = carry
            positions = cache.length[:, None] + jnp.arange(k + 1)[None]
            out, new = module(tokens, positions, CachedAttention(positions), cache)
            return module.argmax_logits(out.hidden).astype(jnp.int32), dataclasses.replace(
                new, length=cache.length
            )

        return jax.lax.fori_loop(0, steps, body, (jnp.ones((batch, k + 1), jnp.int32), cache))[0]

    cache = target.config.empty_cache(batch, cache_size)
    cache = dataclasses.replace(cache, length=jnp.full(batch, context, jnp.int32))
    with full_precision(target):
        return median_seconds(functools.partial(loop, target.params, cache), repeats) / steps
