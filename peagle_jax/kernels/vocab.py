"""What an output matrix over a large vocabulary is asked for, without its logits: argmax, top k, log-sum-exp, distillation losses.

Of 20,000 packed positions and 152,000 words the logits are 12 GB in float32, twice, and once more for their gradient. Here tiles of
them live in registers; what is kept of each is a few numbers a row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels.choose import choose, non_16bit_reason

CHUNK = 8192  # words whose gradient exists at one time, [P CHUNK]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK:
    """The largest logits of each row in descending order (of equals, the lowest id first), and the log-sum-exp of all."""

    values: Float[Array, "M k"]
    ids: Int[Array, "M k"]
    lse: Float[Array, " M"]


def reference(
    x: Float[Array, "M K"],
    w: Float[Array, "..."],
    k: int,
    scale: Float[Array, " V"] | None = None,
    *,
    by_word: bool = False,
) -> TopK:
    """By materialising the logits in float32.

    Args:
      w: [K V] in the dtype of `x`, or in float8 with a scale a word.
      by_word: it is [V K], as embeddings are, and FP8 matrices.
    """
    w = w.astype(x.dtype)
    logits = jnp.matmul(x, w.T if by_word else w, preferred_element_type=jnp.float32)
    if scale is not None:
        logits = logits * scale[None]
    values, ids = jax.lax.top_k(logits, k)
    return TopK(values, ids, jax.nn.logsumexp(logits, axis=-1))


def triton(x, w, k, scale=None, *, by_word=False) -> TopK:
    from peagle_jax.kernels import vocab_triton

    return vocab_triton.peaks(x, w, k, scale, by_word=by_word)


FORMS = {"reference": reference, "triton": triton}


def peaks(x, w, k: int, scale=None, *, by_word: bool = False, form: str) -> TopK:
    """The k largest logits a row, as `reference`, by a form of FORMS or "auto"."""
    return FORMS[
        choose(
            "vocab",
            form,
            FORMS,
            non_16bit_reason(x) if scale is not None else non_16bit_reason(x, w),
        )
    ](x, w, k, scale, by_word=by_word)


def is_supported(*operands: jax.Array) -> bool:
    """Whether "auto" keeps the logits of these operands out of memory here."""
    return choose("vocab", "auto", FORMS, non_16bit_reason(*operands)) == "triton"


def argmax_logits(
    x: Float[Array, "*rows K"], w: Float[Array, "..."], scale=None, *, by_word: bool = False
) -> Int[Array, "*rows"] | None:
    """The argmax of each row's logits, which never exist; None where that has no advantage, and the caller has its own logits.

    In float32, where logits in bfloat16 have ties: the two can differ where the largest are within a rounding step.
    """
    if not (is_supported(x) if scale is not None else is_supported(x, w)):
        return None
    found = peaks(x.reshape(-1, x.shape[-1]), w, 1, scale, by_word=by_word, form="triton")
    return found.ids.reshape(x.shape[:-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistillLoss:
    """Between a student's and a teacher's distribution over the same words, a row."""

    kl: Float[Array, " P"]  # KL(teacher || student), nats
    cross_entropy: Float[Array, " P"]  # of the teacher's argmax under the student, nats
    student: Int[Array, " P"]  # argmax
    teacher: Int[Array, " P"]
    student_lse: Float[Array, " P"]
    teacher_lse: Float[Array, " P"]


def distance_reference(x, w, teacher_x, teacher_w, cap: float | None) -> DistillLoss:
    """By materialising both logits. Axes: [P D], [D W], [P E], [E W]; `cap` squeezes the teacher's by tanh (Gemma)."""
    student = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    teacher = jnp.matmul(teacher_x, teacher_w, preferred_element_type=jnp.float32)
    teacher = teacher if cap is None else cap * jnp.tanh(teacher / cap)
    lse, teacher_lse = (jax.nn.logsumexp(y, axis=-1) for y in (student, teacher))
    best = jnp.argmax(teacher, axis=-1)
    kl = (
        jnp.sum(jnp.exp(teacher - teacher_lse[:, None]) * (teacher - student), axis=-1)
        - teacher_lse
        + lse
    )
    at_best = jnp.take_along_axis(student, best[:, None], axis=1)[:, 0]
    return DistillLoss(kl, lse - at_best, jnp.argmax(student, axis=-1), best, lse, teacher_lse)


