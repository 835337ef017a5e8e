"""What is kept of a machine and a pair of models: seconds of a decoding step with each number of
drafts, and how many drafts were accepted lately.

The seconds are measured, all in turns, when a batch is first decoded, and then again and again, a
round at a time, for at most half a hundredth of the time. A machine that others use is faster at
one time than at another, and not for all numbers of drafts alike: of several rounds the middle one
counts, by the ratios of its times. What decoding itself takes is not counted. It says nothing of
numbers of drafts that are not in use; and a few steps with another one, between calls that cost a
millisecond, say less than a measurement does (LOG.md, 2026-11-30, afternoon). A batch whose numbers
of rows and slots were never measured borrows the times of a similar one, and is measured when it
has decoded for a while.

    ~/.cache/peagle_jax/step_times/4f0c...json      one file for each machine and pair of models

A file that cannot be read is measured anew; one may be deleted at any time.
"""

import collections
import dataclasses
import hashlib
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.atomic_write import write_atomically
from peagle_jax.decode.adaptive_k import KChooser
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.provenance import device_name, versions
from peagle_jax.targets.sharding import mesh_of
from peagle_jax.user_cache import user_cache

# Times of this many slots also stand for fewer: up to here the length of a text changes little, and
# more rounds count together. Times of larger numbers also stand for up to four times fewer.
FIRST_SLOTS = 1024
# Every number of drafts is timed once in each round, so that a slow moment concerns all. At first
# there are at least so many rounds, and more until some seconds are over: a few of short steps may
# all be of one moment. So many of them are kept, each the middle of some.
ROUNDS, MOST_ROUNDS, MEASURED_SECONDS, KEPT_AT_FIRST = 3, 32, 2.0, 5
# The newest rounds that count. A further one takes such a part of the time of decoding. Where this
# process would have to compile programs for it, it must have decoded for so many seconds.
NUM_ROUNDS, PART_OF_TIME, COMPILING_WAITS = 11, 0.005, 1000.0
# A batch with rows and slots that were never measured borrows the times of the nearest that were,
# until so many steps were taken with it. To measure compiles a step with every number of drafts,
# as long as thousands of steps of a small model (16 s where a step takes 5 ms), and most batches
# soon change. Where one has more than so many times the rows of the other, times say little.
STEPS_BEFORE_MEASURING, MOST_TIMES_AS_MANY = 512, 4
# Between two times that accepted drafts are written, and after one that failed.
KEEP_SECONDS, AFTER_FAILURE = 5.0, 600.0

# The largest number in a file; by which part accepted drafts, as sums, may exceed those tried.
LARGEST, ROUNDING = 1e9, 1e-6

# of this process, by what times depend on and the folder
_opened: dict[tuple[str, Path], "StepTimes"] = {}
_opening = threading.Lock()


def what_times_depend_on(spec: DecodeSpec, params: Any, num_threads: int) -> dict[str, str]:
    """The machine, the versions, both models, the way of drafting and what runs beside it.

    Args:
      params: of the target and of the drafter. Only their shapes and dtypes count.
      num_threads: engines that decode at the same time.
    """
    shapes = jax.tree.leaves(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", params))
    config = spec.target_config
    mesh = mesh_of(params[0])
    return {
        "device": f"{1 if mesh is None else mesh.size} x {device_name()}",
        "versions": versions(),
        "target": f"{type(config).__name__}, cache {jnp.dtype(config.kv_cache_dtype)}",
        "drafter": f"{type(spec.drafter).__name__}, K = {spec.k}",
        "threads": str(num_threads),
        "seconds": "of a step, without what a call costs, in rounds",
        "arrays": hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:20],
    }


def open_step_times(
    spec: DecodeSpec, params: tuple[Any, Any], folder: Path | None, num_threads: int
) -> "StepTimes":
    """What is kept of a way of decoding. Engines of a process that decode alike share it, also with
    different heads of the same shapes.

    Args:
      params: of the target and of the drafter.
      folder: where files are; None for the default one.
      num_threads: engines that decode at the same time.
    """
    about = what_times_depend_on(spec, params, num_threads)
    folder = folder or user_cache("step_times")
    key = json.dumps(about), folder.absolute()
    with _opening:
        return _opened.get(key) or _opened.setdefault(key, StepTimes(about, folder))


