"""Placeholder designs in the one form that vLLM knows: `mask_hidden`, a vector in tap space, and the mask token's row of the embedding.

vLLM puts the same pair into every slot, before norms and `fc`. A design whose slots are all alike and do not depend on the text can be
written so, some after algebra; any other is refused with its reason.
"""

import dataclasses
import functools

import numpy as np

from peagle_jax import weights
from peagle_jax.checkpoints import param_mapping
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.types import InputError

TEXT = "its placeholders depend on the text before them; vLLM has one pair of vectors for all"
DEPTH = "its placeholders differ from depth to depth; vLLM has one pair of vectors for all"
REFUSED = {
    "hidden": {
        "per_depth": DEPTH,
        "shared_depth": DEPTH,
        "low_rank": DEPTH,
        "last_feature": TEXT,
        "gated": TEXT,
    },
    "token": {"last_token": TEXT},
}
ONE_DEPTH = (
    "per_depth",
    "shared_depth",
    "low_rank",
)  # alike after all, where K = 2 leaves one placeholder
EXPRESSED = {
    "hidden": ("shared", "shared_fused", "mean_feature", "zero", "frozen_random"),
    "token": ("mask", "frozen", "zero", "mean"),
}
UNKNOWN = "nobody has said yet whether vLLM can express it (checkpoints/export_placeholders.py)"  # a new design: a wrong folder would be silent


def how(config) -> str:
    """In words: "as it is", "rewritten: ..." or "refused: ..."; what `as_paper` will do, but for a fusion that cannot be inverted."""
    if not config.parallel:
        return "as it is"
    hidden, token = config.placeholder_hidden, config.placeholder_token
    if why := _refusal(config):
        return f"refused: {why}"
    said = {
        "shared_fused": "a vector in tap space that fc maps to it",
        "zero": "zeros in tap space",
        "per_depth": "its only depth's vector",
        "shared_depth": "a vector in tap space that fc maps to the sum",
        "low_rank": "its only depth's vector",
    }.get(hidden)
    words = [said] if said else []
    if token != "mask":
        words.append("its vector in the mask token's row")
    return f"rewritten: {', '.join(words)}" if words else "as it is"


def _refusal(config) -> str | None:
    hidden, token = config.placeholder_hidden, config.placeholder_token
    one = hidden in ONE_DEPTH and config.num_depths == 2
    if (
        config.norm_before_fc
        and config.fc_norm
        and (hidden == "shared_fused" or hidden == "shared_depth" and one)
    ):
        return "its vector lies behind two norms and fc, whose inverse is not solved here"
    known = (one or hidden in EXPRESSED["hidden"]) and token in EXPRESSED["token"]
    return (
        (None if one else REFUSED["hidden"].get(hidden))
        or REFUSED["token"].get(token)
        or (None if known else UNKNOWN)
    )


def to_vllm_placeholders(head: HeadState) -> HeadState:
    """The same head, its placeholders in the paper's form: equal drafts, to rounding.

    Raises:
      InputError: they have no such form.
    """
    cfg = head.config
    if not cfg.parallel or (cfg.placeholder_hidden, cfg.placeholder_token) == (
        PAPER_DESIGN["placeholder_hidden"],
        PAPER_DESIGN["placeholder_token"],
    ):
        return head
    if why := _refusal(cfg):
        raise InputError(
            head.source,
            why,
            f"{cfg.placeholder_hidden}, {cfg.placeholder_token}",
            "decode it here; it cannot be exported",
        )
    if cfg.placeholder_token != "mask" and head.shares_embedding:
        rule = "its token's vector goes into the mask token's row, so the head needs an embedding of its own"
        raise InputError(head.source, rule, "the target's", "export it with its embedding")
    tensors = {name: t for name, t in head.tensors.items() if not name.startswith("placeholder.")}
    tensors["mask_hidden"] = _hidden(head)
    if cfg.placeholder_token != "mask":
        table = head.tensors[param_mapping.EMBEDDING]
        tensors[param_mapping.EMBEDDING] = weights.LazyTensor(
            table.shape, table.dtype, functools.partial(_with_row, head)
        )
    return dataclasses.replace(
        head, tensors=tensors, config=dataclasses.replace(cfg, **PAPER_DESIGN)
    )


def _with_row(head: HeadState) -> np.ndarray:
    table = np.array(head.tensors[param_mapping.EMBEDDING])
    vector = head.tensors.get("placeholder.token")  # "zero" has none
    table[head.config.mask_token] = 0 if vector is None else np.asarray(vector)
    return table


