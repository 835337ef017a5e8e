"""Distillation loss on the draft vocabulary, in chunks: [packed, W] logits never exist for a whole batch."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels import vocab
from peagle_jax.layers import soft_cap

ROWS = 2048  # packed elements whose logits exist at one time
LEAST_OVERLAP, HYBRID_ETA = 1e-5, 3.0  # as speculators 0.9


def forward_kl(student: Float[Array, "c W"], teacher: Float[Array, "c W"]) -> Float[Array, " c"]:
    """KL(teacher || student) of logits, in nats: speculators' default loss."""
    log_q, log_p = (
        jax.nn.log_softmax(student.astype(jnp.float32)),
        jax.nn.log_softmax(teacher.astype(jnp.float32)),
    )
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def cross_entropy(student: Float[Array, "c W"], teacher: Float[Array, "c W"]) -> Float[Array, " c"]:
    """Of the teacher's argmax, in nats: all that greedy decoding asks for."""
    log_q = jax.nn.log_softmax(student.astype(jnp.float32))
    return -jnp.take_along_axis(log_q, jnp.argmax(teacher, axis=-1)[:, None], axis=1)[:, 0]


def _overlap(student, teacher) -> Float[Array, " c"]:
    """sum(min(p, q)): the share of drafts that sampling accepts."""
    return jnp.minimum(
        jax.nn.softmax(student.astype(jnp.float32)), jax.nn.softmax(teacher.astype(jnp.float32))
    ).sum(axis=-1)


def total_variation(
    student: Float[Array, "c W"], teacher: Float[Array, "c W"]
) -> Float[Array, " c"]:
    """The share of drafts that sampling rejects; its gradient is flat where almost all are."""
    return 1 - _overlap(student, teacher)


def negative_log_acceptance(
    student: Float[Array, "c W"], teacher: Float[Array, "c W"]
) -> Float[Array, " c"]:
    """-log of the share of drafts that sampling accepts (arXiv:2602.23881), in nats."""
    return -jnp.log(jnp.maximum(_overlap(student, teacher), LEAST_OVERLAP))


def kl_and_total_variation(
    student: Float[Array, "c W"], teacher: Float[Array, "c W"]
) -> Float[Array, " c"]:
    """KL where few drafts are accepted, total variation where most are (arXiv:2602.23881, hybrid, eta = 3)."""
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


STREAMED = ("forward_kl", "cross_entropy")  # kernels/vocab.py has them without logits


def distill(
    norm: Callable[[Float[Array, "c D"]], Float[Array, "c D"]],
    output: Float[Array, "D W"],
    hidden: Float[Array, "P D"],
    teacher_weight: Float[Array, "E W"],
    teacher_hidden: Float[Array, "n E"],
    where: Int[Array, " P"],
    weight: Float[Array, " P"],
    depth: Int[Array, " P"],
    num_depths: int,
    logit_cap: float | None = None,
    loss: str = "forward_kl",
) -> tuple[Float[Array, ""], dict[str, Float[Array, " K"]]]:
    """Weighted sum of the elements' losses, and how often the head's argmax is the target's, by depth.

    Args:
      norm, output: of the head; `norm(hidden) @ output` are its logits.
      hidden: of every packed element.
      teacher_weight: the target's output matrix, its columns restricted to the draft vocabulary.
      teacher_hidden: the target's final hidden states, one a shifted position.
      where: row of `teacher_hidden` that each element learns from.
      weight: 0 for padding and unsupervised elements.
      logit_cap: of the target's logits (Gemma).
      loss: of `LOSSES`.

    Returns:
      sum(weight * loss), {"correct": weighted hits, "total": weights} by depth.
    """

    def by_depth(x, depth):
        return jnp.zeros(num_depths).at[depth].add(x)

    if loss in STREAMED and vocab.is_supported(hidden, output, teacher_hidden, teacher_weight):
        kl, cross_entropy, found = vocab.distance(
            norm(hidden), output, teacher_hidden[where], teacher_weight, logit_cap, "triton"
        )
        summed = jnp.sum(weight * {"forward_kl": kl, "cross_entropy": cross_entropy}[loss])
        return summed, {
            "correct": by_depth(weight * (found.student == found.teacher), depth),
            "total": by_depth(weight, depth),
        }
    P = hidden.shape[0]
    parts = max(1, -(-P // ROWS))
    size = -(-P // parts)

    def pad(x):
        return jnp.pad(x, [(0, parts * size - P), *[(0, 0)] * (x.ndim - 1)]).reshape(
            parts, size, *x.shape[1:]
        )

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def part(total, xs):
        hidden, where, weight, depth = xs
        student, teacher = (
            norm(hidden) @ output,
            jax.lax.stop_gradient(soft_cap(teacher_hidden[where] @ teacher_weight, logit_cap)),
        )
        value = jnp.sum(weight * LOSSES[loss](student, teacher))
        hit = weight * (jnp.argmax(student, axis=-1) == jnp.argmax(teacher, axis=-1))
        return total + value, (by_depth(hit, depth), by_depth(weight, depth))

    xs = tuple(pad(x) for x in (hidden, where, weight, depth))
    summed, (correct, total) = jax.lax.scan(part, jnp.zeros(()), xs)
    return summed, {"correct": correct.sum(axis=0), "total": total.sum(axis=0)}
