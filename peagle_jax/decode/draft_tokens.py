"""Drafts from a head's hidden states: argmaxes or samples, with a Markov head one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decode.sampling import probabilities, sample
from peagle_jax.draft.head import DraftHead
from peagle_jax.kernels import vocab
from peagle_jax.types import SamplingParams

# Drafts with a Markov head that are written out one after another in a program. More of them are a
# loop, which compiles faster.
MARKOV_UNROLL = 16


def last_committed(tokens: Int[Array, "B R"], count: Int[Array, " B"]) -> Int[Array, " B"]:
    """The newest of the tokens that a step reads, which the first draft follows."""
    return jnp.take_along_axis(tokens, (count - 1)[:, None], axis=1)[:, 0]


def draft_tokens(
    head: DraftHead,
    hidden: Float[Array, "B T D"],
    last: Int[Array, " B"],
    sampling: SamplingParams | None,
) -> tuple[Int[Array, "B T"], Float[Array, "B T V"] | None]:
    """Drafts as ids of the target's vocabulary: samples, or argmaxes where `sampling` is None.

    Args:
      last: the token before the first draft, which a Markov head reads.

    Returns:
      The ids, and the logits that they were sampled from. Tokens outside of the head's draft
      vocabulary have a logit of minus infinity. None with argmaxes.
    """
    target_ids = head.target_ids()
    if sampling is None:
        if head.markov is None:
            return target_ids[head.argmax_logits(hidden)].astype(jnp.int32), None

        def argmax(draft_logits: Array, keys: None) -> tuple[Array, None]:
            return target_ids[vocab.argmax(draft_logits)].astype(jnp.int32), None

        return draft_in_turn(head, hidden, last, None, argmax)
    keys = jax.vmap(lambda key: jax.random.split(key, hidden.shape[1]))(sampling.key)

    def sample_position(draft_logits: Array, keys: Array) -> tuple[Array, Array]:
        """Ids of the target's vocabulary, and the logits over it that they are drawn from."""
        logits = over_target_vocab(head, draft_logits.astype(jnp.float32))
        return sample(keys, probabilities(logits, sampling)).astype(jnp.int32), logits

    if head.markov is not None:
        return draft_in_turn(head, hidden, last, keys, sample_position)
    return jax.vmap(sample_position, (1, 1), 1)(head.compute_logits(hidden), keys)


def over_target_vocab(head: DraftHead, logits: Float[Array, "*rows W"]) -> Float[Array, "*rows V"]:
    """Logits over the draft vocabulary as logits over the target's; minus infinity elsewhere."""
    cfg = head.cfg
    if head.d2t is None and cfg.draft_vocab == cfg.vocab:
        return logits
    # of every token of the target; -1 for those that the head does not know
    draft_ids = jnp.full(cfg.vocab, -1).at[head.target_ids()].set(jnp.arange(cfg.draft_vocab))
    # gathered: a CPU writes what is scattered number by number
    return jnp.where(draft_ids >= 0, logits[..., jnp.maximum(draft_ids, 0)], -jnp.inf)


def draft_in_turn(
    head: DraftHead,
    hidden: Float[Array, "B T D"],
    last: Int[Array, " B"],
    keys: Array | None,
    choose: Callable[[Array, Any], tuple[Array, Any]],
) -> tuple[Int[Array, "B T"], Any]:
    """Drafts of a head with a Markov head: each one's logits depend on the draft before it.

    The logits without the bias are computed for all positions at once, and the rest is products of
    the Markov head's rank, one after another.

    Args:
      last: the token before the first draft.
      keys: of each position [B T]; None where nothing is drawn.
      choose: (logits over the draft vocabulary [B W], keys [B] or None) -> drafts [B] as ids of the
        target's vocabulary, and whatever else is wanted of each position.

    Returns:
      The drafts, and what else `choose` gave, along a second axis T.
    """
    assert head.markov is not None
    markov, normed = head.markov, head.final_norm(hidden)
    per_position = jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0), (normed, head.lm_head(normed), keys)
    )

    def draft_next(before: tuple[Array, Array], position: tuple) -> tuple[tuple, Any]:
        (previous, state), (normed, logits, keys) = before, position
        bias, state = markov(previous, normed, state)
        ids, others = choose(logits + bias, keys)
        return (ids, state), (ids, others)

    # unrolled: on a GPU a round of a loop is more launches than the drafts of a position
    first = last, markov.first_state(normed[:, 0])
    _, drafted = jax.lax.scan(draft_next, first, per_position, unroll=MARKOV_UNROLL)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), drafted)
