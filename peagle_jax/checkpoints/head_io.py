"""The former place of head_reading.py and head_writing.py, until every caller imports those."""

from peagle_jax.checkpoints.head_reading import read_head, to_model
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.checkpoints.head_writing import (
    CHECKPOINT_FORMATS,
    check_servable,
    save_drafter,
    write_head,
)
from peagle_jax.checkpoints.head_writing import from_model as of_model
from peagle_jax.checkpoints.runs import load_drafter

__all__ = [
    "CHECKPOINT_FORMATS",
    "HeadState",
    "check_servable",
    "load_drafter",
    "of_model",
    "read_head",
    "save_drafter",
    "to_model",
    "write_head",
]
