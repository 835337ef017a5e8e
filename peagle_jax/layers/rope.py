"""Rotary embeddings of every kind that a supported checkpoint asks for.

The formulas are those of transformers' modeling_rope_utils.py (5.24), in float32 and in its order:
at position 131,072 a frequency that is rounded otherwise turns a pair by up to 0.006 more or less.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.types import InputError

# keys whose values are numbers
AMOUNTS = ("rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")
AMOUNTS += ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
AMOUNTS += ("attention_factor", "mscale", "mscale_all_dim")
SCALED_BY_CONTEXT = ("yarn", "llama3")  # by the context before scaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of one checkpoint, as the inverse frequencies that it comes down to."""

    frequencies: tuple[float, ...]  # radians per token, one for each of the H/2 rotated pairs
    scale: float = 1.0  # multiplies cos and sin (YaRN's attention factor)
    source: str = "{}"  # the config that it came from, as JSON, so that an export can write it back

    @classmethod
    def from_hf(
        cls,
        config: Mapping,
        head_dim: int,
        where: str,
        default_theta: float | None = 10_000.0,
    ) -> "Rope":
        """Reads `rope_parameters` (transformers >= 5) or `rope_theta` + `rope_scaling` (before).

        Args:
          config: of a model, as its config.json has it.
          where: names the config in error messages.
          default_theta: where the config has none, as transformers' class of the family has it;
            None where there is no such default.

        Raises:
          InputError: a value is missing, is out of range, or asks for a kind that is not in
            ROPE_KINDS.
        """
        spec = _read_spec(config, where, default_theta)
        kind = spec["rope_type"]
        # at top level it counts more, as in transformers
        names = "original_max_position_embeddings", "max_position_embeddings"
        given = config.get(names[0]), spec.get(names[0]), config.get(names[1])
        context = next((x for x in given if x), None)
        _check_rope(spec, context, head_dim, where)
        if kind in SCALED_BY_CONTEXT:
            spec[names[0]] = context  # so that an export says it, too
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        # exact, and rounded once: so are nearly all of PyTorch's powers
        theta = float(np.float32(spec["rope_theta"]))
        powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
        try:
            frequencies, scale = ROPE_KINDS[kind](powers, spec, context, head_dim)
        except KeyError as missing:
            raise InputError(
                where,
                rule=f"rope_type {kind} needs the key {missing}",
                got="none",
                next_step=f"add {missing} to rope_parameters",
            ) from None
        return cls(
            tuple(float(f) for f in frequencies), float(scale), json.dumps(spec, sort_keys=True)
        )

    def __call__(
        self, x: Float[Array, "B T n H"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T n H"]:
        """Rotates pairs of x[.. i] and x[.. i + H/2].

        Angles are float32, because bfloat16 cannot tell position 257 from 256.
        """
        cos, sin = (table.astype(x.dtype) for table in self.tables(positions[..., None]))
        # Tables as wide as a head, which XLA computes once for all heads and layers. From the
        # halves of x, cos and sin it makes one loop, with a cosine for each number of x (LOG.md).
        cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
        return x * cos + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin

    def tables(
        self, positions: Int[Array, "*tokens"]
    ) -> tuple[Float[Array, "*tokens h"], Float[Array, "*tokens h"]]:
        """Cosines and sines of each pair's angle, times `scale`, in float32."""
        frequencies = jnp.asarray(self.frequencies, jnp.float32)
        frequencies = frequencies.reshape((1,) * positions.ndim + frequencies.shape)
        angle = positions[..., None].astype(jnp.float32) * frequencies
        return self.scale * jnp.cos(angle), self.scale * jnp.sin(angle)


def _read_spec(config: Mapping, where: str, default_theta: float | None) -> dict[str, Any]:
    """The rotary embedding's keys with `rope_theta` and `rope_type` among them, and no nulls."""
    both = [config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    spec = both[0] or both[1]
    if not all(isinstance(one, Mapping) for one in both):
        raise InputError(
            where,
            rule="rope_parameters and rope_scaling must be objects",
            got=repr(both[1] if isinstance(both[0], Mapping) else both[0])[:80],
            next_step='write an object, for example "rope_parameters": {"rope_theta": 10000.0}',
        )
    if nested := [key for one in both for key, value in one.items() if isinstance(value, Mapping)]:
        raise InputError(
            where,
            rule="the rotation must be of one kind for all layers",
            got=f"parameters of {', '.join(nested)}",
            next_step="keep those of the layers that this model has, without the name around them",
        )
    if both[0] and both[1]:
        _check_same(both[0], both[1], where)
        spec = {**both[1], **both[0]}  # a theta that only one of them has
    if "truncate" in spec:  # null truncates as little as false does
        spec = {**spec, "truncate": bool(spec["truncate"])}
    spec = {key: value for key, value in spec.items() if value is not None}
    if "rope_theta" not in spec:
        theta = config.get("rope_theta")
        if theta is None and default_theta is None:
            raise InputError(
                where,
                rule="rope_theta must be given, at top level or in rope_parameters",
                got="none",
                next_step="add rope_theta as the model was trained with it",
            )
        spec["rope_theta"] = default_theta if theta is None else theta
    # `type` is the former name of `rope_type`
    old_kind, new_kind = spec.pop("type", None), spec.pop("rope_type", None)
    kind = spec["rope_type"] = new_kind or old_kind or "default"
    is_known = isinstance(kind, str) and kind in ROPE_KINDS
    if not is_known or old_kind not in (None, kind):
        raise InputError(
            where,
            rule=f"rope_type must be one of {', '.join(ROPE_KINDS)}",
            got=kind if old_kind is None else f"{kind} and {old_kind}",
            next_step="use a checkpoint with one of these kinds, named once",
        )
    return spec


def _check_same(parameters: Mapping, scaling: Mapping, where: str) -> None:
    """Raises InputError where `rope_parameters` and `rope_scaling` ask for different rotations.

    transformers and vLLM then take `rope_scaling`; older readers of `rope_parameters` do not.
    """
    asked = []
    for one in (parameters, scaling):
        kind = one.get("rope_type") or one.get("type") or "default"
        values = {key: x for key, x in one.items() if x is not None and key != "type"}
        asked.append(values | {"rope_type": kind})
    shared_theta = {"rope_theta"} if all("rope_theta" in one for one in asked) else set()
    keys = (asked[0].keys() | asked[1].keys()) - {"rope_theta"} | shared_theta
    differing = sorted(key for key in keys if asked[0].get(key) != asked[1].get(key))
    if differing:
        key = "rope_type" if "rope_type" in differing else differing[0]
        raise InputError(
            where,
            rule=f"rope_parameters and rope_scaling must say the same about {key}",
            got=f"{asked[0].get(key)} and {asked[1].get(key)}",
            next_step="delete the one that the model was not trained with; vLLM takes rope_scaling",
        )


def _check_rope(spec: Mapping, context: Any, head_dim: int, where: str) -> None:
    """Raises InputError where a value would make frequencies that mean nothing."""
    amounts = {key: spec[key] for key in AMOUNTS if key in spec}  # others nobody reads
    amounts["max_position_embeddings"] = context or 0
    for key, value in amounts.items():
        if type(value) not in (int, float) or not (value == 0 or 1e-30 < value < 1e30):
            raise InputError(
                where,
                rule=f"{key} of the rotary embedding must be a number of 0 or more",
                got=repr(value)[:80],
                next_step=f"give {key} as a number",
            )
    low, high = spec.get("low_freq_factor", 1), spec.get("high_freq_factor", 2)
    theta, factor = spec["rope_theta"], spec.get("factor", 1)
    least_theta = 1 if spec["rope_type"] == "yarn" else 0
    head_dim_fits = head_dim % 2 == 0 and 0 < head_dim <= 65_536
    is_in_range = theta > least_theta and 0 < factor and factor * theta < 1e37
    if not is_in_range or not 0 < low < high or not head_dim_fits:
        raise InputError(
            where,
            rule="rope_theta must be above 0 (YaRN: 1), factor above 0, low_freq_factor above 0 "
            "and below high_freq_factor, head_dim even, to 65,536",
            got=f"{theta}, {factor}, {low} and {high}, {head_dim}",
            next_step="change the one that is out of range; typical are 10000.0, 8.0, 1.0 and 4.0, "
            "128",
        )
    share = spec.get("partial_rotary_factor", 1)
    if share > 1 or share != 1 and spec["rope_type"] != "proportional":
        raise InputError(
            where,
            rule="partial_rotary_factor must be 1 (of rope_type proportional: at most 1), "
            "because all of a head is rotated here",
            got=share,
            next_step="use a checkpoint whose heads are rotated as a whole",
        )
    if spec.get("use_fope") or "rope_dim" in spec:
        raise InputError(
            where,
            rule="use_fope and rope_dim, which vLLM reads, are not supported",
            got=f"{spec.get('use_fope')} and {spec.get('rope_dim')}",
            next_step="use a checkpoint without them",
        )
    if spec["rope_type"] in SCALED_BY_CONTEXT and not context:
        raise InputError(
            where,
            rule="llama3 and YaRN need original_max_position_embeddings or max_position_embeddings",
            got="neither",
            next_step="add original_max_position_embeddings, the context before scaling, such as "
            "8192",
        )


# Each kind maps powers of theta [H/2], of which plain frequencies are the reciprocals, the spec,
# the original context and the head's size to (frequencies, scale of cos and sin).


def _default(powers, spec, context, head_dim):
    return 1 / powers, 1.0


def _linear(powers, spec, context, head_dim):
    return 1 / powers / np.float32(spec["factor"]), 1.0


def _llama3(powers, spec, context, head_dim):
    """Llama 3.1: slow pairs are interpolated, fast ones stay, and those between are blended."""
    low, high, factor = (spec[f] for f in ("low_freq_factor", "high_freq_factor", "factor"))
    plain = 1 / powers
    # PyTorch divides a number by an array as its reciprocals times the number
    wavelength = 1 / plain * np.float32(2 * math.pi)
    blend = (1 / wavelength * np.float32(context) - np.float32(low)) / np.float32(high - low)
    slow = plain / np.float32(factor)
    blended = (1 - blend) * plain / np.float32(factor) + blend * plain
    is_slow = wavelength > np.float32(context / low)
    is_fast = wavelength < np.float32(context / high)
    return np.where(is_slow, slow, np.where(is_fast, plain, blended)), 1.0


def _yarn(powers, spec, context, head_dim):
    """YaRN (arXiv:2309.00071): slow pairs are interpolated, fast ones stay, with a ramp between.

    Cos and sin are scaled.
    """
    factor, theta = spec["factor"], spec["rope_theta"]

    def pair(rotations):
        """The index of the pair that turns so often over the original context."""
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(spec.get("beta_fast") or 32), pair(spec.get("beta_slow") or 1)
    if spec.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    width = np.float32(high - low if high != low else 0.001)
    stays = 1 - np.clip((pairs - np.float32(low)) / width, 0, 1)

    def mscale(weight):
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    scale = spec.get("attention_factor")
    if scale is None:
        weight, weight_all_dim = spec.get("mscale"), spec.get("mscale_all_dim")
        if weight and weight_all_dim:
            scale = mscale(weight) / mscale(weight_all_dim)
        else:
            scale = mscale(1)
    return 1 / (np.float32(factor) * powers) * (1 - stays) + 1 / powers * stays, scale


def _proportional(powers, spec, context, head_dim):
    """Gemma 4's full-attention layers.

    The first share of the pairs turns as in a fully rotated head; the others stand still.
    """
    pairs = int(spec.get("partial_rotary_factor", 1.0) * head_dim // 2)
    turning = np.where(np.arange(head_dim // 2) < pairs, 1 / powers, np.float32(0))
    return turning / np.float32(spec.get("factor", 1.0)), 1.0


ROPE_KINDS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
