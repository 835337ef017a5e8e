"""What is kept of a machine and a pair of models: seconds of a decoding step with each number of
drafts, and how many drafts were accepted lately.

The seconds are measured, all in turns, and then follow what steps are observed to take. A machine
that others use is faster at one time than at another, and an engine is measured while those beside
it wait: what steps take now says how fast it is, and what was measured how the Ks compare. A batch
whose numbers of rows and slots were never measured borrows the times of a similar one, and is
measured when it has decoded for a while.

    ~/.cache/peagle_jax/step_times/4f0c...json      one file for each machine and pair of models

A file that cannot be read is measured anew; one may be deleted at any time.
"""

import collections
import dataclasses
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.atomic_write import write_atomically
from peagle_jax.decode.adaptive_k import KChooser, Survival
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.provenance import device_name, versions
from peagle_jax.targets.sharding import mesh_of
from peagle_jax.user_cache import user_cache

# Times of this many slots also stand for up to four times fewer.
FIRST_SLOTS = 256
# Every number of drafts is timed once in each round, so that a slow moment concerns all. There are
# at least so many rounds, and more until some seconds are over: eight of short steps may all be of
# one moment.
ROUNDS, MOST_ROUNDS, MEASURED_SECONDS = 8, 32, 2.0
# A batch with rows and slots that were never measured borrows the times of the nearest that were,
# until so many steps were taken with it. To measure compiles a step with every number of drafts,
# as long as thousands of steps of a small model (16 s where a step takes 5 ms), and most batches
# soon change. Where one has more than so many times the rows of the other, times say little.
STEPS_BEFORE_MEASURING, MOST_TIMES_AS_MANY = 512, 4
# Which of several times counts. Other work on the machine can only make a step slower, hence not
# the middle one.
QUANTILE = 0.25
# Observed times that are kept, of all K and of each. With 4, 8 and 16 of all, choices on simulated
# machines are within 0.5 % of each other on average (LOG.md, 2026-11-29, morning).
NUM_PACES, NUM_SHARES = 8, 16
# So many observed times count alone; fewer beside what was expected.
ENOUGH = 4
# Between two times that accepted drafts are written.
KEEP_SECONDS = 60


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
        "seconds": "of a step, without what a call costs",
        "arrays": hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:20],
    }


def open_step_times(
    spec: DecodeSpec, params: tuple[Any, Any], folder: Path | None, num_threads: int
) -> "StepTimes":
    """What is kept of a way of decoding.

    Args:
      params: of the target and of the drafter.
      folder: where files are; None for the default one.
      num_threads: engines that decode at the same time.
    """
    about = what_times_depend_on(spec, params, num_threads)
    return StepTimes(about, folder or user_cache("step_times"), head_digest(params[1]))


def head_digest(draft_params: Any) -> str:
    """Sixteen digits that tell draft heads apart, from the first numbers of every array."""
    first = jax.device_get(_first_numbers(jax.tree.leaves(draft_params)))
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in first)).hexdigest()[:16]


@jax.jit
def _first_numbers(arrays: list[jax.Array]) -> list[jax.Array]:
    """Eight of each. One program: to cut the arrays one after another takes 8 ms."""
    return [x.ravel()[:8] for x in arrays]


