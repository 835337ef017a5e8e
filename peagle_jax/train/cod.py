"""COD (conditional drop-token) sampling on the host: which depth >= 1 elements a sequence is trained on.

From PARD (arXiv:2504.18583), as P-EAGLE uses it (arXiv:2602.01469): depth d keeps about r**d of the positions, and
keeps (anchor, d) only where (anchor, d-1) was kept, so that every chain the head trains on is unbroken.
"""

import dataclasses

import numpy as np

from peagle_jax.types import CodSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodConfig:
    """`depths` counts the NTP position: K = 8 trains one real and up to seven placeholder rows an anchor.

    With `anchors`, depths count as if a row had at most so many supervised positions, as with speculators' max_anchors: chains begin
    at random, so drawing the anchors first and the chains from them would give the same.
    """

    num_depths: int
    down_sample_ratio: float
    down_sample_ratio_min: float
    max_anchors: int | None

    def __post_init__(self):
        if (
            self.num_depths < 1
            or not 0 < self.down_sample_ratio <= 1
            or not 0 <= self.down_sample_ratio_min <= 1
            or (self.max_anchors is not None and self.max_anchors < 1)
        ):
            raise ValueError(
                f"COD needs num_depths >= 1, 0 < down_sample_ratio <= 1, 0 <= down_sample_ratio_min <= 1, max_anchors >= 1 or null; got {self}"
            )

    def wanted(self, loss_mask: int, depth: int) -> int:
        """How many elements depth d may keep of a sequence with that many supervised positions."""
        begin = loss_mask if self.max_anchors is None else min(loss_mask, self.max_anchors)
        return int(
            max(begin - depth, 0) * max(self.down_sample_ratio**depth, self.down_sample_ratio_min)
        )

    def capacity(self, positions: int) -> int:
        """Most elements of depth >= 1 that `positions` can give: the static packed width."""
        return sum(self.wanted(positions, d) for d in range(1, self.num_depths))


def sample_row(
    loss_mask: np.ndarray, segment_ids: np.ndarray, cod: CodConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(anchor, depth) of the kept elements of one sequence, ordered by (anchor, depth).

    A position is kept at depth d if it is supervised, lies in the document of the position before it, and that one was
    kept at depth d-1; of those, `cod.wanted` are drawn without replacement. Position 0 is nobody's depth >= 1
    (speculators 0.9 lets it in with anchor -1). A chain never crosses documents.

    Args:
      supervised: whether a loss may read each shifted position [n].
      document: document of each shifted position, -1 for none [n].
    """
    n, count = len(loss_mask), int(loss_mask.sum())
    follows = np.zeros(n, bool)
    follows[1:] = loss_mask[1:] & (segment_ids[1:] == segment_ids[:-1]) & (segment_ids[1:] >= 0)
    kept, anchors, depths = np.arange(n), [], []
    for depth in range(1, cod.num_depths):
        pool = kept[kept + 1 < n] + 1
        pool = pool[follows[pool]]
        size = cod.wanted(count, depth)
        if size == 0 or len(pool) == 0:
            break
        kept = np.sort(rng.choice(pool, size, replace=False)) if len(pool) > size else pool
        anchors.append(kept - depth)
        depths.append(np.full(len(kept), depth))
    if not anchors:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    anchor, depth = np.concatenate(anchors), np.concatenate(depths)
    order = np.lexsort((depth, anchor))
    return anchor[order], depth[order]


def cod_sample(loss_mask: np.ndarray, segment_ids: np.ndarray, cod: CodConfig, seed) -> CodSample:
    """COD elements of a batch of shifted rows [B, n], padded to `cod.capacity(n)`.

    Args:
      seed: anything `np.random.default_rng` takes; row i is seeded with [*seed, i], so a row's draw does not depend on
        its neighbours.
    """
    B, n = loss_mask.shape
    width = max(cod.capacity(n), 1)
    anchor, depth, real = (
        np.zeros((B, width), np.int32),
        np.zeros((B, width), np.int32),
        np.zeros((B, width), bool),
    )
    for i in range(B):
        a, d = sample_row(
            loss_mask[i], segment_ids[i], cod, np.random.default_rng([*np.atleast_1d(seed), i])
        )
        anchor[i, : len(a)], depth[i, : len(d)], real[i, : len(a)] = a, d, True
    return CodSample(anchor, depth, real)
