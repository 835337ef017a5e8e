"""What an output matrix over a large vocabulary is asked for, without its logits in memory.

That is argmax, the k largest with the log-sum-exp of all, and distillation losses. The logits of
20,000 packed positions and 152,000 tokens are 12 GB in float32, twice (student and teacher), and
once more for their gradient. Here tiles of them live in registers, and a few numbers a row remain
of each.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels.choose import choose, non_16bit_reason

CHUNK = 8192  # tokens of the vocabulary whose gradient exists at one time, [P CHUNK]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK:
    """The largest logits of each row, and the log-sum-exp of all.

    Logits are in descending order; of equal ones the lowest id comes first.
    """

    values: Float[Array, "M k"]
    ids: Int[Array, "M k"]
    lse: Float[Array, " M"]


def reference(
    x: Float[Array, "M K"],
    w: Float[Array, "..."],
    k: int,
    scale: Float[Array, " V"] | None = None,
    *,
    vocab_first: bool = False,
) -> TopK:
    """Computes all logits, in float32.

    Args:
      w: [K V] in the dtype of `x`, or in float8 with a scale a token of the vocabulary.
      vocab_first: `w` is [V K], as embeddings and FP8 matrices are.
    """
    w = w.astype(x.dtype)
    logits = jnp.matmul(x, w.T if vocab_first else w, preferred_element_type=jnp.float32)
    if scale is not None:
        logits = logits * scale[None]
    values, ids = jax.lax.top_k(logits, k)
    return TopK(values, ids, jax.nn.logsumexp(logits, axis=-1))


def triton(
    x: Float[Array, "M K"],
    w: Float[Array, "..."],
    k: int,
    scale: Float[Array, " V"] | None = None,
    *,
    vocab_first: bool = False,
) -> TopK:
    """As `reference`, by the Triton kernel."""
    from peagle_jax.kernels import vocab_triton

    return vocab_triton.topk(x, w, k, scale, vocab_first=vocab_first)


FORMS = {"reference": reference, "triton": triton}


def topk(
    x: Float[Array, "M K"],
    w: Float[Array, "..."],
    k: int,
    scale: Float[Array, " V"] | None = None,
    *,
    vocab_first: bool = False,
    form: str,
) -> TopK:
    """The k largest logits of each row, as `reference` returns them.

    Args:
      form: a name of FORMS, or "auto".

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    unsupported = non_16bit_reason(x, w) if scale is None else non_16bit_reason(x)
    form = choose("vocab", form, FORMS, unsupported)
    return FORMS[form](x, w, k, scale, vocab_first=vocab_first)


def is_supported(*operands: jax.Array) -> bool:
    """Whether "auto" keeps the logits of these operands out of memory here."""
    return choose("vocab", "auto", FORMS, non_16bit_reason(*operands)) == "triton"


