"""Placeholders: what the head reads where a token and its hidden states do not exist yet.

P-EAGLE drafts K - 1 of its K tokens from placeholders. A placeholder row has two sides, the fused
hidden state [D] and the token's embedding [D]. A design fills one of the sides, and a head has one
design for each (`placeholder:` of a recipe). Decoding and training both build their rows here.

To add a design:
1. Write its functions below; the design nearest to yours is a start. The one that fills a row is
   needed. One for the shapes of its parameters and one for their initial values are needed where
   it has parameters.
2. Give it an entry in `HIDDEN_DESIGNS` or `TOKEN_DESIGNS`. From then on recipes can name it. With
   `by_depth_alone=True`, if that is true of it, it trains a little faster.
3. Say in peagle_jax/checkpoints/export_placeholders.py (`HIDDEN_EXPORTS` or `TOKEN_EXPORTS`) and
   in docs/checkpoints.md whether vLLM can express it. Until then its export is refused.
4. Describe it a second time, in NumPy, in tests/designs.py: tests of training, decoding and export
   run over all designs that are listed there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.draft.placeholder_attention import ATTENTION_DESIGNS, CONTEXT_DESIGNS

RANK = 4  # of `low_rank`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlaceholderRow:
    """One placeholder row to fill, or several.

    Attributes:
      depth: 1 or more; how far it is behind the last real row, its anchor.
      token: embedding of the anchor's token.
      fused: fused hidden state of the anchor.
    """

    depth: Int[Array, "*rows"]
    token: Float[Array, "*rows D"]
    fused: Float[Array, "*rows D"]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the parameters of a design are sized by.

    Attributes:
      aux_dim: A, the width of the concatenated aux hidden states.
      dim: D, the head's width.
      num_placeholders: K - 1, the depths of placeholders. Drafting more tokens than the head was
        trained for repeats the last depth.
    """

    aux_dim: int
    dim: int
    num_placeholders: int


@dataclasses.dataclass(frozen=True)
class InitInputs:
    """What the parameters of a design may begin as.

    Attributes:
      sizes: of the parameters.
      aux_hidden_states: the mean over some text, or small random numbers.
      fuse: the head's fusion, [.., A] -> [.., D].
      mask_embedding: the mask token's row of the embedding.
      mean_embedding: the mean over all tokens.
      key: for random numbers.
    """

    sizes: Sizes
    aux_hidden_states: Float[Array, " A"]
    fuse: Callable[[Float[Array, "*rows A"]], Float[Array, "*rows D"]]
    mask_embedding: Float[Array, " D"]
    mean_embedding: Float[Array, " D"]
    key: Array


@runtime_checkable
class PlaceholderHead(Protocol):
    """What a design may read of a `DraftHead`.

    `mask_hidden` [A] and the parameters in `placeholder` are NNX variables: `[...]` reads them.
    """

    cfg: Any
    embed: Any
    mask_hidden: Any
    placeholder: Any

    def fuse(self, aux_hidden_states: Float[Array, "*rows A"]) -> Float[Array, "*rows D"]: ...


Fill = Callable[[PlaceholderHead, PlaceholderRow], Float[Array, " D"]]
DesignParams = dict[str, Float[Array, "..."]]
Shapes = dict[str, tuple[int, ...]]


def no_shapes(sizes: Sizes) -> Shapes:
    """Of a design without parameters of its own."""
    return {}


def no_params(inputs: InitInputs) -> DesignParams:
    """Of a design without parameters to initialize."""
    return {}


@dataclasses.dataclass(frozen=True)
class Design:
    """One side of a placeholder.

    Attributes:
      about: a line for people.
      fill: (head, one placeholder) -> what stands there [D].
      shapes: the design's own parameters by name. They are in `head.placeholder`.
      init: what those parameters begin as, and `mask_hidden` if the design reads it.
      mask_hidden: whether the design reads the head's `mask_hidden` [A].
      by_depth_alone: whether it reads nothing of its anchor, neither `token` nor `fused`, but their
        shape. All rows of a depth are the same then, and training multiplies them once.
    """

    about: str
    fill: Fill
    shapes: Callable[[Sizes], Shapes] = no_shapes
    init: Callable[[InitInputs], DesignParams] = no_params
    mask_hidden: bool = False
    by_depth_alone: bool = False


def _at_depth(table: Float[Array, "P X"], row: PlaceholderRow) -> Float[Array, " X"]:
    """The row of a placeholder's depth; beyond the last row, the last one."""
    return table[jnp.clip(row.depth - 1, 0, table.shape[0] - 1)]


# ---------------------------------------------------------------- the hidden side


