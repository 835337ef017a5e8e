"""P-EAGLE's loss on one batch (arXiv:2602.01469).

The next-token rows (depth 0) and the placeholder rows that COD sampling selected (depth 1 and more)
are packed behind each other and go through the head in one forward.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from peagle_jax.draft import placeholders
from peagle_jax.draft.head import DraftHead
from peagle_jax.draft.placeholders import PlaceholderRow
from peagle_jax.draft.repeated_rows import RepeatedRows, are_alike_by_depth, rows_by_depth
from peagle_jax.train.attention import PackedCausal, Partition, PrefixChain
from peagle_jax.train.compute_dtype import in_compute_dtype, rows_in_compute_dtype
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.loss import DepthCounts
from peagle_jax.train.recipe_sections import ComputeConfig
from peagle_jax.train.settings import check
from peagle_jax.train.teacher import Teacher, teacher_columns
from peagle_jax.types import CodSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureNoise:
    """Noise on the aux hidden states in training.

    When decoding, a head reads its own outputs beside the target's. A head that has only been
    trained on exact values may rely on them too much.
    """

    # Bound of uniform noise of either sign on every aux hidden state, in its own units
    # (speculators' `noise_std`); 0: none.
    noise: float = 0.0
    # Share of depth-0 rows whose fused hidden state becomes that of a placeholder of depth 1 behind
    # the row before.
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check(self.noise >= 0, "noise", "must be 0 or more", self.noise, "use 0.0 for none")
        in_range = 0 <= self.dropout < 1
        check(in_range, "dropout", "must lie in 0..1, below 1", self.dropout, "use 0.0 for none")


def elements_in_loss(
    loss_mask: Bool[Array, "B n"], cod: CodSample | None, num_depths: int
) -> Bool[Array, "B P"]:
    """Which elements have a loss: of depth 0, and of `cod` behind them if there are more depths."""
    if num_depths == 1:
        return loss_mask
    if cod is None:
        raise ValueError("more than one depth needs a COD sample")
    positions = jnp.asarray(cod.anchor) + jnp.asarray(cod.depth)
    of_cod = jnp.take_along_axis(loss_mask, positions, axis=1) & cod.real
    return jnp.concatenate([loss_mask, of_cod], axis=1)


def element_weights(
    loss_mask: Bool[Array, "B n"],
    cod: CodSample | None,
    num_depths: int,
    depth_weights: Sequence[float] | None = None,
) -> Float[Array, "B P"]:
    """The weight of each element in the loss: 0 outside of it, otherwise that of its depth.

    Args:
      depth_weights: of depth 0, 1, .., at least `num_depths` of them; None: 1 for all.
    """
    in_loss = elements_in_loss(loss_mask, cod, num_depths).astype(jnp.float32)
    if depth_weights is None:
        return in_loss
    of_depth = jnp.array(depth_weights[:num_depths], jnp.float32)
    depth = jnp.zeros(loss_mask.shape, jnp.int32)
    if num_depths > 1 and cod is not None:
        depth = jnp.concatenate([depth, jnp.asarray(cod.depth)], axis=1)
    return in_loss * of_depth[depth]


def sum_of_weights(weights: Float[Array, "*shape"]) -> Float[Array, ""]:
    """What a weighted sum is divided by; 1 where nothing has a weight."""
    total = weights.sum()
    return jnp.where(total > 0, total, 1.0)


def peagle_loss(
    head: DraftHead,
    rows: TrainingRows,
    cod: CodSample | None,
    num_depths: int,
    lm_head_weight: Float[Array, "E V"],
    logit_cap: float | None = None,
    loss: str = "forward_kl",
    feature_noise: FeatureNoise | None = None,
    keys: Key[Array, " B"] | None = None,
    denominator: Float[Array, ""] | None = None,
    compute: ComputeConfig | None = None,
    partitions: int = 1,
    depth_weights: Sequence[float] | None = None,
    true_tokens: float = 0.0,
) -> tuple[Float[Array, ""], DepthCounts]:
    """Weighted mean of the losses of the elements of all depths, with one denominator.

    Args:
      head: the draft head.
      rows: shifted rows; all n of them are elements of depth 0.
      cod: the elements of depth 1 and more; not read if `num_depths` is 1.
      num_depths: K.
      lm_head_weight: the target's output matrix over its whole vocabulary.
      logit_cap: soft cap of the target's logits (Gemma).
      loss: a name of `loss.LOSSES`.
      feature_noise: noise on the aux hidden states; None: none.
      keys: PRNG keys for that noise and for `true_tokens`, one for each row.
      denominator: what the sum is divided by, where these rows are a part of a batch: the weights
        of its elements; None: theirs.
      compute: how; None: in the head's dtype, and nothing twice.
      partitions: S; `cod` then has S stretches of as many elements, and no chain in two of them.
        They are computed one after another, and their gradients add up. They share the depth-0
        rows, which are computed once: no placeholder is attended to by another chain.
      depth_weights: of each depth's elements in the mean; None: 1 for all.
      true_tokens: the share of anchors whose placeholders read the text's own tokens, as if these
        had been drafted already, in the place of what the head's design puts there.

    Returns:
      The loss, and {"correct", "total"} by depth [K]: how often the head's argmax is the target's,
      and of how many elements. With a confidence head the loss has its cross-entropy, which is
      "confidence_loss" by depth; no other parameter has a gradient of it. Depths whose weight is 0
      are not counted.
    """
    if num_depths > 1 and cod is None:
        raise ValueError("more than one depth needs a COD sample")
    B, n = rows.tokens.shape
    here = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
    masters, head = head, in_compute_dtype(head, compute)
    rows = rows_in_compute_dtype(rows, compute)
    recompute = compute is not None and compute.recompute == "layers"
    weight = element_weights(rows.loss_mask, cod, num_depths, depth_weights)
    if denominator is None:
        denominator = sum_of_weights(weight)
    embeddings = head.embed(rows.tokens)
    fused = _noisy_fused(head, rows, feature_noise, keys)
    reads_text = _drawn_anchors(true_tokens, keys, n)
    teacher = Teacher(
        teacher_columns(head, lm_head_weight),
        rows.teacher_hidden,
        rows.tokens,
        num_depths,
        logit_cap,
        loss,
    )
    zeros = jnp.zeros((B, n), jnp.int32)
    if cod is None or num_depths == 1 or partitions > 1:
        attend = PackedCausal(rows.segment_ids)
        hidden, keys_and_values = head(embeddings, fused, here, attend, None, recompute=recompute)
        total, by_depth, states = teacher.distill(
            head, hidden, here, weight[:, :n], zeros, are_depth0=True
        )
        if cod is not None and num_depths > 1:
            of_rows = embeddings, fused, keys_and_values, rows.segment_ids, reads_text
            depth0 = Depth0(*of_rows, states)
            of_cod = _partitioned(
                masters, cod, weight[:, n:], depth0, teacher, partitions, recompute, compute
            )
            total, by_depth = jax.tree.map(jnp.add, (total, by_depth), of_cod)
        return total / denominator, _unweighted(by_depth, depth_weights)
    attended = embeddings, fused, rows.segment_ids
    hidden, positions = packed_hidden(head, *attended, cod, num_depths, recompute, reads_text)
    depth = jnp.concatenate([zeros, jnp.asarray(cod.depth)], axis=1)
    total, by_depth, _ = teacher.distill(head, hidden, positions, weight, depth)
    return total / denominator, _unweighted(by_depth, depth_weights)


def _unweighted(counts: DepthCounts, depth_weights: Sequence[float] | None) -> DepthCounts:
    """Counts of elements, from sums of their weights."""
    if depth_weights is None:
        return counts
    weights = jnp.array(depth_weights[: len(counts["total"])], jnp.float32)
    return {name: x / jnp.where(weights > 0, weights, 1.0) for name, x in counts.items()}


def packed_hidden(
    head: DraftHead,
    embeddings: Float[Array, "B n D"],
    fused: Float[Array, "B n D"],
    segment_ids: Int[Array, "B n"],
    cod: CodSample,
    num_depths: int,
    recompute: bool = False,
    reads_text: Bool[Array, "B n"] | None = None,
) -> tuple[Float[Array, "B P D"], Int[Array, "B P"]]:
    """The head's residual stream of the depth-0 rows and of the elements behind them.

    Args:
      head: the draft head.
      embeddings: of the tokens of the depth-0 rows.
      fused: their fused hidden states.
      segment_ids: their documents.
      cod: the elements of depth 1 and more, P - n of them.
      num_depths: K.
      recompute: as `DraftHead` takes it.
      reads_text: the anchors whose placeholders read the text's own tokens; None: no anchor's.

    Returns:
      The residual stream, and the positions of the rows.
    """
    B, n = segment_ids.shape
    mask_embeddings, mask_fused, which = _placeholder_rows(
        head, cod, num_depths, embeddings, fused, reads_text
    )
    embeddings = jnp.concatenate([embeddings, mask_embeddings], axis=1)
    fused = jnp.concatenate([fused, mask_fused], axis=1)
    anchor, depth = jnp.asarray(cod.anchor), jnp.asarray(cod.depth)
    here = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
    positions = jnp.concatenate([here, anchor + depth], axis=1)
    attend = PrefixChain(anchor, depth, segment_ids, num_depths, head.cfg.placeholder_attention)
    is_placeholder = jnp.broadcast_to(jnp.arange(positions.shape[1]) >= n, positions.shape)
    hidden, _ = head(
        embeddings,
        fused,
        positions,
        attend,
        None,
        is_placeholder=is_placeholder,
        recompute=recompute,
        repeated=None if which is None else RepeatedRows(which, n),
    )
    return hidden, positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Depth0:
    """What placeholder rows read of the depth-0 rows.

    Attributes:
      embeddings: of their tokens.
      fused: their fused hidden states.
      keys_and_values: layer -> the keys and the values of all rows.
      segment_ids: their documents.
      reads_text: as `packed_hidden` takes it.
      states: of a Markov head, after these rows; None without.
    """

    embeddings: Float[Array, "B n D"]
    fused: Float[Array, "B n D"]
    keys_and_values: dict[int, tuple[Array, Array]]
    segment_ids: Int[Array, "B n"]
    reads_text: Bool[Array, "B n"] | None
    states: Float[Array, "B n S"] | None


def _partitioned(
    masters: DraftHead,
    cod: CodSample,
    weight: Float[Array, "B M"],
    depth0: Depth0,
    teacher: Teacher,
    partitions: int,
    recompute: bool,
    compute: ComputeConfig | None,
) -> tuple[Float[Array, ""], DepthCounts]:
    """Sum of the losses of the placeholder rows, partition by partition, and their counts.

    Of a partition nothing is kept for the backward pass, which computes it again.

    Args:
      masters: the head whose parameters are trained. Each partition rounds them anew, so that
        gradients are added up in the parameters' own dtype; those of `depth0` are, too.
    """
    # as a list of arrays, because the class checks the axes of its fields
    leaves, structure = jax.tree.flatten(depth0)
    dtypes = [x.dtype for x in leaves]
    summed_in_float32 = [
        x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x for x in leaves
    ]

    def split(x: Array) -> Array:
        """[B M ..] -> [S B M/S ..]."""
        return jnp.moveaxis(x.reshape(x.shape[0], partitions, -1), 1, 0)

    @jax.checkpoint
    def of_partition(leaves: list[Array], part: tuple) -> tuple:
        anchor, depth, real, weight = part
        head = in_compute_dtype(masters, compute)
        narrowed = [x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
        depth0 = jax.tree.unflatten(structure, narrowed)
        elements = CodSample(anchor, depth, real)
        inputs = depth0.embeddings, depth0.fused, depth0.reads_text
        embeddings, fused, which = _placeholder_rows(head, elements, teacher.num_depths, *inputs)
        attend = Partition(
            anchor,
            depth,
            depth0.segment_ids,
            teacher.num_depths,
            head.cfg.placeholder_attention,
        )
        positions = anchor + depth
        hidden, _ = head(
            embeddings,
            fused,
            positions,
            attend,
            depth0.keys_and_values,
            is_placeholder=jnp.ones_like(positions, bool),
            recompute=recompute,
            repeated=None if which is None else RepeatedRows(which, 0),
        )
        return teacher.distill(head, hidden, positions, weight, depth, depth0.states)[:2]

    def add(total: tuple, part: tuple) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, total, of_partition(summed_in_float32, part)), None

    elements = (cod.anchor, cod.depth, cod.real, weight)
    parts = tuple(split(jnp.asarray(x)) for x in elements)
    zeros = jnp.zeros(teacher.num_depths)
    counts = {"correct": zeros, "total": zeros}
    if masters.confidence is not None:
        counts["confidence_loss"] = zeros
    nothing = jnp.zeros(()), counts
    summed, _ = jax.lax.scan(add, nothing, parts)
    return summed


def _placeholder_rows(
    head: DraftHead,
    cod: CodSample,
    num_depths: int,
    embeddings: Float[Array, "B n D"],
    fused: Float[Array, "B n D"],
    reads_text: Bool[Array, "B n"] | None = None,
) -> tuple[Float[Array, "B R D"], Float[Array, "B R D"], Int[Array, "B M"] | None]:
    """Embeddings and fused hidden states of the placeholder rows.

    Returns:
      Both, and which of their R rows each of the M elements of `cod` has; None: each its own.
    """
    # padding has depth 0, which no placeholder has; its rows do not reach the loss
    depth = jnp.maximum(cod.depth, 1)
    if reads_text is None and are_alike_by_depth(head.cfg):
        which = jnp.minimum(depth, num_depths - 1) - 1
        return *rows_by_depth(head, num_depths, embeddings, fused), which

    def at_anchor(x: Float[Array, "B n D"]) -> Float[Array, "B M D"]:
        return jnp.take_along_axis(x, cod.anchor[..., None], axis=1)

    unfilled = PlaceholderRow(depth, at_anchor(embeddings), at_anchor(fused))
    of_tokens, of_hidden = placeholders.rows(head, unfilled)
    if reads_text is not None:
        position = jnp.asarray(cod.anchor) + jnp.asarray(cod.depth)
        of_text = jnp.take_along_axis(embeddings, position[..., None], axis=1)
        is_drawn = jnp.take_along_axis(reads_text, jnp.asarray(cod.anchor), axis=1)
        of_tokens = jnp.where(is_drawn[..., None], of_text, of_tokens)
    return of_tokens, of_hidden, None


def _drawn_anchors(
    share: float, keys: Key[Array, " B"] | None, n: int
) -> Bool[Array, "B n"] | None:
    """Which anchors are drawn, each with the chance `share`; None where that is 0."""
    if not share:
        return None
    if keys is None:
        raise ValueError("true_tokens needs PRNG keys")
    return jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, 2), share, (n,)))(keys)


def _noisy_fused(
    head: DraftHead,
    rows: TrainingRows,
    feature_noise: FeatureNoise | None,
    keys: Key[Array, " B"] | None,
) -> Float[Array, "B n D"]:
    """Fused hidden states of the depth-0 rows, with noise and dropout."""
    if feature_noise is None or not (feature_noise.noise or feature_noise.dropout):
        return head.fuse(rows.aux_hidden_states)
    if keys is None:
        raise ValueError("feature noise needs PRNG keys")
    noise_keys, dropout_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    aux_hidden_states = rows.aux_hidden_states
    if feature_noise.noise:
        shape, dtype = aux_hidden_states.shape[1:], aux_hidden_states.dtype
        uniform = jax.vmap(lambda key: jax.random.uniform(key, shape, dtype, -1, 1))(noise_keys)
        aux_hidden_states += feature_noise.noise * uniform
    fused = head.fuse(aux_hidden_states)
    if feature_noise.dropout:
        # -2 is no document: the first row of a sequence begins one
        before = jnp.pad(rows.segment_ids, [(0, 0), (1, 0)], constant_values=-2)
        is_first = (before[:, 1:] != before[:, :-1])[..., None]

        def row_before(x: Float[Array, "B n D"]) -> Float[Array, "B n D"]:
            """The row before each; a document's first row has itself before it."""
            return jnp.where(is_first, x, jnp.concatenate([x[:, :1], x[:, :-1]], axis=1))

        depth = jnp.ones(rows.tokens.shape, jnp.int32)
        embeddings = head.embed(rows.tokens)
        unfilled = PlaceholderRow(depth, row_before(embeddings), row_before(fused))
        _, mask_fused = placeholders.rows(head, unfilled)
        share, shape = feature_noise.dropout, rows.tokens.shape[1:]
        is_dropped = jax.vmap(lambda key: jax.random.bernoulli(key, share, shape))(dropout_keys)
        fused = jnp.where(is_dropped[..., None], mask_fused, fused)
    return fused
