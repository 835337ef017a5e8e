"""Placeholder designs, rewritten into the only one that vLLM knows.

vLLM puts one pair of vectors into every placeholder: `mask_hidden` in the place of the aux hidden
states, before the norms and `fc`, and the mask token's row of the embedding. A design whose
placeholders are all alike and do not depend on the text can be written as such a pair, some of
them after algebra. Every other one is refused, with its reason.

A new design (peagle_jax/draft/placeholders.py) is refused until it has an entry in
`HIDDEN_EXPORTS` or `TOKEN_EXPORTS`: a wrong folder would be silent, because vLLM drafts from any
vector.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Shaped

from peagle_jax import weights
from peagle_jax.checkpoints import param_mapping
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.types import InputError

DEPENDS_ON_TEXT = (
    "its placeholders depend on the text before them; vLLM has one pair of vectors for all"
)
DIFFERS_BY_DEPTH = (
    "its placeholders differ from depth to depth; vLLM has one pair of vectors for all"
)
OTHER_ATTENTION = "vLLM's placeholders attend to the committed tokens and those before them"
OTHER_CONTEXT = "vLLM's layers have keys and values of what the layer before gave"
ROWS = ("placeholder_hidden", "placeholder_token")
ATTENTION = ("placeholder_attention", "placeholder_context")
UNKNOWN = "nobody has said yet whether vLLM can express its placeholder design"
TWO_NORMS = "its vector lies behind two norms and fc, whose inverse is not solved here"
UNREACHED_NEXT_STEP = "decode it here with peagle generate; it cannot be exported"
UNKNOWN_NEXT_STEP = (
    "add the design to HIDDEN_EXPORTS or TOKEN_EXPORTS in "
    "peagle_jax/checkpoints/export_placeholders.py; peagle generate decodes with it already"
)

AuxVector = Float[np.ndarray, " A"]  # one vector in the place of the aux hidden states


# ---------------------------------------------------------------- designs of the hidden side


@dataclasses.dataclass(frozen=True)
class HiddenExport:
    """How one design of the hidden side becomes `mask_hidden`.

    Attributes:
      vector: the head -> `mask_hidden`; None where there is no such vector.
      description: what `mask_hidden` will be; None where it is the head's own `mask_hidden`.
      refusal: why the design cannot be written; None where it can.
      with_one_depth: the refusal does not hold with K = 2, which leaves a single placeholder.
      inverts_fusion: its vector lies behind the fusion, whose inverse must be found.
    """

    vector: Callable[[HeadState], AuxVector] | None
    description: str | None = None
    refusal: str | None = None
    with_one_depth: bool = False
    inverts_fusion: bool = False


def _mask_hidden(head: HeadState) -> AuxVector:
    return _float64(head, "mask_hidden").reshape(-1)


def _zeros(head: HeadState) -> AuxVector:
    return np.zeros(head.config.sizes.aux_dim)  # norms and fc, which have no biases, leave them


def _unfused(head: HeadState) -> AuxVector:
    return unfuse(head, _float64(head, "placeholder.fused"))


def _first_of_table(head: HeadState) -> AuxVector:
    return _float64(head, "placeholder.table")[0]


def _unfused_sum(head: HeadState) -> AuxVector:
    return unfuse(head, fuse(head, _mask_hidden(head)) + _float64(head, "placeholder.depth")[0])


def _first_of_low_rank(head: HeadState) -> AuxVector:
    codes = _float64(head, "placeholder.codes")
    return _mask_hidden(head) + codes[0] @ _float64(head, "placeholder.directions")


HIDDEN_EXPORTS = {
    "shared": HiddenExport(_mask_hidden),
    "shared_fused": HiddenExport(
        _unfused, "aux hidden states that fc maps to its vector", inverts_fusion=True
    ),
    "mean_feature": HiddenExport(_mask_hidden),
    "frozen_random": HiddenExport(_mask_hidden),
    "zero": HiddenExport(_zeros, "zeros in the place of the aux hidden states"),
    "per_depth": HiddenExport(
        _first_of_table, "its only depth's vector", DIFFERS_BY_DEPTH, with_one_depth=True
    ),
    "shared_depth": HiddenExport(
        _unfused_sum,
        "aux hidden states that fc maps to the sum",
        DIFFERS_BY_DEPTH,
        with_one_depth=True,
        inverts_fusion=True,
    ),
    "low_rank": HiddenExport(
        _first_of_low_rank, "its only depth's vector", DIFFERS_BY_DEPTH, with_one_depth=True
    ),
    "last_feature": HiddenExport(None, refusal=DEPENDS_ON_TEXT),
    "gated": HiddenExport(None, refusal=DEPENDS_ON_TEXT),
}
# Of the token side: why a design cannot be written, or None. All of them but "mask" have a vector
# that goes into the mask token's row of the embedding.
TOKEN_EXPORTS: dict[str, str | None] = {
    "mask": None,
    "frozen": None,
    "zero": None,
    "mean": None,
    "last_token": DEPENDS_ON_TEXT,
}


# ---------------------------------------------------------------- what becomes of a head


def export_status(config: HeadConfig) -> str:
    """What becomes of a head's placeholders in a folder for vLLM, in words.

    `to_vllm_placeholders` does what is said here, unless the vector of a head turns out to be one
    that its fusion cannot reach.

    Returns:
      "as it is", "rewritten: ..." or "refused: ...".
    """
    if not config.parallel:
        return "as it is"
    if reason := _refusal(config):
        return f"refused: {reason}"
    changes = []
    if description := HIDDEN_EXPORTS[config.placeholder_hidden].description:
        changes.append(description)
    if config.placeholder_token != "mask":
        changes.append("its vector in the mask token's row")
    return f"rewritten: {', '.join(changes)}" if changes else "as it is"


def _refusal(config: HeadConfig) -> str | None:
    """Why vLLM cannot express the head's design; None where it can."""
    if config.placeholder_attention != PAPER_DESIGN["placeholder_attention"]:
        return OTHER_ATTENTION
    if config.placeholder_context != PAPER_DESIGN["placeholder_context"]:
        return OTHER_CONTEXT
    hidden = HIDDEN_EXPORTS.get(config.placeholder_hidden)
    if hidden is None or config.placeholder_token not in TOKEN_EXPORTS:
        return UNKNOWN
    has_one_depth = hidden.with_one_depth and config.num_depths == 2
    is_expressible = hidden.refusal is None or has_one_depth
    if not is_expressible:
        return hidden.refusal
    if hidden.inverts_fusion and config.norm_before_fc and config.fc_norm:
        return TWO_NORMS
    return TOKEN_EXPORTS[config.placeholder_token]


