"""Are two decoders' answers the same, token for token?"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from peagle_jax.decode.generate import full_precision
from peagle_jax.layers import CachedAttention
from peagle_jax.types import Model

NEAR_TIE = 1e-4  # top-two logit gap under which float32 may pick either token (house rule)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Answers of two decoders to the same prompts."""

    same: int
    near_ties: int  # differ first where the target's top two logits lie within NEAR_TIE
    different: int

    @property
    def lossless(self) -> bool:
        return self.different == 0


def compare(
    target: Model, prompts, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> Comparison:
    """Token for token; a first difference counts as a near tie only if the target itself was within NEAR_TIE there."""
    same = ties = different = 0
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        if list(a) == list(b):
            same += 1
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is not None and _gap(target, [*prompt, *a[:at]]) < NEAR_TIE:
            ties += 1
        else:
            different += 1
    return Comparison(same, ties, different)


def _gap(target: Model, context: list[int]) -> float:
    """Difference of the target's two largest logits after `context`."""
    positions = jnp.arange(len(context))[None]
    module = target.bind(target.params)
    with full_precision(target):
        out, _ = module(
            jnp.asarray([context]),
            positions,
            CachedAttention(positions),
            target.config.empty_cache(1, len(context)),
        )
        second, first = np.sort(np.asarray(module.compute_logits(out.hidden[0, -1:])[0]))[-2:]
    return float(first - second)
