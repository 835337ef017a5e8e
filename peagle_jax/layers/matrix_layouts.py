"""Layouts of matrices that a CPU may multiply faster than [in, out], as `Linear` has them.

XLA's library for products on a CPU (YNNPACK) packs a matrix [K N] in every call, which takes longer
than to multiply a few rows by it.

    "tiles"        [N/32 K/P 32 P]  for a C++ kernel that packs nothing (`kernels.tiled_products`)
    "transposed"   [N K 1]          torch's [out, in], of which XLA packs whole rows. The last axis,
                                    of one, tells the layout from others.

Both cores of an AMD EPYC multiply 8 rows by 13.7 million bfloat16 numbers in 1.0 ms in tiles, and
in 3.4 as they are (LOG.md, 2026-11-29, late). Both cores of an Intel Xeon with AMX multiply 4 rows
by two matrices of 2,048 x 6,144 numbers, one after the other, in 5.5 ms transposed and in 12.8 as
they are (bfloat16; 2026-11-29, night). `decode.fastest_layout` measures which is the fastest.
"""

import re
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.kernels.tiled_products import can_be_tiled, from_tiles, to_tiles

PLAIN = "plain"
# Kernels of `Linear`, those that hold nearly all weights of a dense target or a head. Routers are
# read by kernels.
MATRICES = re.compile(r"(^|\.)(attn\.[qkvo]|mlp\.(gate|up|down)|lm_head|fc)\.kernel$")
# The embedding, whose transpose is a tied target's output matrix.
TABLE = re.compile(r"(^|\.)embed\.table$")
TIED = "tiles of the transpose"
# One matrix an expert, [E K N], which become [E N/32 K/P 32 P].
EXPERTS = re.compile(r"(^|\.)experts\.(gate_up|down)\.kernel$")
OF_EXPERTS = "tiles of each"
# What norms multiply by. C++ kernels read them in float32, to which every call of a program would
# convert those of a bfloat16 model: 110 us of 320 that a call costs (LOG.md, 2026-11-30, noon).
SCALE = re.compile(r"(^|\.|_)norm\.scale$")
OF_SCALES = "float32"
# Layout and matrix, by its identity, and what was made of it: as long as a model is there, its
# engines share one copy.
_copies: dict[tuple[str, int], tuple[weakref.ref, Array]] = {}


def to_transposed(w: Float[Array, "K N"]) -> Float[Array, "N K 1"]:
    """The same matrix as torch stores it."""
    return w.T[..., None]


def to_plain(w: Float[Array, "..."]) -> Float[Array, "K N"]:
    """The matrix as `Linear` has it, of any layout."""
    layout = layout_of_matrix(w)
    if layout == "tiles":
        return from_tiles(w)
    return w[..., 0].T if layout == "transposed" else w


LAYOUTS: dict[str, Callable[[Array], Array]] = {"tiles": to_tiles, "transposed": to_transposed}
# as one program each, which takes memory for its result alone
_programs = {layout: jax.jit(change) for layout, change in LAYOUTS.items()}
_programs[TIED] = jax.jit(lambda table: to_tiles(table.T))
_programs[OF_EXPERTS] = jax.jit(jax.vmap(to_tiles))
_programs[OF_SCALES] = jax.jit(lambda scale: scale.astype(jnp.float32))
_KINDS = {"tiles": ("tiles", TIED, OF_EXPERTS, OF_SCALES), "transposed": ("transposed",)}


def matrices(params: Any, layout: str, tied: Array | None = None) -> list[Array]:
    """What `in_layout` changes of a model, each once: matrices, and with tiles norms' scales."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return list({id(w): w for path, w in leaves if _kind_of_copy(path, w, layout, tied)}.values())


def tied_table(params: Any) -> Array | None:
    """The embedding of a target that has no other output matrix; None of one that has."""
    leaves = {_name(path): w for path, w in jax.tree_util.tree_leaves_with_path(params)}
    has_own = any(name.startswith("lm_head.") for name in leaves)
    return None if has_own else leaves.get("embed.table")


def is_copied(w: Array, layout: str) -> bool:
    """Whether `in_layout` has a copy of a matrix already."""
    kinds = [kind for kind in _KINDS.get(layout, ()) if (kind, id(w)) in _copies]
    references = (_copies[kind, id(w)][0] for kind in kinds)
    return any(reference() is w for reference in references)


def in_layout(params: Any, layout: str, *, donate: bool = False, tied: Array | None = None) -> Any:
    """Parameters of a model with its large matrices in a layout.

    `Linear` multiplies by each (`products.product_of_layout`). Matrices that are no whole number of
    tiles stay as they are. Where kernels multiply, the norms that they compute have scales in
    float32. Copies are kept as long as the matrices.

    Args:
      layout: PLAIN, or a name of LAYOUTS.
      donate: free each matrix once it is copied. One that is donated already has its copy.
      tied: the target's `tied_table`, which its head may read, too. It is transposed as it is.
    """

    def change(path: tuple, w: Any) -> Any:
        kind = _kind_of_copy(path, w, layout, tied)
        if kind is None:
            return w
        copy = _copy_of(w, kind)
        if donate and not w.is_deleted():
            jax.block_until_ready(copy)
            w.delete()
        return copy

    return params if layout == PLAIN else jax.tree_util.tree_map_with_path(change, params)


def layout_of_matrix(w: Array) -> str:
    """The layout of a kernel of `Linear`."""
    if w.ndim == 2:
        return PLAIN
    return "tiles" if w.ndim == 4 else "transposed"


def layout_of(params: Any) -> str:
    """The layout that `in_layout` gave these parameters; PLAIN where it changed none."""
    for path, w in jax.tree_util.tree_leaves_with_path(params):
        if w.ndim > 2 and MATRICES.search(_name(path)):
            return layout_of_matrix(w)
    return PLAIN


def _copy_of(w: Array, kind: str) -> Array:
    """The copy of a matrix, once for each array."""
    key = kind, id(w)
    if key not in _copies or _copies[key][0]() is not w:
        _copies[key] = weakref.ref(w, lambda _: _copies.pop(key, None)), _programs[kind](w)
    return _copies[key][1]


def _name(path: tuple) -> str:
    """A parameter's path as in `blocks.0.attn.q.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _kind_of_copy(path: tuple, w: Any, layout: str, tied: Array | None) -> str | None:
    """What `in_layout` makes of an array: a name of `_programs`, or None."""
    name = _name(path)
    if not isinstance(w, jax.Array):
        return None
    if w.ndim == 1 and SCALE.search(name):
        return OF_SCALES if layout == "tiles" and w.dtype == jnp.bfloat16 else None
    if w.ndim == 3 and EXPERTS.search(name):
        return OF_EXPERTS if layout == "tiles" and can_be_tiled(w.shape[1:], w.dtype) else None
    if w.ndim != 2:
        return None
    if w is tied and TABLE.search(name):
        return TIED if layout == "tiles" and can_be_tiled(w.shape[::-1], w.dtype) else None
    return (
        layout
        if MATRICES.search(name) and (layout != "tiles" or can_be_tiled(w.shape, w.dtype))
        else None
    )
