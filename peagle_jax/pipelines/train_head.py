"""Training of a head together with its evaluation by decoding."""

from collections.abc import Callable

from peagle_jax.pipelines.evaluate import make_evaluator
from peagle_jax.train import train_head as training
from peagle_jax.train.config import HeadRun
from peagle_jax.train.train_head import HeadResult


def train_head(run: HeadRun, say: Callable[[str], None] = print) -> HeadResult:
    """Trains a P-EAGLE or EAGLE-3 head, exports it, and measures its acceptance length.

    Args:
      run: from `load_run`, or made in Python.
      say: is told in a line each what is read and made.

    Returns:
      The head's folder, and what was measured.

    Raises:
      InputError: the target cannot be read, has no tokenizer, or does not fit the run's head; or
        `run.out` cannot be used.
    """
    return training.train_head(run, say, make_evaluator)
