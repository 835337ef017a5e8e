"""COD (conditional drop-token) sampling: which elements of depth 1 and more are trained.

From PARD (arXiv:2504.18583), as P-EAGLE uses it (arXiv:2602.01469). Depth d trains about a share
r**d of the positions, and element (anchor, d) only where (anchor, d-1) is trained too, so that
every chain is unbroken. It runs on the host, in NumPy.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from peagle_jax.train.settings import check
from peagle_jax.types import CodSample

# Widths of a batch's elements are quarters of the capacity, so that a step is compiled for at most
# four of them, and none below this one, under which a step is hardly faster.
NUM_WIDTHS, LEAST_WIDTH = 4, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodConfig:
    """Settings of COD sampling (arXiv:2504.18583), under speculators' names.

    Attributes:
      num_depths: K, which counts depth 0, the next-token rows: K = 8 trains one real row and up to
        seven placeholder rows of an anchor. 1 or more.
      down_sample_ratio: r, above 0 and at most 1: depth d trains a share r**d of the positions ...
      down_sample_ratio_min: ... but never a smaller share than this, in 0..1.
      max_anchors: depths count as if a row had at most so many positions with a loss, 1 or more;
        None: all of them. Chains begin at random positions, so this equals drawing the anchors
        first, as speculators does.
      partitions: S, 1 or more: the elements of a row are trained in so many parts, one after
        another (the paper's sequence partitioning). Memory becomes that of one part beside depth 0,
        and gradients stay what they are.

    Raises:
      ValueError: a value is out of its range. In a recipe that is an InputError of `load_run`.
    """

    num_depths: int = 8
    down_sample_ratio: float = 0.7
    down_sample_ratio_min: float = 0.2
    max_anchors: int | None = None
    partitions: int = 1

    def __post_init__(self) -> None:
        check(self.num_depths >= 1, "num_depths", "must be 1 or more", self.num_depths, "use 8")
        ratio, least = self.down_sample_ratio, self.down_sample_ratio_min
        rule = "must be above 0 and at most 1"
        check(0 < ratio <= 1, "down_sample_ratio", rule, ratio, "use 0.7")
        check(0 <= least <= 1, "down_sample_ratio_min", "must lie in 0..1", least, "use 0.2")
        positive = self.max_anchors is None or self.max_anchors >= 1
        rule = "must be 1 or more, or null"
        check(positive, "max_anchors", rule, self.max_anchors, "use null for all")
        parts = self.partitions
        check(parts >= 1, "partitions", "must be 1 or more", parts, "use 1 for all at once")

    def max_elements(self, num_loss_tokens: int, depth: int) -> int:
        """How many elements of `depth` a sequence with so many positions in the loss may have."""
        anchors = num_loss_tokens
        if self.max_anchors is not None:
            anchors = min(anchors, self.max_anchors)
        share = max(self.down_sample_ratio**depth, self.down_sample_ratio_min)
        return int(max(anchors - depth, 0) * share)

    def capacity(self, positions: int) -> int:
        """M, the static packed width: the most elements of depth 1 and more of `positions`."""
        return sum(self.max_elements(positions, depth) for depth in range(1, self.num_depths))

    def partition_width(self, positions: int) -> int:
        """The most elements of a partition: its share of M, and the end of its last chain."""
        elements = max(self.capacity(positions), 1)
        if self.partitions == 1:
            return elements
        return -(-elements // self.partitions) + max(self.num_depths - 2, 0)


def sample_row(
    loss_mask: Bool[np.ndarray, " n"],
    segment_ids: Int[np.ndarray, " n"],
    cod: CodConfig,
    rng: np.random.Generator,
) -> tuple[Int[np.ndarray, " M"], Int[np.ndarray, " M"]]:
    """Samples the elements of one sequence.

    A position can be trained at depth d if the loss may read it, if it lies in the document of the
    position before it, and if that one is trained at depth d-1. Of these, `cod.max_elements` are
    drawn without replacement. Position 0 has no position before it, so it is trained at depth 0
    only (speculators 0.9 lets it in, with anchor -1). A chain never crosses documents.

    Args:
      loss_mask: whether the loss may read each shifted position.
      segment_ids: document of each shifted position, -1 for none.
      cod: settings.
      rng: source of the draws.

    Returns:
      (anchor, depth) of every element, ordered by (anchor, depth).
    """
    n, num_loss_tokens = len(loss_mask), int(loss_mask.sum())
    continues = np.zeros(n, bool)
    same_segment = (segment_ids[1:] == segment_ids[:-1]) & (segment_ids[1:] >= 0)
    continues[1:] = loss_mask[1:] & same_segment
    positions = np.arange(n)  # those trained at the depth before
    anchors, depths = [], []
    for depth in range(1, cod.num_depths):
        candidates = positions[positions + 1 < n] + 1
        candidates = candidates[continues[candidates]]
        size = cod.max_elements(num_loss_tokens, depth)
        if size == 0 or len(candidates) == 0:
            break
        if len(candidates) > size:
            positions = np.sort(rng.choice(candidates, size, replace=False))
        else:
            positions = candidates
        anchors.append(positions - depth)
        depths.append(np.full(len(positions), depth))
    if not anchors:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    anchor, depth_of = np.concatenate(anchors), np.concatenate(depths)
    order = np.lexsort((depth_of, anchor))
    return anchor[order], depth_of[order]


def cod_sample(
    loss_mask: Bool[np.ndarray, "B n"],
    segment_ids: Int[np.ndarray, "B n"],
    cod: CodConfig,
    seed: int | Sequence[int],
) -> CodSample:
    """Samples the elements of a batch of shifted rows (COD: arXiv:2504.18583, arXiv:2602.01469).

    It runs on the host, in NumPy. `sample_row` says which elements can be drawn.

    Args:
      loss_mask: [B n], whether the loss may read each shifted position.
      segment_ids: [B n], document of each shifted position, -1 for none.
      cod: settings.
      seed: row i draws with the seed [*seed, i], so that it does not depend on the other rows.

    Returns:
      Arrays [B M] of each element's anchor and depth, 1 and more, and of whether it is real. M is
      `cod.capacity(n)`, but at least 1; unused places have `real` False. With partitions M is S
      stretches of `cod.partition_width(n)` elements. A chain belongs to the partition in whose
      share of the elements it begins, so that none is cut.
    """
    B, n = loss_mask.shape
    width = cod.partitions * cod.partition_width(n)
    anchor = np.zeros((B, width), np.int32)
    depth = np.zeros((B, width), np.int32)
    real = np.zeros((B, width), bool)
    for i in range(B):
        rng = np.random.default_rng([*np.atleast_1d(seed), i])
        row_anchor, row_depth = sample_row(loss_mask[i], segment_ids[i], cod, rng)
        places = _places(row_depth, cod, n)
        anchor[i, places] = row_anchor
        depth[i, places] = row_depth
        real[i, places] = True
    return CodSample(anchor, depth, real)


def narrowed(sample: CodSample) -> CodSample:
    """The elements of a batch without places that none of its rows uses, as far as widths go.

    A row has places for as many elements as if the loss read all of its positions, and the loss
    does not read prompts.

    Args:
      sample: from `cod_sample`, of a configuration with one partition: real elements come first.
    """
    capacity, used = sample.real.shape[1], int(sample.real.sum(1).max())
    quarters = (-(-capacity * part // NUM_WIDTHS) for part in range(1, NUM_WIDTHS))
    widths = (max(quarter, LEAST_WIDTH) for quarter in quarters)
    width = next((width for width in widths if used <= width <= capacity), capacity)
    return CodSample(*(getattr(sample, name)[:, :width] for name in ("anchor", "depth", "real")))


def _places(depth: Int[np.ndarray, " m"], cod: CodConfig, positions: int) -> np.ndarray:
    """Where each of a row's elements lies, by its partition."""
    element = np.arange(len(depth))
    if cod.partitions == 1:
        return element
    chain_start = element - (depth - 1)
    share = -(-max(cod.capacity(positions), 1) // cod.partitions)
    partition = chain_start // share
    first = np.searchsorted(partition, partition)  # of each element's partition
    return partition * cod.partition_width(positions) + element - first
