"""What `peagle extract` is asked for, and checks of it."""

import dataclasses
from typing import Any

from peagle_jax.train.data import PACKINGS
from peagle_jax.train.hidden_state_store import DTYPES
from peagle_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractionOptions:
    """What to compute, and how to store it. The corpus is read as a training run reads it.

    Attributes:
      source: the corpus, as `corpus.stream_corpus` takes it.
      aux_hidden_state_layers: ascending; None: those that vLLM chooses for the target.
      seq_len: tokens of a packed row; None: 2048, or the target's context if that is shorter.
      packing: how documents become rows, one of `data.PACKINGS`.
      batch_size: rows of a forward.
      rows_per_shard: None: as many batches as make 1 GiB.
      dtype: of the stored numbers.
      compute_dtype: of weights and of products' operands; also of activations, but on a CPU
        these are float32.
      data_parallel_size: devices, or groups of them, that share the rows of a batch.
      tensor_parallel_size: devices in a group, which share the target's matrices.
      max_chars: a random choice of documents of about so many characters; None: all.
      bad_rows: what to do with lines that cannot be used, one of `documents.BAD_ROWS`.
      chat_template_kwargs, special_tokens, split_turns: as of `corpus.stream_corpus`.
      held_out: share of documents that are left out.
      seed: of the random choice.

    Raises:
      InputError: a value is out of range; the message names the command line's option.
    """

    source: str
    aux_hidden_state_layers: tuple[int, ...] | None = None
    seq_len: int | None = None
    packing: str = "cut"
    batch_size: int = 8
    rows_per_shard: int | None = None
    dtype: str = "bfloat16"
    compute_dtype: str = "float32"
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    max_chars: int | None = None
    bad_rows: str = "refuse"
    chat_template_kwargs: dict[str, Any] | None = None
    special_tokens: bool = False
    split_turns: bool = False
    held_out: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        minima = {"seq_len": 4, "batch_size": 1, "rows_per_shard": 1, "max_chars": 1, "seed": 0}
        for key, minimum in minima.items():
            value = getattr(self, key)
            if value is not None and value < minimum:
                option = f"--{key.replace('_', '-')}"
                next_step = f"give {minimum} or more"
                raise InputError(option, f"must be {minimum} or more", value, next_step)
        if self.data_parallel_size > 1 and self.batch_size % self.data_parallel_size:
            rule = f"must divide the {self.batch_size} rows of a batch"
            next_step = f"give --batch-size {self.data_parallel_size}, or a multiple of it"
            got = self.data_parallel_size
            raise InputError("--data-parallel-size", rule, got, next_step)
        if not 0 <= self.held_out < 1:
            rule = "must lie in 0..1, and below 1"
            raise InputError("--held-out", rule, self.held_out, "give a share such as 0.05")
        allowed = {
            "dtype": DTYPES,
            "compute_dtype": ("float32", "bfloat16"),
            "packing": PACKINGS,
        }
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                option, rule = f"--{key.replace('_', '-')}", f"must be one of {', '.join(values)}"
                raise InputError(option, rule, getattr(self, key), f"use {option} {values[1]}")
