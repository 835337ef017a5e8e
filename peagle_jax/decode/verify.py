"""Acceptance rules: which drafts the target keeps, and the token it adds. A scan over the K+1 verified positions.

The forward pass is over when this begins: one target call has read the whole block.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decode.sampling import draw, probabilities
from peagle_jax.types import SamplingParams


def verify_greedy(
    drafts: Int[Array, "B K"], wanted: Int[Array, "B R"]
) -> tuple[Int[Array, "B R"], Int[Array, " B"]]:
    """Keeps the drafts up to the first that is not the target's argmax.

    Args:
      drafts: proposed tokens; draft i stands where position i predicts.
      wanted: the target's argmax at the R = K+1 positions of [last token, drafts].

    Returns:
      tokens, of which `accepted + 1` are to be emitted, and accepted, 0..K a row.

    Example:
      drafts [5 6 7], wanted [5 6 9 2] -> tokens [5 6 9 .], accepted 2.
    """

    def position(alive, seen):
        want, draft = seen
        alive &= draft == want
        return alive, alive

    # unrolled: on a GPU a round of a loop costs several launches, and these are a few numbers
    _, kept = jax.lax.scan(
        position, jnp.ones(len(drafts), bool), (wanted[:, :-1].T, drafts.T), unroll=True
    )
    return wanted, kept.sum(axis=0, dtype=jnp.int32)


def verify_sampled(
    drafts: Int[Array, "B K"],
    draft_logits: Float[Array, "B K V"] | None,
    logits: Float[Array, "B R V"],
    how: SamplingParams,
) -> tuple[Int[Array, "B R"], Int[Array, " B"]]:
    """Speculative sampling (arXiv:2211.17192): the emitted tokens are distributed as the target samples.

    Draft x is kept with probability min(1, p(x)/q(x)); the first one refused is replaced by a sample of
    normalize(max(p - q, 0)), and if all are kept one more is sampled from p.

    Args:
      draft_logits: what the drafts were sampled from (under `how`), over the target's vocabulary; None when they were
        chosen greedily, so that q is one-hot.
      how: its keys must be fresh for this step.
    """
    B, R, V = logits.shape
    keys = jax.vmap(lambda key: jax.random.split(key, (R, 2)))(how.key)

    def position(alive, seen):
        target, draft, q, key = seen
        p = probabilities(target, how)

        def at(probs):
            return jnp.take_along_axis(probs, jnp.maximum(draft, 0)[:, None], axis=1)[:, 0]

        uniform = jax.vmap(jax.random.uniform)(key[:, 0])
        alive &= (draft >= 0) & (uniform * at(q) < at(p))
        residual = jnp.maximum(p - q, 0)
        total = residual.sum(axis=-1, keepdims=True)
        # p == q leaves no residual, and cannot be refused either except by rounding
        other = draw(key[:, 1], jnp.where(total > 0, residual / jnp.where(total > 0, total, 1), p))
        return alive, (jnp.where(alive, draft, other), alive)

    if draft_logits is None:
        q = jax.nn.one_hot(drafts, V)
    else:
        q = jax.vmap(probabilities, (1, None), 1)(draft_logits, how)

    def bonus(x, value):
        return jnp.concatenate([x, jnp.full((B, 1, *x.shape[2:]), value, x.dtype)], axis=1)

    by_position = (
        jnp.moveaxis(logits, 1, 0),
        bonus(drafts, -1).T,
        jnp.moveaxis(bonus(q, 0), 1, 0),
        jnp.moveaxis(keys, 1, 0),
    )
    _, (tokens, kept) = jax.lax.scan(position, jnp.ones(B, bool), by_position)
    return tokens.T.astype(jnp.int32), kept.sum(axis=0, dtype=jnp.int32)
