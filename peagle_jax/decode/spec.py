"""The static description of a generation, for which programs are compiled."""

import dataclasses
import functools
from typing import Any, cast

from flax import nnx

from peagle_jax.decode.drafters import Drafter, ParallelDrafter
from peagle_jax.decode.tree import num_tree_nodes
from peagle_jax.layers.matrix_layouts import PLAIN
from peagle_jax.targets.config import TargetConfig
from peagle_jax.types import RowOptions


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static description of a generation. Equal specs and array shapes share a program.

    Attributes:
      target: the target's graph, without its arrays.
      target_config: sizes of the target and of its cache.
      drafter: what proposes tokens; None for plain decoding.
      sample_drafts: at a temperature above 0, draft by sampling, or argmaxes (vLLM's default).
      chunk: the most tokens of each prompt in one forward of the prefill; None for whole prompts.
      num_nodes: verify a tree of so many drafts; None for a chain of K.
      lookback: where K changes, a state has as many places for tokens that the drafter has not
        read, at least K + 1, and plain steps keep the newest in them; 0 where K never changes.
      ring_cache_size: None gives every layer slots for all positions. A number gives layers with a
        sliding window ring caches, if a ring has fewer slots than that; it takes a `chunk`.
      matrix_layout: of large matrices (`layers.matrix_layouts`); each has another program.
    """

    target: nnx.GraphDef
    target_config: TargetConfig
    drafter: Drafter | None
    sample_drafts: bool
    chunk: int | None = None
    num_nodes: int | None = None
    lookback: int = 0
    ring_cache_size: int | None = None
    matrix_layout: str = PLAIN

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Kept, because a call of a jitted function hashes its static arguments: 1 ms each time."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def k(self) -> int:
        """Draft tokens per step; 0 in plain decoding."""
        return self.drafter.k if self.drafter else 0

    @property
    def num_drafts(self) -> int:
        """Drafts that a step verifies: K, or the nodes of a tree; 0 in plain decoding."""
        if self.num_nodes is None:
            return self.k
        assert isinstance(self.drafter, ParallelDrafter)
        return num_tree_nodes(self.k, self.num_nodes, self.drafter.config.draft_vocab)

    @property
    def k_changes(self) -> bool:
        """Whether steps alternate with others that draft another number of tokens."""
        return self.lookback > 0

    @property
    def num_places(self) -> int:
        """Places in `DecodeState.tokens`."""
        return self.lookback or self.k + 1

    @property
    def num_ahead(self) -> int:
        """Slots after a row's tokens that a step may write, its path of K + 1, or a change of K."""
        return max(self.num_drafts + 1, self.k + 1, self.lookback)

    def with_k(self, k: int) -> "DecodeSpec":
        """The same with K drafts per step, by a drafter that is a dataclass."""
        if k not in self._by_k:
            drafter = dataclasses.replace(cast(Any, self.drafter), k=k) if k else None
            self._by_k[k] = dataclasses.replace(self, drafter=drafter)
        return self._by_k[k]

    @functools.cached_property
    def _by_k(self) -> dict[int, "DecodeSpec"]:
        """What `with_k` made, which is kept with its hash."""
        return {}

    @property
    def ring_block(self) -> int | None:
        """The most positions that are written at once, which a ring holds beside its window."""
        if self.ring_cache_size is None or self.chunk is None:
            return None
        return max(self.chunk, self.num_ahead)


def needs_logits(options: RowOptions) -> bool:
    """Whether argmaxes are not enough. `argmax_logits` need not hold all logits at once."""
    return options.sampling is not None or options.penalties is not None or options.logprobs