def slopes_reference(
    x, w, teacher_x, teacher_w, cap, found: DistillLoss, first: int, kl, cross_entropy
) -> Float[Array, "P W"]:
    """Gradient of sum(kl * found.kl + cross_entropy * found.cross_entropy) in the student's logits, in the dtype of `x`.

    Args:
      w, teacher_w: all words, or a stretch of them that begins with word `first`.
      kl, cross_entropy: weight of each row's losses.
    """
    student = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    teacher = jnp.matmul(teacher_x, teacher_w, preferred_element_type=jnp.float32)
    teacher = teacher if cap is None else cap * jnp.tanh(teacher / cap)
    q, p = (
        jnp.exp(student - found.student_lse[:, None]),
        jnp.exp(teacher - found.teacher_lse[:, None]),
    )
    best = (first + jnp.arange(w.shape[1]))[None] == found.teacher[:, None]
    return (kl[:, None] * (q - p) + cross_entropy[:, None] * (q - best)).astype(x.dtype)


def _distance_triton(*args):
    from peagle_jax.kernels import vocab_triton

    return vocab_triton.distance(*args)


def _slopes_triton(*args):
    from peagle_jax.kernels import vocab_triton

    return vocab_triton.slopes(*args)


DISTANCES = {
    "reference": (distance_reference, slopes_reference),
    "triton": (_distance_triton, _slopes_triton),
}


def distance(
    x, w, teacher_x, teacher_w, cap: float | None = None, form: str = "auto"
) -> tuple[Float[Array, " P"], Float[Array, " P"], DistillLoss]:
    """(KL, cross entropy) of each row, differentiable in `x` and `w`, and everything else as numbers.

    The gradient recomputes the logits, CHUNK words at a time; the teacher gets none.

    Args:
      x, w: the student's normed hidden states [P D] and output matrix [D W].
      teacher_x, teacher_w: the teacher's [P E], [E W], the same words.
      cap: of the teacher's logits.
      form: a name of DISTANCES, or "auto".
    """
    form = choose("vocab distance", form, DISTANCES, non_16bit_reason(x, w, teacher_x, teacher_w))
    kl, cross_entropy, *rest = _losses(x, w, teacher_x, teacher_w, cap, form)
    return kl, cross_entropy, jax.lax.stop_gradient(DistillLoss(kl, cross_entropy, *rest))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _losses(x, w, teacher_x, teacher_w, cap, form) -> tuple:
    found = DISTANCES[form][0](x, w, teacher_x, teacher_w, cap)
    return tuple(getattr(found, field.name) for field in dataclasses.fields(found))


def _forward(x, w, teacher_x, teacher_w, cap, form):
    losses = _losses(x, w, teacher_x, teacher_w, cap, form)
    return losses, (x, w, teacher_x, teacher_w, losses)


def _backward(cap, form, kept, above):
    x, w, teacher_x, teacher_w, losses = kept
    slopes, found = DISTANCES[form][1], DistillLoss(*losses)
    W = w.shape[1]
    parts, dx = [], jnp.zeros(x.shape, jnp.float32)
    for first in range(
        0, W, CHUNK
    ):  # unrolled: each product is the library's own, and XLA frees a stretch after its two products
        here = slice(first, min(W, first + CHUNK))
        d = slopes(x, w[:, here], teacher_x, teacher_w[:, here], cap, found, first, *above[:2])
        dx += jnp.matmul(d, w[:, here].T, preferred_element_type=jnp.float32)
        parts.append(jnp.matmul(x.T, d, preferred_element_type=jnp.float32).astype(w.dtype))
    return (
        dx.astype(x.dtype),
        jnp.concatenate(parts, axis=1),
        jnp.zeros_like(teacher_x),
        jnp.zeros_like(teacher_w),
    )


_losses.defvjp(_forward, _backward)
