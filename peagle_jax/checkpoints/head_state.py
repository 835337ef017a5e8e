"""A draft head outside any model: what folders, training runs and modules are turned into."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.checkpoints import param_mapping
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.types import InputError
from peagle_jax.weights import Tensor


@dataclasses.dataclass(frozen=True)
class HeadState:
    """A draft head's configuration and its tensors, which stay in their files until they are read.

    Attributes:
      config: shape and options of the head.
      tensors: under speculators' names (`param_mapping.plain_name`), in torch's layout.
        `embed_tokens.weight` is absent where the head shares its target's embedding,
        `lm_head.weight` where it shares its target's output matrix, and `d2t` (int64) is there only
        with a reduced draft vocabulary.
      checkpoint_format: that the head was read from.
      source: where it came from, for errors and for the metadata of what is written.
      left_out: tensors of the source that say nothing about the head: an identity `d2t`, the
        target's own, scales that are only used at run time.
      quantized: some matrix was FP8 in the source, and is float32 here.
      target: name of the target, where the source says it.
      target_architecture: of the target, for example "Qwen3ForCausalLM".
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    checkpoint_format: str
    source: str
    left_out: tuple[str, ...] = ()
    quantized: bool = False
    target: str | None = None
    target_architecture: str | None = None

    @property
    def shares_embedding(self) -> bool:
        return param_mapping.EMBEDDING not in self.tensors

    @property
    def shares_lm_head(self) -> bool:
        is_whole = self.config.draft_vocab == self.config.vocab
        return is_whole and param_mapping.LM_HEAD not in self.tensors

    @property
    def has_mixed_dtypes(self) -> bool:
        """Whether the floating-point tensors are of several dtypes."""
        return len({t.dtype for t in self.tensors.values() if t.dtype in weights.FLOATING}) > 1

    def check_written_dtype(self, path: str | Path, dtype: DTypeLike | None) -> None:
        """Checks that a head which was FP8 is not written in float32 without being asked.

        Args:
          path: of what is written, for the error.
          dtype: that was asked for; None for none.

        Raises:
          InputError: it is such a head, and none was.
        """
        if self.quantized and dtype is None:
            raise InputError(
                path,
                rule="an FP8 head is written in a dtype of your choice",
                got="none",
                next_step="give --dtype bfloat16 or float32",
            )

    def check(self) -> None:
        """Checks names, shapes and kinds of all tensors against the config; reads no weights.

        Raises:
          InputError: a tensor is missing, unknown, or of a wrong shape or kind.
        """
        tensors = dict(self.tensors)
        shape = (self.config.vocab, self.config.dim)
        of_target = weights.LazyTensor(
            shape, np.dtype(np.float32), lambda: np.zeros(shape, np.float32)
        )
        if self.shares_embedding:
            tensors[param_mapping.EMBEDDING] = of_target
        if self.shares_lm_head:
            tensors[param_mapping.LM_HEAD] = of_target
        weights.check_tensors(
            head_maker(self.config), tensors, param_mapping.table(self.config), self.source
        )


def head_maker(config: HeadConfig) -> Callable[[], DraftHead]:
    """A function that makes the module, as `weights.load_params` wants it: only to be traced."""

    def make() -> DraftHead:
        return DraftHead(config, rngs=nnx.Rngs(0))

    return make