def to_vllm_placeholders(head: HeadState) -> HeadState:
    """The same head with the paper's placeholders: its drafts are equal, up to rounding.

    Raises:
      InputError: vLLM cannot express its design, `fc` does not reach its vector, or it has no
        embedding of its own for the token's vector.
    """
    cfg = head.config
    design = {name: getattr(cfg, name) for name in PAPER_DESIGN}
    if not cfg.parallel or design == PAPER_DESIGN:
        return head
    if reason := _refusal(cfg):
        fields = ATTENTION if reason in (OTHER_ATTENTION, OTHER_CONTEXT) else ROWS
        got = ", ".join(design[name] for name in fields)
        next_step = UNKNOWN_NEXT_STEP if reason == UNKNOWN else UNREACHED_NEXT_STEP
        raise InputError(head.source, reason, got, next_step)
    if cfg.placeholder_token != "mask" and head.shares_embedding:
        raise InputError(
            head.source,
            rule="its token's vector goes into the mask token's row, so the head needs an "
            "embedding of its own",
            got="the target's",
            next_step="export it with its embedding",
        )
    vector = HIDDEN_EXPORTS[cfg.placeholder_hidden].vector
    assert vector is not None  # a design without one is refused
    tensors = {name: t for name, t in head.tensors.items() if not name.startswith("placeholder.")}
    tensors["mask_hidden"] = vector(head).astype(head.tensors["fc.weight"].dtype)
    if cfg.placeholder_token != "mask":
        embedding = head.tensors[param_mapping.EMBEDDING]
        tensors[param_mapping.EMBEDDING] = weights.LazyTensor(
            embedding.shape, embedding.dtype, functools.partial(_embedding_with_token, head)
        )
    return dataclasses.replace(
        head, tensors=tensors, config=dataclasses.replace(cfg, **PAPER_DESIGN)
    )


def _embedding_with_token(head: HeadState) -> Shaped[np.ndarray, "V D"]:
    """The embedding whose mask token's row is the vector of the head's token side."""
    table = np.array(head.tensors[param_mapping.EMBEDDING])
    vector = head.tensors.get("placeholder.token")  # the design "zero" has none
    table[head.config.mask_token] = 0 if vector is None else np.asarray(vector)
    return table


# ---------------------------------------------------------------- the fusion and its inverse


def _float64(head: HeadState, name: str) -> Float[np.ndarray, "..."]:
    return np.asarray(head.tensors[name]).astype(np.float64)


