"""A router: which experts each token goes to, and how much of each.

It is a product with the router's matrix, a softmax and the k largest. XLA launches eight kernels
for it, of 28 of a layer of Qwen3-Coder.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels.choose import choose, non_16bit_reason

# With more tokens a library's product is faster than the launches that are saved, by calculation.
# An H200 took less time for XLA's router than for a former kernel at 8 tokens (docs/kernels.md).
MAX_ROWS = 64
MAX_EXPERTS = 256  # whose logits a program keeps in registers


def reference(
    x: Float[Array, "n D"],
    w: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    k: int,
    *,
    normalized: bool,
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """(routing weights, topk ids), the largest first; of equal ones the lowest id.

    Logits are rounded to the dtype of `x`, which routing weights have, too; the softmax is float32.

    Args:
      normalized: the k weights of a token are divided by their sum, which makes them a softmax over
        their logits alone; otherwise they are shares of a softmax over all.
    """
    logits = jnp.matmul(x, w, preferred_element_type=x.dtype)
    if bias is not None:
        logits = logits + bias[None]
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = jax.lax.top_k(probs, k)
    if normalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights.astype(x.dtype), ids


def triton(
    x: Float[Array, "n D"],
    w: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    k: int,
    *,
    normalized: bool,
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """As `reference`, in two launches."""
    from peagle_jax.kernels import routing_triton

    return routing_triton.route(x, w, bias, k, normalized=normalized)


FORMS = {"reference": reference, "triton": triton}


def route(
    x: Float[Array, "n D"],
    w: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    k: int,
    *,
    normalized: bool,
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]] | None:
    """As `reference`, where a kernel runs; None where the caller's own layers are to do it."""
    reason = non_16bit_reason(x, w)
    if len(x) > MAX_ROWS:
        reason = f"of {len(x)} tokens a library's product is faster"
    elif w.shape[1] > MAX_EXPERTS:
        reason = f"they keep the logits of {MAX_EXPERTS} experts, and there are {w.shape[1]}"
    if choose("routing", "auto", FORMS, reason) == "reference":
        return None
    return _route(x, w, bias, k, normalized)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _route(x, w, bias, k, normalized):
    return triton(x, w, bias, k, normalized=normalized)


def _forward(x, w, bias, k, normalized):
    return _route(x, w, bias, k, normalized), (x, w, bias)


def _backward(k, normalized, args, grads):
    """By the reference: few rows are not worth a kernel."""

    def weights(x, w, bias):
        return reference(x, w, bias, k, normalized=normalized)[0]

    _, vjp = jax.vjp(weights, *args)
    return vjp(grads[0])


_route.defvjp(_forward, _backward)
