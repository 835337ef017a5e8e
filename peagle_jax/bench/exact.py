"""Whether two decoders give the same answers, token for token."""

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from peagle_jax.layers import CachedAttention, Decoder, full_precision
from peagle_jax.types import Model

# Where the target's two largest logits are closer than this, float32 may pick either token.
NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How many answers of two decoders to the same prompts are equal.

    Attributes:
      same: equal token for token.
      near_ties: their first difference is between two tokens whose logits are both within NEAR_TIE
        of the target's largest.
      different: all others.
    """

    same: int
    near_ties: int
    different: int

    @property
    def lossless(self) -> bool:
        """Whether rounding explains every difference."""
        return self.different == 0


def compare(
    target: Model,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> Comparison:
    """Compares the answers of two decoders, which are token ids in the order of `prompts`.

    Args:
      target: decides what counts as a near tie.
    """
    same = near_ties = different = 0
    for prompt, answer, other in zip(prompts, answers, others, strict=True):
        if list(answer) == list(other):
            same += 1
            continue
        gap = first_gap(target, prompt, answer, other)
        if gap is not None and gap < NEAR_TIE:
            near_ties += 1
        else:
            different += 1
    return Comparison(same, near_ties, different)


def first_gap(
    target: Model, prompt: Sequence[int], answer: Sequence[int], other: Sequence[int]
) -> float | None:
    """How far below the target's largest logit two answers are where they first differ.

    Of both tokens' logits the lower one counts: where one is the largest and the other the second,
    it is the gap between these. None where one of the answers only ends earlier.
    """
    split = _first_difference(answer, other)
    if split is None:
        return None
    logits = _next_logits(target, [*prompt, *answer[:split]])
    return float(logits.max() - min(logits[answer[split]], logits[other[split]]))


def _first_difference(answer: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which both have a token and these differ; None where one only ends."""
    for i, (token, other_token) in enumerate(zip(answer, other, strict=False)):
        if token != other_token:
            return i
    return None


def _next_logits(target: Model, context: list[int]) -> Float[np.ndarray, " V"]:
    """The target's logits for the token after `context`."""
    positions = jnp.arange(len(context))[None]
    tokens = jnp.asarray([context])
    module = cast(Decoder, target.bind(target.params))
    cache = target.config.empty_cache(1, len(context))
    with full_precision(target):
        out, _ = module(tokens, positions, CachedAttention(positions), cache)
        return np.asarray(module.compute_logits(out.hidden[0, -1:])[0])