def head_digest(draft_params: Any) -> str:
    """Sixteen digits that tell draft heads apart, from the first numbers of every array."""
    first = jax.device_get(_first_numbers(jax.tree.leaves(draft_params)))
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in first)).hexdigest()[:16]


@jax.jit
def _first_numbers(arrays: list[jax.Array]) -> list[jax.Array]:
    """Eight of each. One program: to cut the arrays one after another takes 8 ms."""
    return [x.ravel()[:8] for x in arrays]


@dataclasses.dataclass
class MeasuredTimes:
    """Times of a batch, from several rounds of measuring.

    Attributes:
      rounds: the newest ones, seconds by K.
      cost: seconds that the last one took.
      decoded: seconds of decoding since then.
      decoded_here: the same of this process alone.
      compiling: seconds that the last round took with its compilations, in this process.
      seconds: of a step, by K: the ratios of the middle round, at the middle pace. Always the same
        object.
    """

    rounds: list[dict[int, float]]
    cost: float = 0.0
    decoded: float = 0.0
    decoded_here: float = 0.0
    compiling: float = 0.0
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._count()

    def add(self, by_k: Mapping[int, float], cost: float) -> None:
        """Takes in a round that has just taken `cost` seconds."""
        self.rounds = [*self.rounds, dict(by_k)][-NUM_ROUNDS:]
        self.cost, self.decoded, self.decoded_here = cost, 0.0, 0.0
        self._count()

    def is_round_due(self) -> bool:
        """Whether enough was decoded for a further round, where nothing has to be compiled."""
        return self.decoded >= self.cost / PART_OF_TIME

    def may_compile(self) -> bool:
        """Whether enough was decoded for one that compiles."""
        return self.decoded_here >= max(COMPILING_WAITS, self.compiling / PART_OF_TIME)

    def _count(self) -> None:
        paces = [statistics.geometric_mean(by_k.values()) for by_k in self.rounds]
        pace = statistics.median(paces)
        for k in self.rounds[0]:
            ratios = [by_k[k] / its for by_k, its in zip(self.rounds, paces, strict=True)]
            self.seconds[k] = pace * statistics.median(ratios)


