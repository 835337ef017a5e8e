"""Distillation losses over the draft vocabulary.

Logits are computed in chunks: those of a whole batch of packed elements, [P W], never exist at
once.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.draft.markov import MarkovHead
from peagle_jax.kernels import vocab
from peagle_jax.layers import product, soft_cap

CHUNK = 2048  # packed elements whose logits exist at one time
MIN_OVERLAP, HYBRID_ETA = 1e-5, 3.0  # as in speculators 0.9

# {"correct": elements whose argmax is the target's, "total": elements}, weighted, by depth
DepthCounts = dict[str, Float[Array, " K"]]


def _log_softmax(logits: Float[Array, "c W"]) -> Float[Array, "c W"]:
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def forward_kl(student: Float[Array, "c W"], teacher: Float[Array, "c W"]) -> Float[Array, " c"]:
    """KL(teacher || student) of logits, in nats: speculators' default loss."""
    log_q, log_p = _log_softmax(student), _log_softmax(teacher)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def cross_entropy(student: Float[Array, "c W"], teacher: Float[Array, "c W"]) -> Float[Array, " c"]:
    """-log of the student's probability of the teacher's argmax, in nats.

    Greedy decoding accepts a draft if it is this argmax, and reads nothing else of the teacher.
    """
    best = jnp.argmax(teacher, axis=-1)[:, None]
    return -jnp.take_along_axis(_log_softmax(student), best, axis=1)[:, 0]


def _overlap(student: Float[Array, "c W"], teacher: Float[Array, "c W"]) -> Float[Array, " c"]:
    """sum(min(p, q)): the share of drafts that rejection sampling accepts."""
    q = jax.nn.softmax(student.astype(jnp.float32))
    p = jax.nn.softmax(teacher.astype(jnp.float32))
    return jnp.minimum(q, p).sum(axis=-1)


def total_variation(
    student: Float[Array, "c W"], teacher: Float[Array, "c W"]
) -> Float[Array, " c"]:
    """The share of drafts that sampling rejects; its gradient is flat where almost all are."""
    return 1 - _overlap(student, teacher)


def negative_log_acceptance(
    student: Float[Array, "c W"], teacher: Float[Array, "c W"]
) -> Float[Array, " c"]:
    """-log of the share of drafts that sampling accepts (arXiv:2602.23881), in nats."""
    return -jnp.log(jnp.maximum(_overlap(student, teacher), MIN_OVERLAP))


def kl_and_total_variation(
    student: Float[Array, "c W"], teacher: Float[Array, "c W"]
) -> Float[Array, " c"]:
    """KL where few drafts are accepted, total variation where most are.

    It is the hybrid loss of arXiv:2602.23881 with eta = 3.
    """
    overlap = _overlap(student, teacher)
    share = jnp.exp(-HYBRID_ETA * jax.lax.stop_gradient(overlap))
    return share * forward_kl(student, teacher) + (1 - share) * (1 - overlap)


LOSSES: dict[str, Callable] = {
    "forward_kl": forward_kl,
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "kl_and_total_variation": kl_and_total_variation,
    "negative_log_acceptance": negative_log_acceptance,
}
STREAMED = ("forward_kl", "cross_entropy")  # kernels/vocab.py computes these without logits


@dataclasses.dataclass(frozen=True)
class MarkovBias:
    """What a Markov head adds to the logits of packed elements.

    Attributes:
      head: the Markov head.
      previous: the token before the one that each element predicts, of the target's vocabulary.
    """

    head: MarkovHead
    previous: Int[Array, " P"]


def distill(
    norm: Callable[[Float[Array, "c D"]], Float[Array, "c D"]],
    lm_head_weight: Float[Array, "D W"],
    hidden: Float[Array, "P D"],
    teacher_weight: Float[Array, "E W"],
    teacher_hidden: Float[Array, "n E"],
    teacher_row: Int[Array, " P"],
    weight: Float[Array, " P"],
    depth: Int[Array, " P"],
    num_depths: int,
    logit_cap: float | None = None,
    loss: str = "forward_kl",
    bias: MarkovBias | None = None,
) -> tuple[Float[Array, ""], DepthCounts]:
    """Weighted sum of the elements' losses, and how often the head's argmax is the target's.

    Args:
      norm: the head's final norm; `norm(hidden) @ lm_head_weight` are its logits.
      lm_head_weight: the head's output matrix.
      hidden: the head's residual stream of every packed element.
      teacher_weight: the target's output matrix, its columns restricted to the draft vocabulary.
      teacher_hidden: the target's final hidden states, one for each shifted position.
      teacher_row: the row of `teacher_hidden` that each element learns from.
      weight: of each element in the sum; 0 for padding and for positions outside the loss mask.
      depth: of each element.
      num_depths: K, for the counts.
      logit_cap: soft cap of the target's logits (Gemma).
      loss: a name of `LOSSES`.
      bias: of the head's logits; None for a head without a Markov head.

    Returns:
      sum(weight * loss), and {"correct", "total"} by depth.
    """

    def by_depth(x: Float[Array, " c"], depth: Int[Array, " c"]) -> Float[Array, " K"]:
        return jnp.zeros(num_depths).at[depth].add(x)

    operands = hidden, lm_head_weight, teacher_hidden, teacher_weight
    if loss in STREAMED and vocab.is_supported(*operands):
        normed, columns = norm(hidden), lm_head_weight
        if bias is not None:
            # one product over both: the kernel knows of one matrix
            code = bias.head.code(bias.previous, normed).astype(normed.dtype)
            normed = jnp.concatenate([normed, code], axis=-1)
            columns = jnp.concatenate([columns, bias.head.w2.kernel[...]])
        kl, cross_entropy, losses = vocab.distill_losses(
            normed,
            columns,
            teacher_hidden[teacher_row],
            teacher_weight,
            logit_cap,
            "triton",
        )
        values = kl if loss == "forward_kl" else cross_entropy
        correct = by_depth(weight * (losses.student == losses.teacher), depth)
        return jnp.sum(weight * values), {"correct": correct, "total": by_depth(weight, depth)}

    P = hidden.shape[0]
    chunks = max(1, -(-P // CHUNK))
    size = -(-P // chunks)

    def split(x: Array) -> Array:
        """[P ..] -> [chunks size ..], padded with zeros."""
        padding = [(0, chunks * size - P), *[(0, 0)] * (x.ndim - 1)]
        return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

    # nothing of a chunk is kept for the backward pass: its logits are computed again there
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def chunk_loss(total, chunk):
        hidden, teacher_row, weight, depth, *previous = chunk
        normed = norm(hidden)
        student = product(normed, lm_head_weight)
        if bias is not None:
            student = student + bias.head(previous[0], normed)
        teacher = soft_cap(product(teacher_hidden[teacher_row], teacher_weight), logit_cap)
        teacher = jax.lax.stop_gradient(teacher)
        value = jnp.sum(weight * LOSSES[loss](student, teacher))
        is_correct = jnp.argmax(student, axis=-1) == jnp.argmax(teacher, axis=-1)
        return total + value, (by_depth(weight * is_correct, depth), by_depth(weight, depth))

    of_bias = () if bias is None else (bias.previous,)
    xs = tuple(split(x) for x in (hidden, teacher_row, weight, depth, *of_bias))
    summed, (correct, total) = jax.lax.scan(chunk_loss, jnp.zeros(()), xs)
    return summed, {"correct": correct.sum(axis=0), "total": total.sum(axis=0)}
