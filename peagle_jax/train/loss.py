"""Distillation losses over the draft vocabulary.

Logits are computed in chunks: those of a whole batch of packed elements, [P W], never exist at
once. On GPUs, too, XLA computes them, in float32: it multiplies three times as fast as a kernel
that keeps logits out of memory altogether (LOG.md, 2026-11-25).
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from peagle_jax.draft.markov import MarkovHead
from peagle_jax.layers import float32_product, soft_cap
from peagle_jax.targets.sharding import DATA, FSDP

CHUNK = 2048  # packed elements whose logits exist at one time
MIN_OVERLAP, HYBRID_ETA = 1e-5, 3.0  # as in speculators 0.9

# {"correct": elements whose argmax is the target's, "total": elements}, weighted, by depth; with a
# confidence head also the sum of its losses, "confidence_loss"
DepthCounts = dict[str, Float[Array, " K"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TeacherProbs:
    """What losses read of the target's distributions.

    Attributes:
      probs: of every token.
      negative_entropy: sum(p log p), in nats.
      best: the likeliest token, which greedy decoding writes.
    """

    probs: Float[Array, "c W"]
    negative_entropy: Float[Array, " c"]
    best: Int[Array, " c"]

    @classmethod
    def of_logits(cls, logits: Float[Array, "c W"]) -> "TeacherProbs":
        """In float32, whatever the logits are."""
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        p = jnp.exp(log_p)
        return cls(p, jnp.sum(p * log_p, axis=-1), jnp.argmax(logits, axis=-1))


def forward_kl(student: Float[Array, "c W"], teacher: TeacherProbs) -> Float[Array, " c"]:
    """KL(teacher || student), in nats: speculators' default loss.

    sum(p (log p - log q)) with log q = student - log sum exp(student): one pass with exponentials.
    """
    shifted = _shifted(student)
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    return teacher.negative_entropy - jnp.sum(teacher.probs * shifted, axis=-1) + log_sum


def cross_entropy(student: Float[Array, "c W"], teacher: TeacherProbs) -> Float[Array, " c"]:
    """-log of the student's probability of the teacher's argmax, in nats.

    Greedy decoding accepts a draft if it is this argmax, and reads nothing else of the teacher.
    """
    shifted = _shifted(student)
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    return log_sum - _at(shifted, teacher.best)


def _shifted(student: Float[Array, "c W"]) -> Float[Array, "c W"]:
    """Logits in float32, with 0 for the largest of each row."""
    x = student.astype(jnp.float32)
    return x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))


def _at(x: Float[Array, "c W"], token: Int[Array, " c"]) -> Float[Array, " c"]:
    """Of each row the number of one token."""
    return jnp.take_along_axis(x, token[:, None], axis=1)[:, 0]


def _overlap(student: Float[Array, "c W"], teacher: TeacherProbs) -> Float[Array, " c"]:
    """sum(min(p, q)): the share of drafts that rejection sampling accepts."""
    q = jax.nn.softmax(student.astype(jnp.float32))
    return jnp.minimum(q, teacher.probs).sum(axis=-1)


def total_variation(student: Float[Array, "c W"], teacher: TeacherProbs) -> Float[Array, " c"]:
    """The share of drafts that sampling rejects; its gradient is flat where almost all are."""
    return 1 - _overlap(student, teacher)


def negative_log_acceptance(
    student: Float[Array, "c W"], teacher: TeacherProbs
) -> Float[Array, " c"]:
    """-log of the share of drafts that sampling accepts (arXiv:2602.23881), in nats."""
    return -jnp.log(jnp.maximum(_overlap(student, teacher), MIN_OVERLAP))


def kl_and_total_variation(
    student: Float[Array, "c W"], teacher: TeacherProbs
) -> Float[Array, " c"]:
    """KL where few drafts are accepted, total variation where most are.

    It is the hybrid loss of arXiv:2602.23881 with eta = 3.
    """
    overlap = _overlap(student, teacher)
    share = jnp.exp(-HYBRID_ETA * jax.lax.stop_gradient(overlap))
    return share * forward_kl(student, teacher) + (1 - share) * (1 - overlap)


# of the student's logits, and of what it learns from
LOSSES: dict[str, Callable] = {
    "forward_kl": forward_kl,
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "kl_and_total_variation": kl_and_total_variation,
    "negative_log_acceptance": negative_log_acceptance,
}


@dataclasses.dataclass(frozen=True)
class MarkovBias:
    """What a Markov head adds to the logits of packed elements.

    Attributes:
      head: the Markov head.
      code: of each element, what its matrix `w2` multiplies.
    """

    head: MarkovHead
    code: Float[Array, "P r"]


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
    confidence: Float[Array, " P"] | None = None,
    batch_size: int = 1,
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
      confidence: logits of a confidence head, which learn the share of an element's drafts that
        sampling accepts; None for a head without one.
      batch_size: sequences of which the elements, and the rows of `teacher_hidden`, are as many
        equal parts, one after another; no element learns from another sequence. On a mesh that
        divides them each device computes the logits of its own.

    Returns:
      sum(weight * loss), and {"correct", "total"} by depth. With `confidence` the loss has its
      binary cross-entropy (arXiv:2607.05147), and "confidence_loss" is that by depth.
    """
    inputs, matrices = (norm(hidden),), (lm_head_weight,)
    if bias is not None:
        code = bias.code.astype(inputs[0].dtype)
        inputs, matrices = (*inputs, code), (*matrices, bias.head.w2.kernel[...])
    teacher = jax.lax.stop_gradient((teacher_hidden, teacher_weight))
    form = Form(loss, num_depths, logit_cap, confidence is not None, batch_size)
    rows = teacher_row, weight, depth
    results = cast(Any, _distill_chunks(form, inputs, matrices, teacher, rows))
    total, counts, overlap = results
    if confidence is None:
        return total, counts
    losses = weight * confidence_loss(confidence, jax.lax.stop_gradient(overlap))
    by_depth = jnp.zeros(num_depths).at[depth].add(jax.lax.stop_gradient(losses))
    return total + losses.sum(), counts | {"confidence_loss": by_depth}