def argmax_logits(
    x: Float[Array, "*rows K"],
    w: Float[Array, "..."],
    scale: Float[Array, " V"] | None = None,
    *,
    vocab_first: bool = False,
) -> Int[Array, "*rows"] | None:
    """The argmax of each row's logits, which never exist in memory.

    Logits are float32 here, and ties are fewer than in bfloat16: both can differ where the largest
    logits are within a rounding step.

    Returns:
      None where no kernel runs: a caller that has logits of its own takes the argmax of those.
    """
    if not (is_supported(x, w) if scale is None else is_supported(x)):
        return None
    rows = x.reshape(-1, x.shape[-1])
    top = topk(rows, w, 1, scale, vocab_first=vocab_first, form="triton")
    return top.ids.reshape(x.shape[:-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistillLoss:
    """What separates a student's from a teacher's distribution over the same tokens, a row."""

    kl: Float[Array, " P"]  # KL(teacher || student), nats
    cross_entropy: Float[Array, " P"]  # of the teacher's argmax under the student, nats
    student: Int[Array, " P"]  # the student's argmax
    teacher: Int[Array, " P"]  # the teacher's argmax
    student_lse: Float[Array, " P"]  # log-sum-exp of the student's logits
    teacher_lse: Float[Array, " P"]


def _both_logits(
    x, w, teacher_x, teacher_w, cap: float | None
) -> tuple[Float[Array, "P W"], Float[Array, "P W"]]:
    """The student's and the teacher's logits in float32; the teacher's are capped by tanh."""
    student = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    teacher = jnp.matmul(teacher_x, teacher_w, preferred_element_type=jnp.float32)
    return student, teacher if cap is None else cap * jnp.tanh(teacher / cap)


def distill_losses_reference(
    x: Float[Array, "P D"],
    w: Float[Array, "D W"],
    teacher_x: Float[Array, "P E"],
    teacher_w: Float[Array, "E W"],
    cap: float | None,
) -> DistillLoss:
    """Computes both logits.

    Args:
      cap: squeezes the teacher's logits by tanh (Gemma); None leaves them.
    """
    student, teacher = _both_logits(x, w, teacher_x, teacher_w, cap)
    lse, teacher_lse = (jax.nn.logsumexp(y, axis=-1) for y in (student, teacher))
    best = jnp.argmax(teacher, axis=-1)
    p = jnp.exp(teacher - teacher_lse[:, None])
    kl = jnp.sum(p * (teacher - student), axis=-1) - teacher_lse + lse
    at_best = jnp.take_along_axis(student, best[:, None], axis=1)[:, 0]
    return DistillLoss(kl, lse - at_best, jnp.argmax(student, axis=-1), best, lse, teacher_lse)


def logit_grads_reference(
    x: Float[Array, "P D"],
    w: Float[Array, "D W"],
    teacher_x: Float[Array, "P E"],
    teacher_w: Float[Array, "E W"],
    cap: float | None,
    losses: DistillLoss,
    first: int,
    kl: Float[Array, " P"],
    cross_entropy: Float[Array, " P"],
) -> Float[Array, "P W"]:
    """Gradient of sum(kl * losses.kl + cross_entropy * losses.cross_entropy) in student logits.

    It is in the dtype of `x`.

    Args:
      w, teacher_w: of the whole vocabulary, or of a stretch of it that begins with token `first`.
      kl, cross_entropy: weight of each row's losses.
    """
    student, teacher = _both_logits(x, w, teacher_x, teacher_w, cap)
    q = jnp.exp(student - losses.student_lse[:, None])
    p = jnp.exp(teacher - losses.teacher_lse[:, None])
    is_best = (first + jnp.arange(w.shape[1]))[None] == losses.teacher[:, None]
    return (kl[:, None] * (q - p) + cross_entropy[:, None] * (q - is_best)).astype(x.dtype)


def _distill_losses_triton(*args):
    from peagle_jax.kernels import vocab_triton

    return vocab_triton.distill_losses(*args)


def _logit_grads_triton(*args):
    from peagle_jax.kernels import vocab_triton

    return vocab_triton.logit_grads(*args)


# form -> (losses, gradient in the student's logits)
DISTILL_LOSSES = {
    "reference": (distill_losses_reference, logit_grads_reference),
    "triton": (_distill_losses_triton, _logit_grads_triton),
}


def distill_losses(
    x: Float[Array, "P D"],
    w: Float[Array, "D W"],
    teacher_x: Float[Array, "P E"],
    teacher_w: Float[Array, "E W"],
    cap: float | None = None,
    form: str = "auto",
) -> tuple[Float[Array, " P"], Float[Array, " P"], DistillLoss]:
    """(KL, cross entropy, DistillLoss) of each row.

    The first two are differentiable in `x` and `w`; everything in `DistillLoss` is a constant. The
    gradient computes the logits again, CHUNK tokens of the vocabulary at a time. The teacher gets
    no gradient.

    Args:
      x, w: the student's normed hidden states and output matrix.
      teacher_x, teacher_w: the teacher's, over the same tokens.
      cap: of the teacher's logits (Gemma).
      form: a name of DISTILL_LOSSES, or "auto".

    Raises:
      InputError: the form does not exist or cannot run here.
    """
    form = choose(
        "distillation losses", form, DISTILL_LOSSES, non_16bit_reason(x, w, teacher_x, teacher_w)
    )
    losses = cast(tuple, _losses(x, w, teacher_x, teacher_w, cap, form))
    kl, cross_entropy, *_ = losses
    return kl, cross_entropy, jax.lax.stop_gradient(DistillLoss(*losses))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _losses(x, w, teacher_x, teacher_w, cap, form) -> tuple:
    compute_losses, _ = DISTILL_LOSSES[form]
    losses = compute_losses(x, w, teacher_x, teacher_w, cap)
    return tuple(getattr(losses, field.name) for field in dataclasses.fields(losses))


def _forward(x, w, teacher_x, teacher_w, cap, form):
    losses = _losses(x, w, teacher_x, teacher_w, cap, form)
    return losses, (x, w, teacher_x, teacher_w, losses)


def _backward(cap, form, residuals, cotangents):
    x, w, teacher_x, teacher_w, losses = residuals
    of_kl, of_cross_entropy = cotangents[:2]
    _, logit_grads = DISTILL_LOSSES[form]
    losses = DistillLoss(*losses)
    W = w.shape[1]
    dw, dx = [], jnp.zeros(x.shape, jnp.float32)
    # The loop is unrolled: each product is the library's own, and XLA frees a chunk's gradient
    # after its two products.
    for first in range(0, W, CHUNK):
        chunk = slice(first, min(W, first + CHUNK))
        d = logit_grads(
            x,
            w[:, chunk],
            teacher_x,
            teacher_w[:, chunk],
            cap,
            losses,
            first,
            of_kl,
            of_cross_entropy,
        )
        dx += jnp.matmul(d, w[:, chunk].T, preferred_element_type=jnp.float32)
        dw.append(jnp.matmul(x.T, d, preferred_element_type=jnp.float32).astype(w.dtype))
    return (
        dx.astype(x.dtype),
        jnp.concatenate(dw, axis=1),
        jnp.zeros_like(teacher_x),
        jnp.zeros_like(teacher_w),
    )


_losses.defvjp(_forward, _backward)