def _norm_scales(head: HeadState) -> list[np.ndarray]:
    """Scales of the norms before fc, each over its part of the aux hidden states; [] without."""
    cfg = head.config
    if cfg.norm_before_fc:
        return [_float64(head, "input_norm.weight")]
    if cfg.fc_norm:
        count = len(cfg.aux_hidden_state_layers)
        return [_float64(head, f"fc_norm.{i}.weight") for i in range(count)]
    return []


def fuse(head: HeadState, aux_hidden_states: AuxVector) -> Float[np.ndarray, " D"]:
    """`draft.fusion.Fusion` in float64, of one vector."""
    scales = _norm_scales(head)
    if scales:
        parts = np.split(aux_hidden_states, len(scales))
        normalized = [
            scale * part / np.sqrt(np.mean(part**2) + head.config.norm_eps)
            for scale, part in zip(scales, parts, strict=True)
        ]
        aux_hidden_states = np.concatenate(normalized)
    return _float64(head, "fc.weight") @ aux_hidden_states


def unfuse(head: HeadState, fused: Float[np.ndarray, " D"]) -> AuxVector:
    """Aux hidden states that the head fuses to a given vector.

    Without norms this is the shortest solution x of fc x = fused. A norm keeps only the direction
    of x, so that fc has to reach `fused` from a vector of one particular length, that of the
    norm's scales: the shortest solution, plus as much of fc's null space as gives it that length.

    Raises:
      InputError: fc does not reach the vector, or only from longer vectors than the norms give.
    """
    matrix = _float64(head, "fc.weight")
    scales = _norm_scales(head)
    if scales:
        solution = _solve_behind_norms(head, matrix, fused, scales)
    else:
        solution = np.linalg.lstsq(matrix, fused, rcond=None)[0]
    error = np.abs(fuse(head, solution) - fused).max() / max(np.abs(fused).max(), 1e-30)
    if not error < 1e-6:
        raise InputError(
            head.source,
            rule="fc must reach the placeholder's vector",
            got=f"off by {error:.1e} of it",
            next_step=UNREACHED_NEXT_STEP,
        )
    return solution


def _solve_behind_norms(
    head: HeadState,
    matrix: Float[np.ndarray, "D A"],
    fused: Float[np.ndarray, " D"],
    scales: list[np.ndarray],
) -> AuxVector:
    """x with matrix @ (scale * x) = fused and a root mean square of 1 in the part of each norm.

    The result is then made so long that the norms' epsilon hardly matters: they undo the length.
    """
    scaled = matrix * np.concatenate(scales)
    x = np.linalg.lstsq(scaled, fused, rcond=None)[0]
    # The rows of V^T beyond the rank span the null space, which fc does not see.
    null_space = np.linalg.svd(scaled)[2][np.linalg.matrix_rank(scaled) :]
    edges = np.cumsum([len(scale) for scale in scales])[:-1]

    def missing_square(v: np.ndarray) -> np.ndarray:
        """What each part's sum of squares lacks to a root mean square of 1."""
        return np.array([len(part) - part @ part for part in np.split(v, edges)])

    if not len(null_space) or len(scales) == 1 and missing_square(x)[0] < 0:
        got = "one solution, of another length"
        if len(null_space):
            got = f"a shortest of {np.sqrt(x @ x / len(x)):.3g} of that length"
        raise InputError(
            head.source,
            rule="the norm before fc leaves vectors of one length, and fc must reach the "
            "placeholder's vector from one of them",
            got=got,
            next_step=UNREACHED_NEXT_STEP,
        )
    if len(scales) == 1:  # one equation: any direction of the null space, as far as it takes
        x = x + null_space[0] * np.sqrt(missing_square(x)[0])
    else:
        x = _newton(x, null_space, missing_square, edges)
    return 100 * x  # and no longer: float16 ends at 65,504


def _newton(
    x: AuxVector,
    null_space: Float[np.ndarray, "Z A"],
    missing_square: Callable[[np.ndarray], np.ndarray],
    edges: np.ndarray,
) -> AuxVector:
    """x + z @ null_space without missing squares: one equation for each aux hidden state.

    Newton's method starts from a random z, because at z = 0 a part may have a zero derivative.
    """
    start_size = np.sqrt(np.maximum(missing_square(x), 1).sum() / len(null_space))
    z = np.random.default_rng(0).normal(size=len(null_space)) * start_size
    directions = np.split(null_space, edges, axis=1)
    for _ in range(100):
        v = x + z @ null_space
        parts = np.split(v, edges)
        # derivative of the parts' sums of squares, which is minus that of what is missing
        jacobian = np.stack([2 * u @ p for u, p in zip(directions, parts, strict=True)])
        z = z + np.linalg.lstsq(jacobian, missing_square(v), rcond=None)[0]
    return x + z @ null_space
