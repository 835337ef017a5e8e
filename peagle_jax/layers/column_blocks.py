"""Matrices in blocks of columns, which one core of a CPU may multiply faster.

XLA's library for products on a CPU (YNNPACK) packs a matrix [K N] in every call, a strip of columns
after the other. Of a wide matrix a strip is K short pieces that lie N numbers apart, and where
weights come from a processor's last cache, waiting for them takes longer than multiplying a few
rows. In blocks [N/64 K 64] a strip is one piece. One core of an AMD EPYC multiplies 4 rows by 384 x
1,024 numbers in 76 us in the place of 118 (bfloat16) and in 71 us in the place of 165 (float32);
32 rows in 182 and 295 us in the place of 218 and 369 (LOG.md, 2026-11-28). On two cores, between
which XLA divides the product of a plain matrix and not that of few blocks, nothing is gained.
"""

import re
import weakref
from typing import Any

import jax
from jaxtyping import Array, Float

# Numbers of a block's row. In bfloat16 128 are as fast for 384 inputs, and slower for 1,024.
COLUMNS = 64
# Kernels of `Linear`, those that hold nearly all weights of a target or a head. Experts have other
# products, and routers are read by kernels. After attention (`attn.o`) matrices stay as they are:
# heads stand in another order there than they are computed in, and XLA puts them into order once
# for each block, 55 us of a product that takes 70.
MATRICES = re.compile(r"(^|\.)(attn\.[qkv]|mlp\.(gate|up|down)|lm_head|fc)\.kernel$")
# Matrices by their identity, and what was made of them: as long as a model is there, its engines
# share one copy in blocks.
_copies: dict[int, tuple[weakref.ref, Array]] = {}


def to_blocks(w: Float[Array, "K N"]) -> Float[Array, "blocks K columns"]:
    """The same matrix in blocks of columns; N is a multiple of COLUMNS."""
    return w.reshape(len(w), -1, COLUMNS).swapaxes(0, 1)


def matrices(params: Any) -> list[Array]:
    """The matrices of a model that `in_blocks` changes."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [w for path, w in leaves if _is_changed(path, w)]


def in_blocks(params: Any) -> Any:
    """Parameters of a model with its large matrices in blocks of columns.

    `Linear` multiplies by either form (`products.block_product`). Matrices of another number of
    columns than a multiple of COLUMNS stay as they are. Copies are kept as long as the matrices.
    """

    def change(path: tuple, w: Any) -> Any:
        return _blocks_of(w) if _is_changed(path, w) else w

    return jax.tree_util.tree_map_with_path(change, params)


def are_in_blocks(params: Any) -> bool:
    """Whether `in_blocks` made these parameters, and changed some."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return any(w.ndim == 3 and MATRICES.search(_name(path)) for path, w in leaves)


def _blocks_of(w: Array) -> Array:
    """`to_blocks`, once for each array."""
    key = id(w)
    reference, blocks = _copies.get(key, (None, None))
    if reference is None or blocks is None or reference() is not w:
        blocks = to_blocks(w)
        _copies[key] = weakref.ref(w, lambda _: _copies.pop(key, None)), blocks
    return blocks


def _name(path: tuple) -> str:
    """A parameter's path as in `blocks.0.attn.q.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_changed(path: tuple, w: Any) -> bool:
    is_array = isinstance(w, jax.Array) and w.ndim == 2
    return is_array and w.shape[1] % COLUMNS == 0 and bool(MATRICES.search(_name(path)))
