"""Placeholders: what a multi-token position sees in place of a token and a feature that do not exist yet.

A design is two small functions of one slot, one for each side: (head, slot) -> the feature [D], and -> the token's embedding [D].
`rows` vmaps them over slots. Decoding and training build their placeholder rows here, so an ablation names another function.
Whether a design can be served by vLLM, which knows only the paper's, is checkpoints/export_placeholders.py's to say.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

RANK = 4  # of `low_rank`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slot:
    """One placeholder row: its depth, 1 or more, and the last real row before it (its anchor's)."""

    depth: Int[Array, "*slots"]
    token: Float[Array, "*slots D"]  # embedding of that row's token
    fused: Float[Array, "*slots D"]  # its fused feature


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the parameters of a design are sized by."""

    aux_dim: int  # A
    dim: int  # D
    num_placeholders: int  # K - 1 placeholder rows; drafting more of them repeats the last one's


Fill = Callable[[Any, Slot], Float[Array, " D"]]
Shapes = Callable[[Sizes], dict[str, tuple[int, ...]]]
# (sizes, what a placeholder may begin as in tap space [A], fuse, the embedding of the mask token [D], the mean embedding [D], key)
Initializer = Callable[..., dict[str, Float[Array, "..."]]]


@dataclasses.dataclass(frozen=True)
class Design:
    """One side of a placeholder: how it fills a slot, and parameters of its own beside those that every head has."""

    about: str
    fill: Fill
    shapes: Shapes = lambda sizes: {}
    init: Initializer = lambda sizes, like, fuse, row, mean, key: {}
    mask_hidden: bool = False  # whether it reads the head's `mask_hidden` [A]


def _at(table: Float[Array, "P X"], slot: Slot) -> Float[Array, " X"]:
    return table[jnp.clip(slot.depth - 1, 0, table.shape[0] - 1)]


def _shared(head, slot: Slot):
    return head.fuse(head.mask_hidden[...])


def _still(head, slot: Slot):
    """Without a gradient; nor is a vector decayed (train/trainer.py), so that it stays to the bit."""
    return head.fuse(jax.lax.stop_gradient(head.mask_hidden[...]))


def _gated(head, slot: Slot):
    share = jax.nn.sigmoid(head.placeholder["gate"][...])
    return share * slot.fused + (1 - share) * _shared(head, slot)


def _low_rank(head, slot: Slot):
    table = (
        head.mask_hidden[...][None]
        + head.placeholder["codes"][...] @ head.placeholder["directions"][...]
    )
    return _at(head.fuse(table), slot)


def _random_of_that_size(sizes: Sizes, like, fuse, row, mean, key):
    return {
        "mask_hidden": jax.random.normal(key, like.shape, like.dtype) * jnp.sqrt(jnp.mean(like**2))
    }


HIDDEN_DESIGNS: dict[str, Design] = {
    "shared": Design(
        "one learned vector in tap space, fused as real taps are (the paper's and vLLM's)",
        _shared,
        mask_hidden=True,
        init=lambda sizes, like, *_: {"mask_hidden": like},
    ),
    "shared_fused": Design(
        "one learned vector behind the fusion",
        lambda head, slot: head.placeholder["fused"][...],
        lambda sizes: {"fused": (sizes.dim,)},
        lambda sizes, like, fuse, *_: {"fused": fuse(like)},
    ),
    "per_depth": Design(
        "a learned vector in tap space for every depth",
        lambda head, slot: _at(head.fuse(head.placeholder["table"][...]), slot),
        lambda sizes: {"table": (sizes.num_placeholders, sizes.aux_dim)},
        lambda sizes, like, *_: {"table": jnp.tile(like, (sizes.num_placeholders, 1))},
    ),
    "shared_depth": Design(
        "the shared vector, and a learned embedding of the depth behind the fusion",
        lambda head, slot: _shared(head, slot) + _at(head.placeholder["depth"][...], slot),
        lambda sizes: {"depth": (sizes.num_placeholders, sizes.dim)},
        lambda sizes, like, *_: {
            "mask_hidden": like,
            "depth": jnp.zeros((sizes.num_placeholders, sizes.dim)),
        },
        mask_hidden=True,
    ),
    "low_rank": Design(
        f"the shared vector, and for every depth a learned mixture of {RANK} learned directions in tap space",
        _low_rank,
        lambda sizes: {
            "codes": (sizes.num_placeholders, RANK),
            "directions": (RANK, sizes.aux_dim),
        },
        lambda sizes, like, fuse, row, mean, key: {
            "mask_hidden": like,
            "codes": jnp.zeros((sizes.num_placeholders, RANK)),
            "directions": jax.random.normal(key, (RANK, sizes.aux_dim))
            * jnp.sqrt(jnp.mean(like**2)),
        },
        mask_hidden=True,
    ),
    "last_feature": Design("the last real feature, repeated", lambda head, slot: slot.fused),
    "gated": Design(
        "the last real feature, and the shared vector, mixed by a learned share of each channel",
        _gated,
        lambda sizes: {"gate": (sizes.dim,)},
        lambda sizes, like, *_: {"mask_hidden": like, "gate": jnp.zeros(sizes.dim)},
        mask_hidden=True,
    ),
    "mean_feature": Design(
        "the mean of the target's taps over text, not learned",
        _still,
        mask_hidden=True,
        init=lambda sizes, like, *_: {"mask_hidden": like},
    ),
    "zero": Design(
        "nothing: zeros behind the fusion", lambda head, slot: jnp.zeros_like(slot.fused)
    ),
    "frozen_random": Design(
        "a random vector in tap space, not learned, of the mean tap's size",
        _still,
        mask_hidden=True,
        init=_random_of_that_size,
    ),
}


def _kept(head, slot: Slot):
    return jax.lax.stop_gradient(head.placeholder["token"][...])


TOKEN_DESIGNS: dict[str, Design] = {
    "mask": Design(
        "the mask token's row of the head's embedding, learned with it (the paper's)",
        lambda head, slot: head.embed(jnp.full_like(slot.depth, head.cfg.mask_token)),
    ),
    "frozen": Design(
        "that row as the target has it, not learned",
        _kept,
        lambda sizes: {"token": (sizes.dim,)},
        lambda sizes, like, fuse, row, mean, key: {"token": row},
    ),
    "last_token": Design("the last real token, repeated", lambda head, slot: slot.token),
    "zero": Design("nothing: zeros", lambda head, slot: jnp.zeros_like(slot.token)),
    "mean": Design(
        "the mean of the target's embeddings, not learned",
        _kept,
        lambda sizes: {"token": (sizes.dim,)},
        lambda sizes, like, fuse, row, mean, key: {"token": mean},
    ),
}
PAPER_DESIGN = {"placeholder_hidden": "shared", "placeholder_token": "mask"}


def own_shapes(cfg, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Parameters of the head's two designs under `placeholder`, by name."""
    return HIDDEN_DESIGNS[cfg.placeholder_hidden].shapes(sizes) | TOKEN_DESIGNS[
        cfg.placeholder_token
    ].shapes(sizes)


def rows(head, slots: Slot) -> tuple[Float[Array, "*slots D"], Float[Array, "*slots D"]]:
    """Embeddings and fused features of the placeholder rows in `slots`."""
    hidden, token = (
        HIDDEN_DESIGNS[head.cfg.placeholder_hidden].fill,
        TOKEN_DESIGNS[head.cfg.placeholder_token].fill,
    )

    def fill(slot):
        return (token(head, slot), hidden(head, slot).astype(slot.fused.dtype))

    for _ in slots.depth.shape:
        fill = jax.vmap(fill)
    return fill(slots)
