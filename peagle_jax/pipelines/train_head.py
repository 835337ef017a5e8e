"""Training of a head with its measurement by decoding: the one place where the two meet."""

from collections.abc import Callable

from peagle_jax.pipelines.evaluate import make_evaluator
from peagle_jax.train import train_head as training
from peagle_jax.train.config import HeadRun
from peagle_jax.train.train_head import HeadResult


def train_head(run: HeadRun, say: Callable[[str], None] = print) -> HeadResult:
    """Trains a P-EAGLE or EAGLE-3 head as `run` says, exports it and measures its acceptance length.

    Args:
      run: from `load_run`.
      say: told in a line each what is read and made.

    Returns:
      Where the head lies, and what was measured.

    Raises:
      InputError: the target cannot be read, has no tokenizer, or does not fit the head's configuration.
    """
    return training.train_head(run, say, make_evaluator)