class StepTimes:
    """The times of one pair of models on one machine.

    Heads of the same shapes share times, and not what was accepted of their drafts.

    Args:
      about: from `what_times_depend_on`.
      folder: where files are, one for each `about`.
    """

    def __init__(self, about: Mapping[str, str], folder: Path) -> None:
        self._about = dict(about)
        line = json.dumps(self._about, sort_keys=True)
        self._file = folder / f"{hashlib.sha256(line.encode()).hexdigest()[:20]}.json"
        # by rows, slots and sampling
        self._own: dict[str, MeasuredTimes] = {}
        self._num_steps: collections.Counter[str] = collections.Counter()
        # steps that tried and accepted each position, and plain steps until drafting is looked at
        self._drafts: dict[str, tuple[list[float], list[float], list[float]]] = {}
        self._lenders: dict[str, str] = {}  # whose times a batch borrows, by name
        self._next_write = 0.0
        # engines in several threads share the times
        self._measuring, self._changing = threading.Lock(), threading.RLock()
        self._read()

    def get(
        self,
        ks: Sequence[int],
        num_rows: int,
        slots: int,
        sampling: str,
        measure: Callable[[int], float],
        is_compiled: Callable[[int], bool] = lambda k: False,
    ) -> Mapping[int, float]:
        """Seconds of a step with each of `ks` drafts: measured, or borrowed from similar batches.

        The same object as long as they are of one kind. Now and then a round is measured anew.

        Args:
          num_rows: rows of the batch.
          slots: of the caches; rounded up to 1,024, 4,096 and so on.
          sampling: how the rows sample, as `sampling_kind` says.
          measure: gives the seconds of a step with a number of drafts.
          is_compiled: whether that can be done without compiling.
        """
        name = _name(num_rows, slots, sampling)
        known, is_own = self._known(name, ks)
        if known is not None and not self._is_to_be_measured(name, ks, known, is_own, is_compiled):
            return known.seconds
        if not self._measuring.acquire(blocking=known is None):
            assert known is not None
            return known.seconds  # another thread is measuring
        try:
            # another thread may have measured before, these times or some to borrow
            known, is_own = self._known(name, ks)
            if known is None or self._is_to_be_measured(name, ks, known, is_own, is_compiled):
                known = self._measure(name, ks, measure, known if is_own else None)
        finally:
            self._measuring.release()
        return known.seconds

    def _is_to_be_measured(
        self,
        name: str,
        ks: Sequence[int],
        known: MeasuredTimes,
        is_own: bool,
        is_compiled: Callable[[int], bool],
    ) -> bool:
        """Whether to measure although something is known."""
        if not is_own:
            return self._num_steps[name] >= STEPS_BEFORE_MEASURING
        return known.is_round_due() and (all(map(is_compiled, ks)) or known.may_compile())

    def _measure(
        self,
        name: str,
        ks: Sequence[int],
        measure: Callable[[int], float],
        known: MeasuredTimes | None,
    ) -> MeasuredTimes:
        """Measures the first rounds, or a further one."""
        least, most = (ROUNDS, MOST_ROUNDS) if known is None else (1, 1)
        with self._changing:  # what fails is not tried again at once
            self._num_steps[name] = 0
            if known is not None:
                known.decoded = known.decoded_here = 0.0
        first = time.monotonic()
        for k in ks:
            measure(k)  # may be compiled; and a program that was away finds nothing in caches
        begin, rounds = time.monotonic(), []
        while len(rounds) < least or (
            len(rounds) < most and time.monotonic() - begin < MEASURED_SECONDS
        ):
            rounds.append({k: measure(k) for k in ks})
        end = time.monotonic()
        cost = 2 * (end - begin) / len(rounds)  # of a round and its first calls
        with self._changing:
            self._lenders.clear()
            if known is None:
                groups = [rounds[i::KEPT_AT_FIRST] for i in range(KEPT_AT_FIRST)]
                kept = [MeasuredTimes(group).seconds for group in groups if group]
                known = self._own[name] = MeasuredTimes(kept, cost)
            else:
                known.add(rounds[0], cost)
                known.compiling = end - first
            self._write()
        return known

    def _known(self, name: str, ks: Sequence[int]) -> tuple[MeasuredTimes | None, bool]:
        """Times that were measured, or else borrowed ones, or None; and whether they are its own.

        They are borrowed from the nearest rows and slots with the same sampling. Rows count more
        than slots: they decide how much a draft costs beside the weights.
        """
        lender = self._lenders.get(name, name)
        own = self._own.get(lender)
        if own is not None and own.seconds.keys() == set(ks):
            return own, lender == name
        rows, size, sampling = _parts(name)

        def distance(other: str) -> float:
            other_rows, other_size, _ = _parts(other)
            return 8 * abs(math.log2(other_rows / rows)) + abs(math.log2(other_size / size))

        def is_near(other: str) -> bool:
            other_rows, _, its_sampling = _parts(other)
            is_alike = max(rows, other_rows) <= MOST_TIMES_AS_MANY * min(rows, other_rows)
            return is_alike and its_sampling == sampling

        with self._changing:
            near = [other for other, its in self._own.items() if its.seconds.keys() == set(ks)]
            near = [other for other in near if is_near(other)]
            if not near:
                return None, False
            self._lenders[name] = min(near, key=distance)
            return self._own[self._lenders[name]], False

    def count(
        self, num_rows: int, slots: int, sampling: str, num_steps: int, seconds: float
    ) -> None:
        """Takes in that so many steps were taken: a batch that stays is measured, and again."""
        name = _name(num_rows, slots, sampling)
        with self._changing:
            self._num_steps[name] += num_steps
            if name in self._own:
                self._own[name].decoded += seconds
                self._own[name].decoded_here += seconds

    def recall_drafts(self, sampling: str, head: str, chooser: KChooser) -> None:
        """Tells a new `chooser` what was accepted in earlier runs, if any was.

        Args:
          sampling: how the rows sample, as `sampling_kind` says.
          head: which draft head it is, from `head_digest`.
        """
        counts = self._drafts.get(f"{sampling} {head}")
        if counts is not None and {len(x) for x in counts[:2]} == {chooser.k_max}:
            chooser.recall(*counts[:2], *counts[2][:1])

    def keep_drafts(self, sampling: str, head: str, chooser: KChooser) -> None:
        """Keeps what `chooser` has seen, unless that was done a moment ago."""
        counts = *chooser.survival.counts(), [float(chooser.wait)]
        if not counts[0][0]:
            return  # it saw none
        with self._changing:
            self._drafts[f"{sampling} {head}"] = counts
            if time.monotonic() >= self._next_write:
                self._next_write = time.monotonic() + KEEP_SECONDS
                self._write()

    def _read(self) -> None:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            for name, (rounds, cost, decoded) in content["times"].items():
                _parts(name)
                of_file = [
                    dict(zip(map(int, by_k), _numbers(by_k.values(), least=1e-9), strict=True))
                    for by_k in rounds
                ]
                if not of_file or any(by_k.keys() != of_file[0].keys() for by_k in of_file):
                    raise ValueError("each round is of the same numbers of drafts")
                cost, decoded = _numbers([cost, decoded])
                self._own[name] = MeasuredTimes(of_file, cost, decoded)
            for name, (tried, accepted, *wait) in content["drafts"].items():
                counts = _numbers(tried), _numbers(accepted)
                if any(a > (1 + ROUNDING) * t for t, a in zip(*counts, strict=True)):
                    raise ValueError("no more drafts can be accepted than were tried")
                self._drafts[name] = *counts, _numbers(*wait or [[]])[:1]
            for name, num_steps in content.get("steps", {}).items():
                self._num_steps[name] = max(0, int(num_steps))
        except (
            OSError,
            ValueError,
            LookupError,
            AttributeError,
            TypeError,
            ArithmeticError,
            RecursionError,
        ):
            self._own, self._drafts = {}, {}  # measured anew
            self._num_steps.clear()

    def _write(self) -> None:
        times = {name: (own.rounds, own.cost, own.decoded) for name, own in self._own.items()}
        content = {"about": self._about, "times": times, "drafts": self._drafts}
        content["steps"] = self._num_steps
        text = json.dumps(content, indent=1)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, text + "\n")
        except FileNotFoundError:
            pass  # another process has just written what it knows under the same name
        except OSError:  # a folder that cannot be written, or a full disk: kept in memory meanwhile
            self._next_write = time.monotonic() + AFTER_FAILURE


def _name(num_rows: int, slots: int, sampling: str) -> str:
    """What times are kept under."""
    size = FIRST_SLOTS
    while size < slots:
        size *= 4
    return f"{num_rows} rows, {size} slots, {sampling}"


def _parts(name: str) -> tuple[int, int, str]:
    """The rows, slots and sampling of a name. ValueError where it is none, as in a damaged file."""
    rows, slots, sampling = name.split(", ", 2)
    numbers = int(rows.removesuffix(" rows")), int(slots.removesuffix(" slots"))
    if not 1 <= min(numbers) <= max(numbers) <= LARGEST:
        raise ValueError(f"{name}: rows and slots must lie in 1 to {LARGEST:g}")
    return *numbers, sampling


def _numbers(values: Iterable[float], least: float = 0) -> list[float]:
    """Of a file. ValueError where one is below `least`, too large, or NaN, as after damage."""
    numbers = [float(x) for x in values]
    if not all(least <= x <= LARGEST for x in numbers):
        raise ValueError(f"numbers must lie in {least} to {LARGEST}")
    return numbers