def confidence_loss(
    logits: Float[Array, "*rows"], overlap: Float[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Binary cross-entropy of confidences with the share of drafts that sampling accepts, in nats.

    -(a log c + (1 - a) log(1 - c)) of a confidence c = sigmoid(logit) and a share a. It is smallest
    where c = a, and then the entropy of a. With a reduced draft vocabulary the share is that of the
    target's distribution over this vocabulary alone, and so too large; calibration corrects it.
    """
    return jax.nn.softplus(logits) - overlap * logits


@dataclasses.dataclass(frozen=True)
class Form:
    """What of `distill` is no array, under the same names.

    `wants_overlap` says whether the share of drafts that sampling accepts is wanted as well.
    """

    loss: str
    num_depths: int
    logit_cap: float | None
    wants_overlap: bool
    batch_size: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _distill_chunks(form, inputs, matrices, teacher, rows):
    """What `distill` returns without confidences, chunk by chunk of the elements.

    The third result is the share of each element's drafts that sampling accepts, without a
    gradient; None unless the form wants it.

    Where gradients are wanted, those of a chunk are computed together with its loss, so that no
    logits are kept for a backward pass, or computed again in one. The backward pass multiplies them
    with the gradient of the sum. A frozen matrix costs no gradient.

    Args:
      form: of the loss.
      inputs: [P D], what the head's output matrix reads, and of a Markov head [P r], its code.
      matrices: that of each; the logits are the sum of the products.
      teacher: the target's hidden states and output matrix.
      rows: of each element the row of the teacher's hidden states, the weight and the depth.
    """
    return _sums_and_grads(form, inputs, matrices, teacher, rows, ((), ()))[0]


def _distill_chunks_forward(form, inputs, matrices, teacher, rows):
    wanted = tuple(tuple(i for i, x in enumerate(xs) if x.perturbed) for xs in (inputs, matrices))
    inputs, matrices, teacher, rows = jax.tree.map(
        operator.attrgetter("value"), (inputs, matrices, teacher, rows)
    )
    result, grads = _sums_and_grads(form, inputs, matrices, teacher, rows, wanted)
    # of a matrix the gradient is float32 until it is scaled
    dtypes = [tuple(jnp.zeros((), x.dtype) for x in xs) for xs in (inputs, matrices)]
    return result, (grads, dtypes)


def _distill_chunks_backward(form, saved, cotangents):
    of_sum = cotangents[0]  # counts and overlaps have no gradients
    scaled = [
        tuple(
            None if grad is None else (grad.astype(jnp.float32) * of_sum).astype(like.dtype)
            for grad, like in zip(grads, dtypes, strict=True)
        )
        for grads, dtypes in zip(*saved, strict=True)
    ]
    return *scaled, None, None


_distill_chunks.defvjp(_distill_chunks_forward, _distill_chunks_backward, symbolic_zeros=True)


def _sums_and_grads(form, inputs, matrices, teacher, rows, wanted):
    """What `_distill_chunks` returns, and the gradients of its sum.

    On a mesh each device has chunks of its own sequences. Cut from all elements, a chunk would be
    of one device's sequences, and XLA would have every device compute every chunk.

    Args:
      wanted: the numbers of the inputs, and of the matrices, whose gradients are computed. Others
        are None.
    """
    axes, num_shards = _axes_of_sequences()
    if num_shards == 1 or form.batch_size % num_shards:
        return _sums_and_grads_of_chunks(form, inputs, matrices, teacher, rows, wanted)

    def of_one_shard(inputs, matrices, teacher, rows):
        teacher_row, weight, depth = rows
        teacher_row -= jax.lax.axis_index(axes) * teacher[0].shape[0]
        rows = teacher_row, weight, depth
        (summed, counts, overlap), (of_inputs, of_matrices) = _sums_and_grads_of_chunks(
            form, inputs, matrices, teacher, rows, wanted
        )
        summed, counts, of_matrices = jax.lax.psum((summed, counts, of_matrices), axes)
        return (summed, counts, overlap), (of_inputs, of_matrices)

    divided, whole = PartitionSpec(axes), PartitionSpec()
    return jax.shard_map(
        of_one_shard,
        in_specs=(divided, whole, (divided, whole), divided),
        out_specs=((whole, whole, divided), (divided, whole)),
        axis_names=set(axes),
        check_vma=False,
    )(inputs, matrices, teacher, rows)


def _axes_of_sequences() -> tuple[tuple[str, ...], int]:
    """The axes of the mesh at hand that divide a batch's sequences, and into how many parts."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    axes = tuple(axis for axis in (DATA, FSDP) if sizes.get(axis, 1) > 1)
    return axes, math.prod(sizes[axis] for axis in axes)


def _sums_and_grads_of_chunks(form, inputs, matrices, teacher, rows, wanted):
    """As `_sums_and_grads`, of the elements of one device."""
    teacher_hidden, teacher_weight = teacher
    P = inputs[0].shape[0]
    chunks = max(1, -(-P // CHUNK))
    size = -(-P // chunks)

    def probs_at(hidden: Float[Array, "c E"]) -> TeacherProbs:
        logits = float32_product(hidden, teacher_weight)
        return TeacherProbs.of_logits(soft_cap(logits, form.logit_cap))

    # Several elements learn from one row of the teacher. Where all of these together are no more
    # than a chunk, the distribution of each is computed once.
    table = probs_at(teacher_hidden) if teacher_hidden.shape[0] <= CHUNK else None

    def split(x: Array) -> Array:
        """[P ..] -> [chunks size ..], padded with zeros."""
        padding = [(0, chunks * size - P), *[(0, 0)] * (x.ndim - 1)]
        return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

    def by_depth(x: Float[Array, " c"], depth: Int[Array, " c"]) -> Float[Array, " K"]:
        return jnp.zeros(form.num_depths).at[depth].add(x)

    def add_chunk(totals, chunk):
        inputs, (teacher_row, weight, depth) = chunk
        if table is None:
            probs = probs_at(teacher_hidden[teacher_row])
        else:
            probs = jax.tree.map(lambda x: x[teacher_row], table)

        def sum_of_losses(differentiated):
            xs, ws = (dict(enumerate(all_)) for all_ in (inputs, matrices))
            xs, ws = xs | differentiated[0], ws | differentiated[1]
            logits = [float32_product(xs[i], ws[i]) for i in xs]
            student = sum(logits[1:], logits[0])
            return jnp.sum(weight * LOSSES[form.loss](student, probs)), student

        operands = [
            {i: xs[i] for i in which} for xs, which in zip((inputs, matrices), wanted, strict=True)
        ]
        (summed, student), grads = jax.value_and_grad(sum_of_losses, has_aux=True)(operands)
        # of two largest logits that are the same, either is the argmax
        is_correct = _at(student, probs.best) == student.max(axis=-1)
        counts = {"correct": by_depth(weight * is_correct, depth), "total": by_depth(weight, depth)}
        of_matrices = {i: grad.astype(jnp.float32) for i, grad in grads[1].items()}
        overlap = _overlap(student, probs) if form.wants_overlap else None
        return jax.tree.map(jnp.add, totals, (summed, counts, of_matrices)), (grads[0], overlap)

    nothing = {"correct": jnp.zeros(form.num_depths), "total": jnp.zeros(form.num_depths)}
    no_gradients = {i: jnp.zeros(matrices[i].shape) for i in wanted[1]}
    xs = jax.tree.map(split, (inputs, rows))
    totals, (of_inputs, overlap) = jax.lax.scan(
        add_chunk, (jnp.zeros(()), nothing, no_gradients), xs
    )
    summed, counts, of_matrices = totals
    whole = {i: x.reshape(chunks * size, -1)[:P] for i, x in of_inputs.items()}
    numbers = range(len(inputs))
    grads = tuple(map(whole.get, numbers)), tuple(map(of_matrices.get, numbers))
    overlap = None if overlap is None else overlap.reshape(-1)[:P]
    return (summed, counts, overlap), grads
