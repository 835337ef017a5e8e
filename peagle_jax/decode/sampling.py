"""Next-token distributions (temperature, min-p, top-k, top-p, as in vLLM) and random keys."""

import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from peagle_jax.kernels import vocab
from peagle_jax.types import InputError, SamplingParams

# vLLM decodes greedily below (`_SAMPLING_EPS`); quotients by much less are not finite
LEAST_TEMPERATURE = 1e-5
MAX_TOP_K = 2**31 - 1  # of 32 bits; no vocabulary is as large


class KeyUse(enum.IntEnum):
    """What a random key is for. Each use of a step has keys of its own.

    The values are folded into the keys, so that changing them changes every sampled text.
    """

    FIRST_TOKEN = 0
    DRAFT = 1
    VERIFY = 2


def sampling_params(
    batch: int,
    temperature: float | Sequence[float],
    top_k: int | Sequence[int],
    top_p: float | Sequence[float],
    seeds: Sequence[int],
    min_p: float | Sequence[float] = 0.0,
) -> SamplingParams | None:
    """How the rows of a batch sample. Numbers are those of every row; sequences have one for each.

    A temperature below 1e-5 decodes greedily, as in vLLM.

    Returns:
      None where every temperature is 0, which is greedy decoding.

    Raises:
      InputError: a value is out of range.
    """
    options = (temperature, top_k, top_p, min_p)
    temperatures, top_ks, top_ps, min_ps = (np.broadcast_to(x, batch) for x in options)
    for row, seed in enumerate(seeds):
        numbers = float(temperatures[row]), int(top_ks[row]), float(top_ps[row])
        check_sampling(*numbers, seed, float(min_ps[row]))
    temperatures = np.where(temperatures < LEAST_TEMPERATURE, 0, temperatures)
    if not temperatures.any():
        return None
    return SamplingParams(
        key=_keys(np.asarray(seeds, np.uint32)),
        temperature=temperatures.astype(np.float32),
        top_k=np.clip(top_ks, 0, MAX_TOP_K).astype(np.int32),
        top_p=top_ps.astype(np.float32),
        min_p=min_ps.astype(np.float32),
        filtered=bool((top_ks > 0).any() or (top_ps < 1).any()),
    )


@jax.jit
def _keys(seeds: UInt32[Array, " B"]) -> Array:
    return jax.vmap(jax.random.key)(seeds)


def as_float32(value: float) -> float:
    """A number as the device has it: tiny ones are 0 there, and huge ones infinite."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def check_sampling(
    temperature: float, top_k: int, top_p: float, seed: int, min_p: float = 0.0
) -> None:
    """Raises InputError for the first value that is no temperature, top-k, top-p, seed or min-p."""
    if not 0 <= as_float32(temperature) < float("inf"):
        next_step = "use 0 for greedy decoding, or a value such as 0.7"
        raise InputError("temperature", "must be 0 or more, and finite", temperature, next_step)
    if top_k < -1:
        rule, next_step = "must be 0 or more, or vLLM's -1", "use 0 for no such filter"
        raise InputError("top_k", rule, top_k, next_step)
    if not 0 < as_float32(top_p) <= 1:
        raise InputError("top_p", "must lie above 0, up to 1", top_p, "use 1 for no such filter")
    if not 0 <= min_p <= 1:
        raise InputError("min_p", "must lie in 0..1", min_p, "use 0 for no such filter")
    if not 0 <= seed < 2**32:
        next_step = "use a seed of 0 or more, below 4294967296"
        raise InputError("seed", "must lie in 0..2^32-1", seed, next_step)


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
    # a token needs this share of the largest probability; log 0 is no bound
    least = scaled.max(axis=-1, keepdims=True) + jnp.log(jnp.asarray(sampling.min_p))[:, None]
    scaled = jnp.where(scaled >= least, scaled, -jnp.inf)
    if sampling.filtered:
        scaled = _filter(scaled, sampling.top_k, sampling.top_p)
    argmax = jax.nn.one_hot(vocab.argmax(logits), logits.shape[-1])
    return jnp.where(is_sampled, jax.nn.softmax(scaled, axis=-1), argmax)


def _filter(
    scaled: Float[Array, "B V"],
    top_k: Int[Array | np.ndarray, " B"],
    top_p: Float[Array | np.ndarray, " B"],
) -> Float[Array, "B V"]:
    """Sets logits outside of top-k and top-p to minus infinity.

    Top-k keeps the k largest. Of these top-p keeps the smallest set of largest whose probability
    reaches `top_p`. Logits that equal the smallest one kept are kept as well.
    """
    V = scaled.shape[-1]
    ranked = -jnp.sort(-scaled, axis=-1)
    last_rank = jnp.where(jnp.asarray(top_k) > 0, top_k, V) - 1
    last_rank = jnp.minimum(last_rank, V - 1)[:, None]
    smallest = jnp.take_along_axis(ranked, last_rank, axis=-1)
    ranked = jnp.where(ranked >= smallest, ranked, -jnp.inf)

    probs = jax.nn.softmax(ranked, axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    # the largest has no mass before it, and is always needed
    is_needed = (mass_before < top_p[:, None]) & jnp.isfinite(ranked)
    smallest = jnp.min(jnp.where(is_needed, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= smallest, scaled, -jnp.inf)


def sample(keys: Array, weights: Float[Array, "B V"]) -> Int[Array, " B"]:
    """One token per row, each with the row's own key, in proportion to its weight.

    A block of the vocabulary is drawn first, then a token in it, so that a row takes two random
    numbers. `jax.random.categorical` takes one for every token, which on a CPU is longer than the
    target's forward. The weights need not sum to 1; a token of weight 0 is not drawn. Shares are
    right to 2^-23, as the numbers are.
    """
    B, V = weights.shape
    size = 1 << (V - 1).bit_length() // 2  # about as many tokens in a block as there are blocks
    blocks = jnp.pad(weights, ((0, 0), (0, -V % size))).reshape(B, -1, size)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    block = _choose(blocks.sum(axis=-1), uniform[:, 0])
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * size + _choose(within, uniform[:, 1])


def _choose(weights: Float[Array, "B N"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first index with a weight of which the weights up to it are more than this share of all.

    `cumsum` is computed by halves, and rounding could let its sums fall.
    """
    N = weights.shape[-1]
    is_up_to = jnp.arange(N)[None, :] <= jnp.arange(N)[:, None]
    sums = jnp.where(is_up_to[None], weights[:, None, :], 0).sum(axis=-1)
    has_weight = weights > 0
    is_past = (sums > uniform[:, None] * sums[:, -1:]) & has_weight
    first = jnp.argmax(is_past, axis=-1)
    # by rounding no sum may be larger; of weights that are NaN none is
    last = jnp.max(jnp.where(has_weight, jnp.arange(N)[None], 0), axis=-1)
    return jnp.where(is_past.any(axis=-1), first, last).astype(jnp.int32)


def logprobs_of(logits: Float[Array, "B R V"], tokens: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """The log-probabilities of tokens, in float32."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