@dataclasses.dataclass
class FollowedTimes:
    """Times of a batch, from former ones and from what its steps are observed to take.

    A step with K drafts is expected to take former time x pace x share. The pace is the machine's
    at present, seen in steps with whatever K; the share is by how much one K differs from the
    former ratios. A K that was observed while the machine was faster does not seem fast for that.

    Attributes:
      slots: at which steps are observed.
      former: measured, or of another batch, by K.
      seconds: of this batch, by K.
      paces: the newest of all observed steps.
      shares: the newest of each K.
    """

    slots: int
    former: dict[int, float]
    seconds: dict[int, float]
    paces: list[float] = dataclasses.field(default_factory=list)
    shares: dict[int, list[float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def since(cls, slots: int, former: Mapping[int, float]) -> "FollowedTimes":
        """Times of which nothing was observed yet."""
        return cls(slots, dict(former), dict(former))

    def observe(self, k: int, seconds: float) -> None:
        """Takes in what a step with `k` drafts took. A single slow moment changes nothing."""
        expected = self.former[k] * self._share(k)
        self.paces = [*self.paces, seconds / expected][-NUM_PACES:]
        pace = _quantile(self.paces, 1.0)
        if len(self.paces) >= ENOUGH:  # before, what is the machine's would be taken for this K's
            shares = [*self.shares.get(k, []), seconds / (self.former[k] * pace)]
            self.shares[k] = shares[-NUM_SHARES:]
        for other, former in self.former.items():
            self.seconds[other] = former * pace * self._share(other)

    def _share(self, k: int) -> float:
        return _quantile(self.shares.get(k, []), 1.0)


class StepTimes:
    """The times of one pair of models on one machine.

    Args:
      about: from `what_times_depend_on`.
      folder: where files are, one for each `about`.
      head: which draft head it is, from `head_digest`. Heads of the same shapes share times, and
        not what was accepted of their drafts.
    """

    def __init__(self, about: Mapping[str, str], folder: Path, head: str = "") -> None:
        self._about = dict(about)
        self._head = head
        line = json.dumps(self._about, sort_keys=True)
        self._file: Path | None
        self._file = folder / f"{hashlib.sha256(line.encode()).hexdigest()[:20]}.json"
        # by rows, slots and sampling
        self._own: dict[str, FollowedTimes] = {}
        self._borrowed: dict[str, FollowedTimes] = {}
        self._num_steps: collections.Counter[str] = collections.Counter()
        self._drafts: dict[str, tuple[list[float], list[float]]] = {}
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
    ) -> Mapping[int, float]:
        """Seconds of a step with each of `ks` drafts: measured, or borrowed from similar batches.

        The same object as long as they are of one kind. It follows what is observed.

        Args:
          num_rows: rows of the batch.
          slots: of the caches; rounded up to 256, 1,024, 4,096 and so on.
          sampling: how the rows sample, as `sampling_kind` says.
          measure: gives the seconds of a step with a number of drafts.
        """
        name = _name(num_rows, slots, sampling)
        known = self._known(name, ks, slots)
        is_due = self._num_steps[name] >= STEPS_BEFORE_MEASURING
        if known is not None and (self._measured(name, ks) is known or not is_due):
            return known
        if not self._measuring.acquire(blocking=known is None):
            assert known is not None
            return known  # borrowed; another thread is measuring
        try:
            # another thread may have measured before, these times or some to borrow
            known = self._known(name, ks, slots)
            if self._measured(name, ks) is None and (known is None or is_due):
                for k in ks:
                    measure(k)  # may be compiled
                begin, rounds = time.monotonic(), []
                while len(rounds) < ROUNDS or (
                    len(rounds) < MOST_ROUNDS and time.monotonic() - begin < MEASURED_SECONDS
                ):
                    rounds.append([measure(k) for k in ks])
                by_k = dict(zip(ks, map(_quantile, zip(*rounds, strict=True)), strict=True))
                with self._changing:
                    self._own[name] = FollowedTimes.since(slots, by_k)
                    self._borrowed.pop(name, None)
                    self._write()
                known = self._own[name].seconds
        finally:
            self._measuring.release()
        assert known is not None
        return known

    def _known(self, name: str, ks: Sequence[int], slots: int) -> Mapping[int, float] | None:
        """Times that were measured, or else borrowed ones, or None."""
        return self._measured(name, ks) or self._borrow(name, ks, slots)

    def _measured(self, name: str, ks: Sequence[int]) -> Mapping[int, float] | None:
        own = self._own.get(name)
        return own.seconds if own is not None and set(own.seconds) == set(ks) else None

    def _borrow(self, name: str, ks: Sequence[int], slots: int) -> Mapping[int, float] | None:
        """Times from the nearest rows and slots with the same sampling; None where none are near.

        Rows count more than slots: they decide how much a draft costs beside the weights.
        """
        rows, size, sampling = _parts(name)

        def distance(other: str) -> float:
            other_rows, other_size, _ = _parts(other)
            return 8 * abs(math.log2(other_rows / rows)) + abs(math.log2(other_size / size))

        def is_near(other: str) -> bool:
            other_rows, _, its_sampling = _parts(other)
            is_alike = max(rows, other_rows) <= MOST_TIMES_AS_MANY * min(rows, other_rows)
            return is_alike and its_sampling == sampling and self._measured(other, ks) is not None

        with self._changing:
            borrowed = self._borrowed.get(name)
            if borrowed is None or set(borrowed.seconds) != set(ks):
                near = [other for other in self._own if is_near(other)]
                if not near:
                    return None
                lent = self._own[min(near, key=distance)].seconds
                borrowed = self._borrowed[name] = FollowedTimes.since(slots, lent)
            return borrowed.seconds

    def count(self, num_rows: int, slots: int, sampling: str, num_steps: int) -> None:
        """Takes in that so many steps were taken: a batch that stays is measured."""
        with self._changing:
            self._num_steps[_name(num_rows, slots, sampling)] += num_steps

    def observe(self, k: int, num_rows: int, slots: int, sampling: str, seconds: float) -> None:
        """Takes in what a step with `k` drafts took, on average over some steps.

        Times with other slots than those that were measured would make one K seem slower than
        another. They are left out.
        """
        name = _name(num_rows, slots, sampling)
        with self._changing:
            for times in (self._own.get(name), self._borrowed.get(name)):
                if times is not None and slots == times.slots and k in times.former:
                    times.observe(k, seconds)

    def recall_drafts(self, sampling: str, chooser: KChooser) -> None:
        """Tells a new `chooser` what was accepted in earlier runs, if any was.

        Args:
          sampling: how the rows sample, as `sampling_kind` says.
        """
        counts = self._drafts.get(f"{sampling} {self._head}")
        if counts is not None and {len(x) for x in counts} == {chooser.k_max}:
            chooser.recall(*counts)

    def keep_drafts(self, sampling: str, survival: Survival) -> None:
        """Keeps what `survival` has seen, unless that was done a moment ago."""
        counts = survival.counts()
        if not counts[0][0]:
            return  # it saw none
        with self._changing:
            self._drafts[f"{sampling} {self._head}"] = counts
            if time.monotonic() >= self._next_write:
                self._next_write = time.monotonic() + KEEP_SECONDS
                self._write()

    def _read(self) -> None:
        assert self._file is not None
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            for name, (slots, seconds) in content["times"].items():
                _parts(name)
                numbers = _numbers(seconds.values(), least=1e-9)
                former = dict(zip(map(int, seconds), numbers, strict=True))
                self._own[name] = FollowedTimes.since(int(slots), former)
            for name, (tried, accepted) in content["drafts"].items():
                self._drafts[name] = _numbers(tried), _numbers(accepted)
            for name, num_steps in content.get("steps", {}).items():
                self._num_steps[name] = int(num_steps)
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
        if self._file is None:
            return
        times = {name: (own.slots, own.seconds) for name, own in self._own.items()}
        content = {"about": self._about, "times": times, "drafts": self._drafts}
        content["steps"] = self._num_steps
        text = json.dumps(content, indent=1)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, text + "\n")
        except FileNotFoundError:
            pass  # another process has just written what it knows under the same name
        except OSError:
            self._file = None  # a folder that cannot be written: they are kept in memory


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
    if min(numbers) < 1:
        raise ValueError(f"{name}: rows and slots must be at least 1")
    return *numbers, sampling


def _numbers(values: Iterable[float], least: float = 0) -> list[float]:
    """Of a file. ValueError where one is below `least`, not finite, or NaN, as after damage."""
    numbers = [float(x) for x in values]
    if not all(least <= x < math.inf for x in numbers):
        raise ValueError(f"numbers must be finite, and at least {least}")
    return numbers


def _quantile(seconds: Sequence[float], before: float = 0.0) -> float:
    """Which of several times counts.

    Args:
      before: what stands for those that are fewer than ENOUGH.
    """
    # as np.quantile has it, which takes 66 us in the place of 2; each look needs one for every K
    ordered = sorted([*seconds, *[before] * (ENOUGH - len(seconds))])
    place = QUANTILE * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
