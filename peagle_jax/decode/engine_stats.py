"""What an engine counts."""

import collections
import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass
class EngineStats:
    """What an engine did so far.

    Attributes:
      num_steps: decoding steps of the batch.
      steps_by_k: how many of them drafted each number of tokens; 0 is plain decoding.
      num_chunks: forwards of the prefill.
      prefill_seconds: wall seconds of reading prompts, up to the first tokens.
      decode_seconds: wall seconds of decoding steps, with caches that grow for them.
      measure_seconds: wall seconds of measuring steps and of choosing K, for `adaptive_k`.
      programs: shapes that were computed: "prefill", rows (of distinct prompts), slots, tokens of
        a chunk; "first tokens" and "decode", rows, slots, how the rows sample. What a process meets
        for the first time is compiled, and again where programs were let go of (first_call.py).
      num_threads: engines that did it at the same time, each with a part of the rows.
        `num_steps` is of the one that took most, for the others have nothing to do then; seconds
        are on average, and all else is added up.
    """

    num_steps: int = 0
    steps_by_k: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    num_chunks: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    measure_seconds: float = 0.0
    programs: set[tuple] = dataclasses.field(default_factory=set)
    num_threads: int = 1

    @classmethod
    def of_all(cls, parts: Sequence["EngineStats"], compile_apart: bool = False) -> "EngineStats":
        """What engines did that decode at the same time.

        Args:
          compile_apart: whether each compiles its programs, for devices of its own; their names
            then end with its number.
        """
        programs = [part.programs for part in parts]
        if compile_apart:
            programs = [{(*name, i) for name in names} for i, names in enumerate(programs)]
        return cls(
            num_steps=max(part.num_steps for part in parts),
            # copies, because a thread may be adding a number
            steps_by_k=sum(
                (collections.Counter(dict(part.steps_by_k)) for part in parts),
                collections.Counter(),
            ),
            num_chunks=sum(part.num_chunks for part in parts),
            prefill_seconds=statistics.fmean(part.prefill_seconds for part in parts),
            decode_seconds=statistics.fmean(part.decode_seconds for part in parts),
            measure_seconds=statistics.fmean(part.measure_seconds for part in parts),
            programs=set().union(*programs),
            num_threads=len(parts),
        )
