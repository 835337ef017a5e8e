"""The jobs of a command: waiting, running and done.

Each runs in a process of its own, pinned to one core. Jobs that share a head run one after another,
so that the head is trained once.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from experiments.folders import ROOT
from experiments.jobs import CODE_HAS_CHANGED, Job
from peagle_jax import allocator
from peagle_jax.atomic_write import append_line, write_atomically
from peagle_jax.file_lock import lock_while_alive
from peagle_jax.types import InputError


@dataclasses.dataclass
class Running:
    """A job at work.

    Attributes:
      core: that its process is pinned to; None for any.
      out: the file that its row is written to.
      log: what it prints.
      head: the folder of the head that it trains.
      started_at: in seconds, as `time.monotonic` counts them.
    """

    job: Job
    process: subprocess.Popen
    core: int | None
    out: Path
    log: Path
    head: Path
    started_at: float

    def last_logged(self) -> dict:
        """The newest row of the training's metrics; empty before the first."""
        try:
            text = (self.head / "metrics.jsonl").read_text(encoding="utf-8")
            rows = (json.loads(line) for line in reversed(text.splitlines()))
            return next((row for row in rows if "loss" in row), {})
        except (OSError, json.JSONDecodeError):  # none yet, or its last line is being written
            return {}


class Queue:
    """Call `step` once a second until it says that nothing is left.

    Args:
      jobs: in the order in which they begin.
      cache: the folder of stages, heads and logs. The stages must be there.
      results: the folder of rows; NAME.jsonl is appended to.
      command: what the rows say that they were made with.
      max_running: jobs at a time.
      minutes: no job begins after so many; None for no limit.

    Raises:
      InputError: a folder cannot be written, or another command fills the cache.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        cache: Path,
        results: Path,
        command: str,
        max_running: int,
        minutes: float | None,
    ) -> None:
        self.waiting = list(jobs)
        self.cache = cache
        self.results = results
        self.command = command
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.free_cores = _cores(max_running)
        self.running: list[Running] = []
        self.rows: list[dict] = []
        self.failed: list[tuple[Job, Path]] = []  # with their logs
        self.code_has_changed = False  # since the command began: no further job begins
        self._num_announced = 0
        try:
            results.mkdir(parents=True, exist_ok=True)
            (cache / "jobs").mkdir(parents=True, exist_ok=True)
            is_mine = lock_while_alive(self, cache)
        except OSError as error:
            raise InputError(
                error.filename,
                rule="the folders of rows and caches must be writable",
                got=error.strerror,
                next_step="name other folders with --results and --cache",
            ) from None
        if not is_mine:
            rule, got = "one command fills a cache at a time", "another one at it"
            raise InputError(cache, rule, got, "wait for it, or name another folder with --cache")

    @property
    def is_late(self) -> bool:
        """Whether no job may begin any more."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def step(self) -> bool:
        """Collects what ended and begins what can begin.

        Returns:
          False when nothing runs and nothing may begin.
        """
        for running in [r for r in self.running if r.process.poll() is not None]:
            self.running.remove(running)
            self.free_cores.append(running.core)
            self._collect(running)
        is_late = self.is_late
        is_ending = is_late or self.code_has_changed
        while self.free_cores and not is_ending and (job := self._next()) is not None:
            self._begin(job)
        return bool(self.running) or (bool(self.waiting) and not is_ending)

    def news(self) -> list[str]:
        """One line for every row since the last call."""
        new = self.rows[self._num_announced :]
        self._num_announced = len(self.rows)
        lines = []
        for row in new:
            length = row["measurements"][0]["acceptance_length"]
            minutes = row["train_seconds"] / 60
            lines.append(
                f"{row['experiment']}, {row['variant']}, seed {row['seed']}: acceptance length "
                f"{length:.3f}, {minutes:.1f} minutes of training"
            )
        return lines

    def stop(self) -> None:
        """Ends the processes that run. Training saves the step that it is at first."""
        for running in self.running:
            running.process.terminate()
        for running in self.running:
            running.process.wait()
        self.running = []

    def _next(self) -> Job | None:
        """The first job whose heads nobody else is training; it will then find them trained."""
        busy = {key for running in self.running for key in head_keys(running.job)}
        for i, job in enumerate(self.waiting):
            if not busy & head_keys(job):
                return self.waiting.pop(i)
        return None

    def _begin(self, job: Job) -> None:
        # The variant's name too: under a small budget two variants may be the same run.
        name = f"{job.key}-{job.experiment.name}-{re.sub('[^A-Za-z0-9]+', '-', job.name)}"
        spec, out, log = (
            self.cache / "jobs" / f"{name}.{suffix}" for suffix in ("spec.json", "row.json", "log")
        )
        if out.exists():  # a process ended after its queue did
            if not self._take_row(job, out):
                self.waiting.insert(0, job)
            return
        facts = {
            "experiment": job.experiment.name,
            "variant": job.name,
            "seed": job.seed,
            "budget": job.budget_name,
            "key": job.key,
            "ends_with_command": True,
            "cache": str(self.cache),
            "out": str(out),
            "command": self.command,
        }
        write_atomically(spec, json.dumps(facts) + "\n")
        core = self.free_cores.pop(0)
        with _signals_deferred(), log.open("w") as file, _pinned_to(core):
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.work", str(spec.absolute())],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=Path.cwd(),
                env=self._environment(),
            )
            head = job.head_folder(self.cache)
            self.running.append(Running(job, process, core, out, log, head, time.monotonic()))

    def _environment(self) -> dict[str, str]:
        """Of a job's process: this one's, with what it does not name for compiling and memory."""
        return {
            **allocator.environment(),
            "JAX_COMPILATION_CACHE_DIR": str((self.cache / "compiled").absolute()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }

    def _collect(self, running: Running) -> None:
        if running.process.returncode == CODE_HAS_CHANGED:
            self.code_has_changed = True
            self.waiting.insert(0, running.job)
            return
        succeeded = running.process.returncode == 0 and self._take_row(running.job, running.out)
        if not succeeded:
            self.failed.append((running.job, running.log))

    def _take_row(self, job: Job, out: Path) -> bool:
        """Appends a job's row to its experiment's file and removes its own; False if it is torn."""
        try:
            row = json.loads(out.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            out.unlink(missing_ok=True)
            return False
        append_line(self.results / f"{job.experiment.name}.jsonl", json.dumps(row))
        out.unlink()
        self.rows.append(row)
        return True


def _cores(max_running: int) -> list[int | None]:
    """One core for each job at a time. None, all cores: for one job, or more jobs than cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if 1 < max_running <= len(cores):
        return list(cores[:max_running])
    return [None] * max(1, max_running)


@contextlib.contextmanager
def _pinned_to(core: int | None) -> Iterator[None]:
    """A process that is started within runs on this core alone: it inherits its parent's place.

    (Popen's preexec_fn would fork in the midst of JAX's threads, which may deadlock.)
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect after this block.

    A process that had begun, but was not yet among those running, would be stopped by nobody.
    """
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, remember) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def head_keys(job: Job) -> set[str]:
    """Keys of the heads that a job may have to train."""
    initial = job.initial_job()
    return {job.head_key} | (head_keys(initial) if initial else set())