def _hidden(head: HeadState) -> np.ndarray:
    cfg, get = head.config, lambda name: np.asarray(head.tensors[name]).astype(np.float64)
    dtype = head.tensors["fc.weight"].dtype
    if cfg.placeholder_hidden == "zero":
        return np.zeros(cfg.sizes.aux_dim, dtype)
    if cfg.placeholder_hidden == "per_depth":
        return get("placeholder.table")[0].astype(dtype)
    if cfg.placeholder_hidden == "shared_fused":
        return unfuse(head, get("placeholder.fused")).astype(dtype)
    shared = get("mask_hidden").reshape(-1)
    if cfg.placeholder_hidden == "shared_depth":
        return unfuse(head, fuse(head, shared) + get("placeholder.depth")[0]).astype(dtype)
    if cfg.placeholder_hidden == "low_rank":
        return (shared + get("placeholder.codes")[0] @ get("placeholder.directions")).astype(dtype)
    return shared.astype(dtype)  # mean_feature, frozen_random: `mask_hidden` all along


def _parts(head: HeadState) -> list[np.ndarray]:
    """Scales of the norms before fc, each over its own stretch of the taps; empty without norms."""
    cfg, get = head.config, lambda name: np.asarray(head.tensors[name]).astype(np.float64)
    if cfg.norm_before_fc:
        return [get("input_norm.weight")]
    return (
        [get(f"fc_norm.{i}.weight") for i in range(len(cfg.aux_hidden_state_layers))]
        if cfg.fc_norm
        else []
    )


def fuse(head: HeadState, aux_hidden_states: np.ndarray) -> np.ndarray:
    """`draft.fusion.Fusion` in float64, for one vector [A] -> [D]."""
    scales = _parts(head)
    if scales:
        pieces = np.split(aux_hidden_states, len(scales))
        aux_hidden_states = np.concatenate(
            [
                s * p / np.sqrt(np.mean(p**2) + head.config.norm_eps)
                for s, p in zip(scales, pieces, strict=True)
            ]
        )
    return np.asarray(head.tensors["fc.weight"]).astype(np.float64) @ aux_hidden_states


def unfuse(head: HeadState, wanted: np.ndarray) -> np.ndarray:
    """A vector in tap space [A] that the head fuses to `wanted` [D].

    Without norms: the shortest solution of fc x = wanted. A norm leaves of x only its direction, so that fc must reach `wanted` from a
    vector of one length, that of its scales: the shortest solution, and as much of what fc does not see as brings it to that length.

    Raises:
      InputError: fc does not reach it, or only from longer vectors than the norms give.
    """
    matrix = np.asarray(head.tensors["fc.weight"]).astype(np.float64)
    scales = _parts(head)
    if not scales:
        found = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    else:
        found = _on_the_sphere(head, matrix, wanted, scales)
    worst = np.abs(fuse(head, found) - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    if not worst < 1e-6:
        rule = "fc must reach the placeholder's vector"
        raise InputError(
            head.source, rule, f"off by {worst:.1e} of it", "decode it here; it cannot be exported"
        )
    return found


def _on_the_sphere(head: HeadState, matrix, wanted, scales: list[np.ndarray]) -> np.ndarray:
    """x with rms 1 in every stretch and matrix @ (scale * x) = wanted, then made so large that the norm's eps hardly matters."""
    scaled = matrix * np.concatenate(scales)
    x = np.linalg.lstsq(scaled, wanted, rcond=None)[0]
    unseen = np.linalg.svd(scaled)[2][
        np.linalg.matrix_rank(scaled) :
    ]  # rows span what fc does not see
    edges = np.cumsum([len(s) for s in scales])[:-1]

    def lack(v):
        return np.array([len(p) - p @ p for p in np.split(v, edges)])

    if not len(unseen) or len(scales) == 1 and lack(x)[0] < 0:
        rule = "the norm before fc leaves vectors of one length, and fc must reach the placeholder's vector from one of them"
        got = (
            f"a shortest of {np.sqrt(x @ x / len(x)):.3g} of it"
            if len(unseen)
            else "one solution, of another"
        )
        raise InputError(head.source, rule, got, "decode it here; it cannot be exported")
    if len(scales) == 1:  # one equation: any unseen direction, as far as it takes
        x = x + unseen[0] * np.sqrt(lack(x)[0])
    else:  # one equation a tap, solved by Newton's method over the unseen directions, from a point on which all stretches have some
        x = _newton(x, unseen, lack, edges)
    return 100 * x  # and no larger: float16 ends at 65,504


def _newton(x: np.ndarray, unseen: np.ndarray, lack, edges) -> np.ndarray:
    z = np.random.default_rng(0).normal(size=len(unseen)) * np.sqrt(
        np.maximum(lack(x), 1).sum() / len(unseen)
    )
    for _ in range(100):
        v = x + z @ unseen
        jacobian = np.stack(
            [
                2 * u @ p
                for u, p in zip(np.split(unseen, edges, axis=1), np.split(v, edges), strict=True)
            ]
        )  # of -lack
        z = z + np.linalg.lstsq(jacobian, lack(v), rcond=None)[0]
    return x + z @ unseen
