"""What an engine counts."""

import collections
import dataclasses


@dataclasses.dataclass
class EngineStats:
    """What an engine did so far.

    Attributes:
      num_steps: decoding steps of the batch.
      steps_by_k: how many of them drafted each number of tokens; 0 is plain decoding.
      num_chunks: forwards of the prefill.
      prefill_seconds: wall seconds of reading prompts, up to the first tokens.
      decode_seconds: wall seconds of decoding steps.
      measure_seconds: wall seconds of measuring steps, for `adaptive_k`.
      programs: shapes that were computed, of which each is compiled once in a process: "prefill",
        rows, slots, tokens of a chunk; and "decode", rows, slots, how the rows sample.
    """

    num_steps: int = 0
    steps_by_k: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    num_chunks: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    measure_seconds: float = 0.0
    programs: set[tuple] = dataclasses.field(default_factory=set)
