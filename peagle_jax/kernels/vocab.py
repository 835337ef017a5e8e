"""What decoding asks of an output matrix over a large vocabulary, without its logits in memory.

That is the argmax, and the k largest with the log-sum-exp of all. Tiles of logits live in
registers, and a few numbers a row remain of each. Losses of training are computed by XLA, in chunks
of rows (peagle_jax/train/loss.py): two products of a tile in one kernel read their operands from
the L2 cache at 260 TFLOP/s at most, and XLA's own products are three times as fast.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels.choose import choose, non_16bit_reason
from peagle_jax.kernels.launch import platform

# Logits of a block in `argmax`. Vocabularies that are no multiple of it are searched as XLA does.
BLOCK = 64


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


def argmax(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The first of the largest logits of each row; any token of a row that contains NaN.

    On a CPU XLA searches an argmax number by number, and a maximum by vectors. So the block with
    the largest number is looked for first: 8 rows of 151,936 take 0.26 ms in the place of 1.9.
    """
    V = logits.shape[-1]
    if platform() != "cpu" or V % BLOCK or V == BLOCK:
        return jnp.argmax(logits, axis=-1)
    blocks = logits.reshape(*logits.shape[:-1], V // BLOCK, BLOCK)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    largest = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * BLOCK + jnp.argmax(largest, axis=-1)