def fill_shared(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """One vector in the place of the aux hidden states, fused as real ones are."""
    return head.fuse(head.mask_hidden[...])


def init_shared(inputs: InitInputs) -> DesignParams:
    """It begins as ordinary aux hidden states."""
    return {"mask_hidden": inputs.aux_hidden_states}


def fill_shared_fused(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """One vector behind the fusion."""
    return head.placeholder["fused"][...]


def shapes_shared_fused(sizes: Sizes) -> Shapes:
    """fused [D]"""
    return {"fused": (sizes.dim,)}


def init_shared_fused(inputs: InitInputs) -> DesignParams:
    """It begins as the fusion of ordinary aux hidden states."""
    return {"fused": inputs.fuse(inputs.aux_hidden_states)}


def fill_per_depth(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """A vector for each depth in the place of the aux hidden states."""
    return _at_depth(head.fuse(head.placeholder["table"][...]), row)


def shapes_per_depth(sizes: Sizes) -> Shapes:
    """table [K - 1, A]"""
    return {"table": (sizes.num_placeholders, sizes.aux_dim)}


def init_per_depth(inputs: InitInputs) -> DesignParams:
    """All depths begin as ordinary aux hidden states."""
    return {"table": jnp.tile(inputs.aux_hidden_states, (inputs.sizes.num_placeholders, 1))}


def fill_shared_depth(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """The shared vector's fusion, plus an embedding of the depth."""
    return fill_shared(head, row) + _at_depth(head.placeholder["depth"][...], row)


def shapes_shared_depth(sizes: Sizes) -> Shapes:
    """depth [K - 1, D]"""
    return {"depth": (sizes.num_placeholders, sizes.dim)}


def init_shared_depth(inputs: InitInputs) -> DesignParams:
    """It begins as the shared vector alone."""
    shape = (inputs.sizes.num_placeholders, inputs.sizes.dim)
    return {"mask_hidden": inputs.aux_hidden_states, "depth": jnp.zeros(shape)}


def fill_low_rank(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """The shared vector, plus a mixture of RANK directions that depends on the depth."""
    mixtures = head.placeholder["codes"][...] @ head.placeholder["directions"][...]
    return _at_depth(head.fuse(head.mask_hidden[...][None] + mixtures), row)


def shapes_low_rank(sizes: Sizes) -> Shapes:
    """codes [K - 1, RANK], directions [RANK, A]"""
    return {"codes": (sizes.num_placeholders, RANK), "directions": (RANK, sizes.aux_dim)}


def init_low_rank(inputs: InitInputs) -> DesignParams:
    """It begins as the shared vector alone, with random directions that are not used yet."""
    sizes, mean = inputs.sizes, inputs.aux_hidden_states
    random = jax.random.normal(inputs.key, (RANK, sizes.aux_dim))
    return {
        "mask_hidden": mean,
        "codes": jnp.zeros((sizes.num_placeholders, RANK)),
        "directions": random * jnp.sqrt(jnp.mean(mean**2)),
    }


def fill_last_feature(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """The anchor's fused hidden state, repeated."""
    return row.fused


def fill_gated(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """The anchor's fused hidden state and the shared vector, mixed channel by channel."""
    share = jax.nn.sigmoid(head.placeholder["gate"][...])
    return share * row.fused + (1 - share) * fill_shared(head, row)


def shapes_gated(sizes: Sizes) -> Shapes:
    """gate [D]"""
    return {"gate": (sizes.dim,)}


def init_gated(inputs: InitInputs) -> DesignParams:
    """It begins with equal shares."""
    return {"mask_hidden": inputs.aux_hidden_states, "gate": jnp.zeros(inputs.sizes.dim)}


def fill_frozen(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """The shared vector without a gradient.

    Vectors are not decayed either (train/trainer.py), so that it stays the same to the bit.
    """
    return head.fuse(jax.lax.stop_gradient(head.mask_hidden[...]))


def init_frozen_random(inputs: InitInputs) -> DesignParams:
    """A random vector of the size of ordinary aux hidden states."""
    mean = inputs.aux_hidden_states
    random = jax.random.normal(inputs.key, mean.shape, mean.dtype)
    return {"mask_hidden": random * jnp.sqrt(jnp.mean(mean**2))}


def fill_zero(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """Zeros behind the fusion."""
    return jnp.zeros_like(row.fused)


HIDDEN_DESIGNS: dict[str, Design] = {
    "shared": Design(
        "one learned vector in the place of the aux hidden states (the paper's and vLLM's)",
        fill_shared,
        init=init_shared,
        mask_hidden=True,
        by_depth_alone=True,
    ),
    "shared_fused": Design(
        "one learned vector behind the fusion",
        fill_shared_fused,
        shapes_shared_fused,
        init_shared_fused,
        by_depth_alone=True,
    ),
    "per_depth": Design(
        "a learned vector in the place of the aux hidden states for every depth",
        fill_per_depth,
        shapes_per_depth,
        init_per_depth,
        by_depth_alone=True,
    ),
    "shared_depth": Design(
        "the shared vector, and a learned embedding of the depth behind the fusion",
        fill_shared_depth,
        shapes_shared_depth,
        init_shared_depth,
        mask_hidden=True,
        by_depth_alone=True,
    ),
    "low_rank": Design(
        f"the shared vector, and for every depth a learned mixture of {RANK} learned directions",
        fill_low_rank,
        shapes_low_rank,
        init_low_rank,
        mask_hidden=True,
        by_depth_alone=True,
    ),
    "last_feature": Design("the last real fused hidden state, repeated", fill_last_feature),
    "gated": Design(
        "the last real fused hidden state, and the shared vector, mixed by learned shares",
        fill_gated,
        shapes_gated,
        init_gated,
        mask_hidden=True,
    ),
    "mean_feature": Design(
        "the mean of the target's aux hidden states over text, not learned",
        fill_frozen,
        init=init_shared,
        mask_hidden=True,
        by_depth_alone=True,
    ),
    "zero": Design("nothing: zeros behind the fusion", fill_zero, by_depth_alone=True),
    "frozen_random": Design(
        "a random vector of the size of the mean aux hidden states, not learned",
        fill_frozen,
        init=init_frozen_random,
        mask_hidden=True,
        by_depth_alone=True,
    ),
}

# Of these the hidden side is not learned: it is the mean of aux hidden states, or has its size.
FIXED_DESIGNS = ("mean_feature", "frozen_random")


# ---------------------------------------------------------------- the token side


def fill_mask_token(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """The mask token's row of the embedding."""
    return head.embed(jnp.full_like(row.depth, head.cfg.mask_token))


def fill_frozen_token(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """A vector without a gradient."""
    return jax.lax.stop_gradient(head.placeholder["token"][...])


def shapes_frozen_token(sizes: Sizes) -> Shapes:
    """token [D]"""
    return {"token": (sizes.dim,)}


def init_frozen_mask_token(inputs: InitInputs) -> DesignParams:
    """The mask token's row, as the target has it."""
    return {"token": inputs.mask_embedding}


def init_frozen_mean_token(inputs: InitInputs) -> DesignParams:
    """The mean of all tokens' embeddings."""
    return {"token": inputs.mean_embedding}


def fill_last_token(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """The embedding of the anchor's token, repeated."""
    return row.token


def fill_zero_token(head: PlaceholderHead, row: PlaceholderRow) -> Float[Array, " D"]:
    """Zeros in the place of the embedding."""
    return jnp.zeros_like(row.token)


TOKEN_DESIGNS: dict[str, Design] = {
    "mask": Design(
        "the mask token's row of the head's embedding, learned with it (the paper's)",
        fill_mask_token,
        by_depth_alone=True,
    ),
    "frozen": Design(
        "that row as the target has it, not learned",
        fill_frozen_token,
        shapes_frozen_token,
        init_frozen_mask_token,
        by_depth_alone=True,
    ),
    "last_token": Design("the last real token, repeated", fill_last_token),
    "zero": Design("nothing: zeros", fill_zero_token, by_depth_alone=True),
    "mean": Design(
        "the mean of the target's embeddings, not learned",
        fill_frozen_token,
        shapes_frozen_token,
        init_frozen_mean_token,
        by_depth_alone=True,
    ),
}


# ---------------------------------------------------------------- the whole design

PAPER_DESIGN = {
    "placeholder_hidden": "shared",
    "placeholder_token": "mask",
    "placeholder_attention": "causal",
    "placeholder_context": "layers",
}
# The field of a `HeadConfig` -> what it may be.
DESIGNS: dict[str, Any] = {
    "placeholder_hidden": HIDDEN_DESIGNS,
    "placeholder_token": TOKEN_DESIGNS,
    "placeholder_attention": ATTENTION_DESIGNS,
    "placeholder_context": CONTEXT_DESIGNS,
}


# ---------------------------------------------------------------- rows


def own_shapes(cfg: Any, sizes: Sizes) -> Shapes:
    """The parameters in `head.placeholder`, by name, of the two designs of a `HeadConfig`."""
    hidden = HIDDEN_DESIGNS[cfg.placeholder_hidden]
    token = TOKEN_DESIGNS[cfg.placeholder_token]
    return hidden.shapes(sizes) | token.shapes(sizes)


def rows(
    head: PlaceholderHead, placeholders: PlaceholderRow
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """The placeholder rows of a head.

    Args:
      head: a `DraftHead`.
      placeholders: which ones, in any shape.

    Returns:
      Embeddings and fused hidden states.
    """
    fill_hidden = HIDDEN_DESIGNS[head.cfg.placeholder_hidden].fill
    fill_token = TOKEN_DESIGNS[head.cfg.placeholder_token].fill

    def fill(row: PlaceholderRow):
        return fill_token(head, row), fill_hidden(head, row).astype(row.fused.dtype)

    for _ in placeholders.depth.shape:
        fill = jax.vmap(fill)
    return fill(placeholders)
