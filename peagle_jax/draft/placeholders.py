"""Placeholders: what a multi-token position sees in place of a token and a feature that do not exist yet.

A design is a small function of one slot, (head, depth) -> (token, fused feature); `rows` vmaps it over the slots.
Decoding and training build their placeholder rows here, so an ablation changes one function.
"""

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from peagle_jax.draft.head import DraftHead

Design = Callable[[DraftHead, Int[Array, ""]], tuple[Int[Array, ""], Float[Array, " D"]]]


def shared_hidden(head: DraftHead, depth: Int[Array, ""]) -> tuple[Int[Array, ""], Float[Array, " D"]]:
    """The paper's design: the mask token, and one learned vector in tap space, fused as real taps are.

    The same pair at every depth; the position id and attention tell the slots apart.
    """
    return jax.numpy.full_like(depth, head.cfg.mask_token), head.fuse(head.mask_hidden[...])


def rows(head: DraftHead, depths: Int[Array, " P"], design: Design = shared_hidden) -> tuple[Int[Array, " P"], Float[Array, "P D"]]:
    """Tokens and fused features of the placeholder rows at `depths` (1 .. K-1)."""
    return jax.vmap(functools.partial(design, head))(depths)
