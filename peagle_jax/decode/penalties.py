"""Changes of the target's logits that a request asks for: penalties, biases, a least length.

They are made before temperature and filters, as in vLLM, and alike for plain decoding and for every
position of a verification. At the position after drafts d1 .. di the answer that penalties see has
these drafts, too: the position counts only if they were all accepted. Speculation therefore keeps
the distribution (or, greedily, the text) of plain decoding with the same penalties.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.decode.requests import Request
from peagle_jax.types import DecodeState, Penalties


def penalties_of(requests: Sequence[Request], vocab: int) -> Penalties | None:
    """The penalties of a batch; None where no row has any."""
    if not any(request.is_penalized for request in requests):
        return None
    bias = np.zeros((len(requests), vocab), np.float32)
    in_prompt = np.zeros((len(requests), vocab), bool)
    for row, request in enumerate(requests):
        for token, value in (request.logit_bias or {}).items():
            bias[row, token] = value
        in_prompt[row, list(request.prompt)] = True
    return Penalties(
        repetition=np.array([r.repetition_penalty for r in requests], np.float32),
        presence=np.array([r.presence_penalty for r in requests], np.float32),
        frequency=np.array([r.frequency_penalty for r in requests], np.float32),
        bias=bias,
        in_prompt=in_prompt,
        min_tokens=np.array([r.min_tokens for r in requests], np.int32),
    )


def count_tokens(state: DecodeState, drafts: Int[Array, "B K"], vocab: int) -> Int[Array, "B R V"]:
    """How often each token is in the answer, before each of the R = K + 1 predictions of a step."""
    rows = jnp.arange(len(drafts))[:, None]
    place = jnp.arange(state.output.shape[1])[None]
    # what was not written yet counts for a token that does not exist
    written = jnp.where(place < state.emitted[:, None], state.output, vocab)
    counts = jnp.zeros((len(drafts), vocab), jnp.int32).at[rows, written].add(1, mode="drop")
    drafted = jnp.cumsum(jax.nn.one_hot(drafts, vocab, dtype=jnp.int32), axis=1)
    return counts[:, None] + jnp.pad(drafted, [(0, 0), (1, 0), (0, 0)])


def penalize(
    logits: Float[Array, "B R V"],
    counts: Int[Array, "B R V"],
    penalties: Penalties,
    stop_ids: Int[Array | np.ndarray, "B stops"],
) -> Float[Array, "B R V"]:
    """The logits that a row samples from.

    First the bias is added. The repetition penalty then divides positive logits of tokens that the
    prompt or the answer has, and multiplies negative ones (arXiv:1909.05858). For tokens of the
    answer the presence penalty is subtracted once, the frequency penalty as often as they occur.
    Stop tokens of an answer that is too short yet get minus infinity.

    Args:
      logits: the target's.
      counts: how often each token is in the answer.
      penalties: of each row.
      stop_ids: of each row, -1 for none.
    """

    def of_row(x: Array | np.ndarray) -> Array:
        return jnp.asarray(x).reshape(-1, 1, 1)

    logits = logits.astype(jnp.float32) + jnp.asarray(penalties.bias)[:, None]
    in_answer = counts > 0
    is_repeated = in_answer | jnp.asarray(penalties.in_prompt)[:, None]
    factor = jnp.where(logits > 0, 1 / of_row(penalties.repetition), of_row(penalties.repetition))
    logits = jnp.where(is_repeated, logits * factor, logits)
    logits -= of_row(penalties.presence) * in_answer + of_row(penalties.frequency) * counts
    B, _, V = logits.shape
    ends = jnp.where(jnp.asarray(stop_ids) < 0, V, stop_ids)  # there is no token V
    is_stop = jnp.zeros((B, V), bool).at[jnp.arange(B)[:, None], ends].set(True, mode="drop")
    is_short = counts.sum(axis=-1, keepdims=True) < of_row(penalties.min_tokens)
    return jnp.where(is_short & is_stop[:, None], -jnp.inf, logits)
