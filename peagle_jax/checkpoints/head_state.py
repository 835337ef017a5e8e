"""A draft head outside any model: the form through which folders, training runs and our modules become each other."""

import dataclasses

import numpy as np
from flax import nnx

from peagle_jax import weights
from peagle_jax.checkpoints import param_mapping
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.weights import Tensor


@dataclasses.dataclass(frozen=True)
class HeadState:
    """A draft head's configuration and its tensors.

    `tensors` have speculators' names and torch's layout, and stay in their files until they are asked for.
    `embed_tokens.weight` is absent where the head shares its target's; `d2t` is there (int64) only at a reduced vocabulary.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    checkpoint_format: str  # of the source
    source: str
    left_out: tuple[
        str, ...
    ] = ()  # tensors of the source that say nothing: an identity d2t, the target's own, runtime scales
    quantized: bool = False  # some matrix was FP8 in the source, and is float32 here
    target: str | None = None  # name of the target, where the source says it
    target_architecture: str | None = None

    @property
    def shares_embedding(self) -> bool:
        return param_mapping.EMBEDDING not in self.tensors

    @property
    def mixed(self) -> bool:
        """Whether the floating tensors are of several dtypes."""
        return len({t.dtype for t in self.tensors.values() if t.dtype in weights.FLOATING}) > 1

    def check(self) -> None:
        """Raises InputError unless the tensors are those of the config, exactly."""
        own = (
            {param_mapping.EMBEDDING: (self.config.vocab, self.config.dim)}
            if self.shares_embedding
            else {}
        )
        placeholders = {
            name: weights.LazyTensor(shape, np.dtype(np.float32), lambda: None)
            for name, shape in own.items()
        }
        weights.check_tensors(
            maker(self.config),
            self.tensors | placeholders,
            param_mapping.table(self.config),
            self.source,
        )


def maker(config: HeadConfig):
    return lambda: DraftHead(config, rngs=nnx.Rngs(0))
