"""Layouts of matrices that a CPU may multiply faster than [in, out], as `Linear` has them.

XLA's library for products on a CPU (YNNPACK) packs a matrix [K N] in every call, a strip of columns
after the other. Of a wide matrix a strip is K short pieces that lie N numbers apart, and waiting
for them takes longer than multiplying a few rows.

    "transposed"   [N K 1]       torch's [out, in]: a strip is whole rows. The last axis, of one,
                                 tells the layout from the others.
    "blocks"       [N/64 K 64]   blocks of columns: a strip is one piece. The result has to be put
                                 into the order of columns.

Both cores of an Intel Xeon with AMX multiply 4 rows by two matrices of 2,048 x 6,144 numbers, one
after the other, in 5.5 ms transposed and in 12.8 as they are (bfloat16), and 32 rows by such a pair
in 11.3 ms and in 20.6 (float32; LOG.md, 2026-11-29, night). One core of an AMD EPYC multiplies 4
rows by 384 x 1,024 numbers in 76 us in blocks and in 118 as they are (bfloat16; 2026-11-28).
`decode.matrix_layout` measures which layout is the fastest.
"""

import re
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

# Numbers of a block's row. In bfloat16 128 are as fast for 384 inputs, and slower for 1,024.
COLUMNS = 64
PLAIN = "plain"
# Kernels of `Linear`, those that hold nearly all weights of a target or a head. Experts have other
# products, and routers are read by kernels.
MATRICES = re.compile(r"(^|\.)(attn\.[qkvo]|mlp\.(gate|up|down)|lm_head|fc)\.kernel$")
# After attention (`attn.o`) there are no blocks: heads stand in another order there than they are
# computed in, and XLA puts them into order once for each block, 55 us of a product that takes 70.
IN_BLOCKS = re.compile(r"(?<!attn\.o)\.kernel$")
# Layout and matrix, by its identity, and what was made of it: as long as a model is there, its
# engines share one copy.
_copies: dict[tuple[str, int], tuple[weakref.ref, Array]] = {}


def to_blocks(w: Float[Array, "K N"]) -> Float[Array, "blocks K columns"]:
    """The same matrix in blocks of columns; N is a multiple of COLUMNS."""
    return w.reshape(len(w), -1, COLUMNS).swapaxes(0, 1)


def to_transposed(w: Float[Array, "K N"]) -> Float[Array, "N K 1"]:
    """The same matrix as torch stores it."""
    return w.T[..., None]


def to_plain(w: Float[Array, "..."]) -> Float[Array, "K N"]:
    """The matrix as `Linear` has it, of any layout."""
    layout = layout_of_matrix(w)
    if layout == "blocks":
        return w.swapaxes(0, 1).reshape(w.shape[1], -1)
    return w[..., 0].T if layout == "transposed" else w


LAYOUTS: dict[str, Callable[[Array], Array]] = {"blocks": to_blocks, "transposed": to_transposed}
# as one program each, which takes memory for its result alone
_programs = {layout: jax.jit(change) for layout, change in LAYOUTS.items()}


def matrices(params: Any, layout: str) -> list[Array]:
    """The matrices of a model that `in_layout` changes, each once."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return list({id(w): w for path, w in leaves if _is_changed(path, w, layout)}.values())


def is_copied(w: Array, layout: str) -> bool:
    """Whether `in_layout` has a copy of a matrix already."""
    reference, _ = _copies.get((layout, id(w)), (None, None))
    return reference is not None and reference() is w


def in_layout(params: Any, layout: str, *, donate: bool = False) -> Any:
    """Parameters of a model with its large matrices in a layout.

    `Linear` multiplies by each (`products.product_of_layout`). For blocks, matrices of another
    number of columns than a multiple of COLUMNS stay as they are. Copies are kept as long as the
    matrices.

    Args:
      layout: PLAIN, or a name of LAYOUTS.
      donate: free each matrix once it is copied. One that is donated already has its copy.
    """

    def change(path: tuple, w: Any) -> Any:
        if not _is_changed(path, w, layout):
            return w
        copy = _copy_of(w, layout)
        if donate and not w.is_deleted():
            jax.block_until_ready(copy)
            w.delete()
        return copy

    return params if layout == PLAIN else jax.tree_util.tree_map_with_path(change, params)


def layout_of_matrix(w: Array) -> str:
    """The layout of a kernel of `Linear`."""
    if w.ndim == 2:
        return PLAIN
    return "transposed" if w.shape[-1] == 1 else "blocks"


def layout_of(params: Any) -> str:
    """The layout that `in_layout` gave these parameters; PLAIN where it changed none."""
    for path, w in jax.tree_util.tree_leaves_with_path(params):
        if w.ndim == 3 and MATRICES.search(_name(path)):
            return layout_of_matrix(w)
    return PLAIN


def _copy_of(w: Array, layout: str) -> Array:
    """The matrix in a layout, once for each array."""
    key = layout, id(w)
    if not is_copied(w, layout):
        _copies[key] = weakref.ref(w, lambda _: _copies.pop(key, None)), _programs[layout](w)
    return _copies[key][1]


def _name(path: tuple) -> str:
    """A parameter's path as in `blocks.0.attn.q.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_changed(path: tuple, w: Any, layout: str) -> bool:
    name = _name(path)
    if not isinstance(w, jax.Array) or w.ndim != 2 or not MATRICES.search(name):
        return False
    return layout != "blocks" or (w.shape[1] % COLUMNS == 0 and bool(IN_BLOCKS.search(name)))
