"""Next-token distributions: temperature, then top-k, then top-p, as vLLM orders them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.types import InputError, SamplingParams


def sampling_params(
    batch: int, temperature: float, top_k: int, top_p: float, seeds: Sequence[int]
) -> SamplingParams | None:
    """The same rule for every row, a seed for each; None (greedy) at temperature 0.

    Raises:
      InputError: a value is out of range.
    """
    if bad := [s for s in seeds if not 0 <= s < 2**32]:
        raise InputError("--seed", "a seed must lie in 0..2^32-1", bad[0], "choose another")
    if not 0 <= temperature < float("inf") or not 0 < top_p <= 1 or top_k < 0:
        raise InputError(
            "sampling",
            "needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0",
            f"{temperature}, {top_p}, {top_k}",
            "mend it",
        )
    if temperature == 0:
        return None

    def full(value, dtype):
        return jnp.full(batch, value, dtype)

    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    return SamplingParams(
        keys,
        full(temperature, jnp.float32),
        full(top_k, jnp.int32),
        full(top_p, jnp.float32),
        filtered=top_k > 0 or top_p < 1,
    )


def probabilities(logits: Float[Array, "B V"], how: SamplingParams) -> Float[Array, "B V"]:
    """What one row each samples from, in float32. Temperature 0 is a point mass on the argmax."""
    logits = logits.astype(jnp.float32)
    scaled = logits / jnp.where(how.temperature > 0, how.temperature, 1)[:, None]
    if how.filtered:
        scaled = _filter(scaled, how.top_k, how.top_p)
    point = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.where((how.temperature > 0)[:, None], jax.nn.softmax(scaled, axis=-1), point)


def _filter(
    scaled: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Keeps the k largest, then the smallest set of largest whose probability reaches top_p. Ties at the edge stay."""
    ranked = -jnp.sort(-scaled, axis=-1)
    last = jnp.where(top_k > 0, top_k, scaled.shape[-1]) - 1
    edge = jnp.take_along_axis(ranked, jnp.minimum(last, scaled.shape[-1] - 1)[:, None], axis=-1)
    ranked = jnp.where(ranked >= edge, ranked, -jnp.inf)
    mass = jax.nn.softmax(ranked, axis=-1)
    needed = jnp.cumsum(mass, axis=-1) - mass < top_p[:, None]  # the first is always needed
    edge = jnp.min(
        jnp.where(needed & jnp.isfinite(ranked), ranked, jnp.inf), axis=-1, keepdims=True
    )
    return jnp.where(scaled >= edge, scaled, -jnp.inf)


def draw(keys: Array, probs: Float[Array, "B V"]) -> Int[Array, " B"]:
    """One token a row, each with its own key."""
    return jax.vmap(lambda key, p: jax.random.categorical(key, jnp.log(p)))(keys, probs)
