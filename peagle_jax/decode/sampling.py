"""Next-token distributions (temperature, then top-k, then top-p, as in vLLM) and random keys."""

import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.types import InputError, SamplingParams


class KeyUse(enum.IntEnum):
    """What a random key is for. Each use of a step has keys of its own.

    The values are folded into the keys, so that changing them changes every sampled text.
    """

    FIRST_TOKEN = 0
    DRAFT = 1
    VERIFY = 2


def sampling_params(
    batch: int, temperature: float, top_k: int, top_p: float, seeds: Sequence[int]
) -> SamplingParams | None:
    """The same distribution for every row of a batch, and one seed per row.

    Returns:
      None at temperature 0, which is greedy decoding.

    Raises:
      InputError: a value is out of range.
    """
    if bad_seeds := [seed for seed in seeds if not 0 <= seed < 2**32]:
        next_step = "use a seed of 0 or more, below 4294967296"
        raise InputError("seed", "must lie in 0..2^32-1", bad_seeds[0], next_step)
    _check_ranges(temperature, top_k, top_p)
    if temperature == 0:
        return None
    return SamplingParams(
        key=jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32)),
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.full(batch, top_k, jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        filtered=top_k > 0 or top_p < 1,
    )


def _check_ranges(temperature: float, top_k: int, top_p: float) -> None:
    """Raises InputError for the first value that is no temperature, top-k or top-p."""
    if not 0 <= temperature < float("inf"):
        next_step = "use 0 for greedy decoding, or a value such as 0.7"
        raise InputError("temperature", "must be 0 or more, and finite", temperature, next_step)
    if top_k < 0:
        raise InputError("top_k", "must be 0 or more", top_k, "use 0 for no such filter")
    if not 0 < top_p <= 1:
        raise InputError("top_p", "must lie above 0, up to 1", top_p, "use 1 for no such filter")


def step_keys(sampling: SamplingParams, step: int | Int[Array, " B"], use: KeyUse) -> Array:
    """One fresh key per row [B], made from the row's own key, its step and the use.

    A row's text therefore depends on its seed alone, not on the batch that it is decoded in.
    """

    def row_key(key: Array, row_step: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, row_step), int(use))

    steps = jnp.broadcast_to(jnp.asarray(step), sampling.key.shape)
    return jax.vmap(row_key)(sampling.key, steps)


def with_step_keys(
    sampling: SamplingParams, step: int | Int[Array, " B"], use: KeyUse
) -> SamplingParams:
    """The same distributions with keys that are fresh for this step and use."""
    return dataclasses.replace(sampling, key=step_keys(sampling, step, use))


def probabilities(logits: Float[Array, "B V"], sampling: SamplingParams) -> Float[Array, "B V"]:
    """The distribution that each row samples from, in float32.

    Rows of temperature 0 have all probability on their argmax.
    """
    logits = logits.astype(jnp.float32)
    is_sampled = (sampling.temperature > 0)[:, None]
    scaled = logits / jnp.where(is_sampled, sampling.temperature[:, None], 1)
    if sampling.filtered:
        scaled = _filter(scaled, sampling.top_k, sampling.top_p)
    argmax = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.where(is_sampled, jax.nn.softmax(scaled, axis=-1), argmax)


def _filter(
    scaled: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Sets logits outside of top-k and top-p to minus infinity.

    Top-k keeps the k largest. Of these top-p keeps the smallest set of largest whose probability
    reaches `top_p`. Logits that equal the smallest one kept are kept as well.
    """
    V = scaled.shape[-1]
    ranked = -jnp.sort(-scaled, axis=-1)
    last_rank = jnp.where(top_k > 0, top_k, V) - 1
    last_rank = jnp.minimum(last_rank, V - 1)[:, None]
    smallest = jnp.take_along_axis(ranked, last_rank, axis=-1)
    ranked = jnp.where(ranked >= smallest, ranked, -jnp.inf)

    probs = jax.nn.softmax(ranked, axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    # the largest has no mass before it, and is always needed
    is_needed = (mass_before < top_p[:, None]) & jnp.isfinite(ranked)
    smallest = jnp.min(jnp.where(is_needed, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= smallest, scaled, -jnp.inf)


def sample(keys: Array, probs: Float[Array, "B V"]) -> Int[Array, " B"]:
    """One token per row, each with the row's own key."""
    return jax.vmap(lambda key, p: jax.random.categorical(key, jnp.log(p)))(keys, probs)
