"""Rotary embeddings of every kind that a supported checkpoint asks for; formulas of transformers' modeling_rope_utils.py (5.23)."""

import dataclasses
import json
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.types import InputError


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of one checkpoint, as the inverse frequencies it comes down to."""

    frequencies: tuple[float, ...]  # radians per token, one for each of the H/2 rotated pairs
    scale: float = 1.0  # multiplies cos and sin (YaRN's attention factor)
    source: str = "{}"  # the config it came from, as JSON, so that an export can write it back

    @classmethod
    def from_hf(cls, config: Mapping, head_dim: int, where: str) -> "Rope":
        """Reads `rope_parameters` (transformers >= 5) or `rope_theta` + `rope_scaling` (before)."""
        spec = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(spec, Mapping):
            raise InputError(
                where,
                "rope_parameters and rope_scaling must be objects",
                repr(spec)[:80],
                "mend the config",
            )
        spec = {key: value for key, value in spec.items() if value is not None}
        if "rope_theta" not in spec:
            if config.get("rope_theta") is None:
                raise InputError(
                    where,
                    "rope_theta must be given, at top level or in rope_parameters",
                    "none",
                    "add it",
                )
            spec["rope_theta"] = config["rope_theta"]
        old, kind = spec.pop("type", None), spec.pop("rope_type", None)
        kind = spec["rope_type"] = kind or old or "default"
        if not isinstance(kind, str) or kind not in ROPE_KINDS or old not in (None, kind):
            got = kind if old is None else f"{kind} and {old}"
            raise InputError(
                where,
                f"rope_type must be one of {', '.join(ROPE_KINDS)}",
                got,
                "use another checkpoint",
            )
        context = spec.get("original_max_position_embeddings") or config.get(
            "max_position_embeddings"
        )
        _check_rope(spec, context, head_dim, where)
        plain = spec["rope_theta"] ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        try:
            frequencies, scale = ROPE_KINDS[kind](plain, spec, context, head_dim)
        except KeyError as missing:
            raise InputError(
                where,
                f"rope_type {kind} needs the key {missing}",
                "none",
                "add it to rope_parameters",
            ) from None
        return cls(
            tuple(float(f) for f in frequencies), float(scale), json.dumps(spec, sort_keys=True)
        )

    def __call__(
        self, x: Float[Array, "B T n H"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T n H"]:
        """Half-split rotation; angles in float32, because bfloat16 cannot tell position 257 from 256."""
        frequencies = jnp.asarray(self.frequencies, jnp.float32)[None, None, None]
        angle = positions[..., None, None].astype(jnp.float32) * frequencies
        cos, sin = (
            (self.scale * jnp.cos(angle)).astype(x.dtype),
            (self.scale * jnp.sin(angle)).astype(x.dtype),
        )
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _check_rope(spec: Mapping, context, head_dim: int, where: str) -> None:
    amounts = {key: value for key, value in spec.items() if key not in ("rope_type", "truncate")}
    for key, value in (amounts | {"max_position_embeddings": context or 0}).items():
        if type(value) not in (int, float) or not (value == 0 or 1e-30 < value < 1e30):
            raise InputError(
                where,
                f"{key} of the rotary embedding must be a number of 0 or more",
                repr(value)[:80],
                "mend the config",
            )
    low, high = spec.get("low_freq_factor", 0), spec.get("high_freq_factor", 1)
    theta, factor = spec["rope_theta"], spec.get("factor", 1)
    if (
        theta <= (spec["rope_type"] == "yarn")
        or factor <= 0
        or low >= high
        or head_dim % 2
        or not 0 < head_dim <= 65_536
    ):
        got = f"{theta}, {factor}, {low} and {high}, {head_dim}"
        rule = "rope_theta must be above 0 (YaRN: 1), factor above 0, low_freq_factor below high_freq_factor, head_dim even, to 65,536"
        raise InputError(where, rule, got, "mend the config")
    part = spec.get("partial_rotary_factor", 1)
    if part > 1 or part != 1 and spec["rope_type"] != "proportional":
        rule = "partial_rotary_factor must be 1 (of rope_type proportional: at most 1): all of a head is rotated here"
        raise InputError(where, rule, part, "use another checkpoint")
    if spec["rope_type"] in ("yarn", "llama3") and not context:
        rule = "llama3 and YaRN need original_max_position_embeddings or max_position_embeddings"
        raise InputError(where, rule, "neither", "mend the config")


def _default(plain, spec, context, head_dim):
    return plain, 1.0


def _linear(plain, spec, context, head_dim):
    return plain / spec["factor"], 1.0


def _llama3(plain, spec, context, head_dim):
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1; modeling_rope_utils.py)."""
    low, high, factor = spec["low_freq_factor"], spec["high_freq_factor"], spec["factor"]
    wavelength = 2 * math.pi / plain
    blend = np.clip((context / wavelength - low) / (high - low), 0, 1)
    return (1 - blend) * plain / factor + blend * plain, 1.0


def _yarn(plain, spec, context, head_dim):
    """YaRN (arXiv:2309.00071): interpolate slow pairs, keep fast ones, ramp between; cos and sin are scaled."""
    factor, theta = spec["factor"], spec["rope_theta"]

    def pair(rotations):  # the pair index that turns so often over the original context
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(spec.get("beta_fast") or 32), pair(spec.get("beta_slow") or 1)
    if spec.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)

    def mscale(weight):
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    scale = spec.get("attention_factor")
    if scale is None:
        one, all_dims = spec.get("mscale"), spec.get("mscale_all_dim")
        scale = mscale(one) / mscale(all_dims) if one and all_dims else mscale(1)
    return plain / factor * ramp + plain * (1 - ramp), scale


def _proportional(plain, spec, context, head_dim):
    """Gemma 4's full-attention layers: the first share of the pairs turns as in a fully rotated head, the others stand still."""
    pairs = int(spec.get("partial_rotary_factor", 1.0) * head_dim // 2)
    return np.where(np.arange(head_dim // 2) < pairs, plain, 0.0) / spec.get("factor", 1.0), 1.0


ROPE_KINDS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
