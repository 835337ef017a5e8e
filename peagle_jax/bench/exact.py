"""Whether two decoders give the same answers, token for token."""

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
import numpy as np

from peagle_jax.layers import CachedAttention, Decoder, full_precision
from peagle_jax.types import Model

# Where the target's two largest logits are closer than this, float32 may pick either token.
NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How many answers of two decoders to the same prompts are equal.

    Attributes:
      same: equal token for token.
      near_ties: their first difference is where the target's two largest logits are within
        NEAR_TIE of each other.
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
    """The target's largest logit minus its second, where two answers to a prompt first differ.

    None where one of them only ends earlier.
    """
    split = _first_difference(answer, other)
    return None if split is None else _top_two_gap(target, [*prompt, *answer[:split]])


def _first_difference(answer: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which both have a token and these differ; None where one only ends."""
    for i, (token, other_token) in enumerate(zip(answer, other, strict=False)):
        if token != other_token:
            return i
    return None


def _top_two_gap(target: Model, context: list[int]) -> float:
    """The largest logit minus the second largest, for the token after `context`."""
    positions = jnp.arange(len(context))[None]
    tokens = jnp.asarray([context])
    module = cast(Decoder, target.bind(target.params))
    cache = target.config.empty_cache(1, len(context))
    with full_precision(target):
        out, _ = module(tokens, positions, CachedAttention(positions), cache)
        logits = np.asarray(module.compute_logits(out.hidden[0, -1:])[0])
    second, first = np.sort(logits)[-2:]
    return float(first - second)
