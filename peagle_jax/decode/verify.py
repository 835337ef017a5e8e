"""Acceptance rules: which drafts are kept, and which token the target adds after them.

The target's forward over [last token, drafts] is done before; see `loop.verify_forward`. Each rule
scans the positions in order, because a draft counts only if all drafts before it were accepted.
What follows the accepted drafts is then drawn once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decode.sampling import probabilities, sample
from peagle_jax.types import SamplingParams


def verify_greedy(
    drafts: Int[Array, "B K"], target_argmax: Int[Array, "B R"]
) -> tuple[Int[Array, "B R"], Int[Array, " B"]]:
    """Accepts the drafts before the first that differs from the target's argmax.

    Args:
      drafts: draft i is a guess of the token that position i predicts.
      target_argmax: what the R = K + 1 positions of [last token, drafts] predict.

    Returns:
      Tokens, of which the first `accepted + 1` are committed, and `accepted`, 0 to K per row.

    Example:
      drafts [5 6 7] and target_argmax [5 6 9 2] give tokens [5 6 9 .] and accepted 2.
    """

    def verify_position(still_accepting, position):
        wanted, draft = position
        still_accepting &= draft == wanted
        return still_accepting, still_accepting

    # unrolled: on a GPU a round of a loop is several launches, and there are few numbers here
    _, is_accepted = jax.lax.scan(
        verify_position,
        jnp.ones(len(drafts), bool),
        (target_argmax[:, :-1].T, drafts.T),
        unroll=True,
    )
    return target_argmax, is_accepted.sum(axis=0, dtype=jnp.int32)


def draw_accepted(
    rates: tuple[float, ...],
    accepted: Int[Array, " B"],
    num_steps: Int[Array, " B"],
    tokens: Int[Array, "B R"],
) -> Int[Array, " B"]:
    """SYNTHETIC acceptance: how many drafts count as accepted, in the place of verification.

    Draft i counts where one uniform number of the row's step lies below `rates[i]`. As rates do not
    rise, all drafts before it then count, too, and draft i does so in a share `rates[i]` of steps.

    Args:
      rates: of each of the K positions, from 0 to 1.
      accepted: by verification; only its shape counts.
      num_steps: that each row has taken.
      tokens: of the step, so that rows and requests draw different numbers.
    """

    def uniform(row: Array, step: Array, token: Array) -> Array:
        key = jax.random.key(0)
        for number in (row, step, token):
            key = jax.random.fold_in(key, number)
        return jax.random.uniform(key)

    drawn = jax.vmap(uniform)(jnp.arange(len(accepted)), num_steps, tokens[:, 0])
    return (drawn[:, None] < jnp.asarray(rates)[None]).sum(axis=-1, dtype=jnp.int32)


def verify_sampled(
    drafts: Int[Array, "B K"],
    draft_logits: Float[Array, "B K V"] | None,
    logits: Float[Array, "B R V"],
    sampling: SamplingParams,
) -> tuple[Int[Array, "B R"], Int[Array, " B"]]:
    """Speculative sampling (arXiv:2211.17192): committed tokens are distributed as the target's.

    With p the target's and q the draft's probability, draft x is accepted with probability
    min(1, p(x) / q(x)). The first one refused is replaced by a sample of normalize(max(p - q, 0)).
    If all are accepted, one more token is sampled from p.

    Args:
      drafts: proposed tokens.
      draft_logits: what the drafts were sampled from (with the same `sampling`), over the target's
        vocabulary; None for drafts that are argmaxes, which makes q one-hot.
      logits: the target's, at the R = K + 1 positions of [last token, drafts].
      sampling: its keys must be fresh for this step.

    Returns:
      Tokens, of which the first `accepted + 1` are committed, and `accepted`, 0 to K per row.
    """
    R, V = logits.shape[1:]
    # one key decides about the drafts, the other samples what follows the last one accepted
    keys = jax.vmap(jax.random.split)(sampling.key)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (R - 1,)))(keys[:, 0])
    of_positions = jax.vmap(probabilities, (1, None), 1)
    p = of_positions(logits, sampling)
    q = jax.nn.one_hot(drafts, V) if draft_logits is None else of_positions(draft_logits, sampling)

    def of_drafts(probs: Array) -> Array:
        return jnp.take_along_axis(probs, drafts[..., None], axis=2)[..., 0]

    def verify_position(still_accepting, position):
        uniform, p_draft, q_draft = position
        still_accepting &= uniform * q_draft < p_draft
        return still_accepting, still_accepting

    _, is_accepted = jax.lax.scan(
        verify_position,
        jnp.ones(len(drafts), bool),
        (uniform.T, of_drafts(p[:, :-1]).T, of_drafts(q).T),
        unroll=True,
    )
    accepted = is_accepted.sum(axis=0, dtype=jnp.int32)

    def behind_accepted(probs: Array) -> Array:
        return jnp.take_along_axis(probs, accepted[:, None, None], axis=1)[:, 0]

    # the position behind all drafts has none: nothing is subtracted there
    p_next, q_next = map(behind_accepted, (p, jnp.pad(q, ((0, 0), (0, 1), (0, 0)))))
    residual = jnp.maximum(p_next - q_next, 0)
    # where p equals q nothing is left; then only rounding can have refused the draft
    is_left = residual.sum(axis=-1, keepdims=True) > 0
    following = sample(keys[:, 1], jnp.where(is_left, residual, p_next))
    is_draft = jnp.arange(R)[None] < accepted[:, None]
    tokens = jnp.where(is_draft, jnp.pad(drafts, ((0, 0), (0, 1))), following[:, None])
    return tokens.astype(jnp.int32), accepted
