"""The confidence head: how likely a draft is accepted if those before it are (arXiv:2607.05147).

    logit[d] = kernel . [norm(hidden[d]); markov.w1[token[d - 1]]] + bias
    confidence[d] = sigmoid(scale[d] * logit[d] + shift[d])

The token before a draft is read only where the draft head has a Markov head. The logits learn the
share of drafts that rejection sampling accepts, 1 - the total variation between both models'
distributions, after the tokens of a text. What decoding needs is another number: the chance after
drafts that were accepted, greedily or sampled. `Calibration` has the scale and the shift of every
position that lead from one to the other.

A confidence says what to expect of drafts, and changes none of them. The names of tensors and keys
are DSpark's, as vLLM and DeepSpec have them: `confidence_head.proj`, `enable_confidence_head`. The
calibration is our own.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from peagle_jax.types import InputError

# The fields of a `HeadConfig` without such a head.
NO_CONFIDENCE: dict[str, Any] = {"confidence": False, "confidence_calibration": None}
KINDS = ("greedy", "sampled")
# A larger scale or shift is one of a damaged file.
LARGEST = 1e4

# scale and shift of the logits of every position
Scaling = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Platt scaling of a confidence head's logits, position by position.

    Attributes:
      greedy: where drafts are accepted if they are the target's argmax.
      sampled: where rejection sampling accepts them, at temperature 1.
    """

    greedy: Scaling
    sampled: Scaling

    def of_kind(self, kind: str, k: int) -> Float[np.ndarray, "2 K"]:
        """Scales and shifts of K positions; those behind the last have the last one's.

        Args:
          kind: "greedy" or "sampled".
        """
        scaling: Scaling = getattr(self, kind)
        return np.array([scaling[min(i, len(scaling) - 1)] for i in range(k)], np.float32).T

    def to_json(self) -> dict[str, list[list[float]]]:
        """The calibration as config.json has it."""
        return {kind: [list(pair) for pair in getattr(self, kind)] for kind in KINDS}


def calibration_from_json(raw: object, where: str, next_step: str) -> Calibration | None:
    """The calibration that a file has; None for null.

    Args:
      raw: the value of the key `confidence_calibration`.
      where: the file, for the error.
      next_step: what to do, for the error.

    Raises:
      InputError: it is no calibration.
    """
    if raw is None:
        return None
    rule = (
        "confidence_calibration must have lists greedy and sampled of pairs [scale, shift], one "
        "for each position"
    )
    if not isinstance(raw, Mapping) or set(raw) != set(KINDS):
        raise InputError(where, rule, repr(raw)[:80], next_step)
    if not all(isinstance(raw[kind], list) and raw[kind] for kind in KINDS):
        raise InputError(where, rule, repr(dict(raw))[:80], next_step)
    for pair in (pair for kind in KINDS for pair in raw[kind]):
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(_is_finite(x) for x in pair):
            raise InputError(where, rule, repr(pair)[:80], next_step)
    scalings = [tuple((float(a), float(b)) for a, b in raw[kind]) for kind in KINDS]
    return Calibration(*scalings)


def _is_finite(x: object) -> bool:
    return type(x) in (int, float) and math.isfinite(x) and abs(x) <= LARGEST  # type: ignore


class ConfidenceHead(nnx.Module):
    """Logits of how likely drafts are accepted.

    It begins with a logit of zero, for whatever it reads. No gradient reaches what it reads.

    Args:
      width: of what it reads: D, and the rank of a Markov head.
      dtype: of the parameters.
    """

    def __init__(self, width: int, *, dtype: DTypeLike):
        self.kernel = nnx.Param(jnp.zeros((width, 1), dtype))
        self.bias = nnx.Param(jnp.zeros(1, dtype))

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows"]:
        """In float32, whatever the parameters are."""
        x = jax.lax.stop_gradient(x).astype(jnp.float32)
        kernel, bias = (p[...].astype(jnp.float32) for p in (self.kernel, self.bias))
        return (x @ kernel)[..., 0] + bias.reshape((1,) * (x.ndim - 1))


def check_confidence(confidence: bool, calibrated: bool, parallel: bool, where: str) -> None:
    """Raises InputError unless a head can have such a confidence head.

    Args:
      confidence: whether it has one.
      calibrated: whether it has a calibration.
      parallel: whether the head drafts in parallel.
      where: the key or the file, for the error.
    """
    if confidence and not parallel:
        rule = "a confidence head is for heads that draft in parallel"
        next_step = "set confidence to false"
        raise InputError(where, rule, "a head without a mask token", next_step)
    if calibrated and not confidence:
        rule = "a calibration is one of a confidence head"
        next_step = "set confidence to true, or confidence_calibration to null"
        raise InputError(where, rule, "a head without", next_step)
