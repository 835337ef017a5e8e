"""Runs waiting, running and done: each in a process of its own, pinned to a core; identical runs are done once."""

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

from experiments.stages import ROOT
from experiments.work import Job
from peagle_jax.atomic_write import write_atomically
from peagle_jax.types import InputError


@dataclasses.dataclass
class Running:
    job: Job
    process: subprocess.Popen
    core: int | None
    out: Path
    log: Path
    head: Path
    since: float

    def last_logged(self) -> dict:
        """The newest row of the training's metrics; empty before the first."""
        try:
            lines = (self.head / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return next(
                (row for line in reversed(lines) if "loss" in (row := json.loads(line))), {}
            )
        except (OSError, json.JSONDecodeError):
            return {}


class Queue:
    """`step` once a second until it says that nothing is left."""

    def __init__(
        self,
        jobs: Sequence[Job],
        cache: Path,
        results: Path,
        command: str,
        most: int,
        minutes: float | None,
    ):
        self.waiting, self.cache, self.results, self.command = list(jobs), cache, results, command
        self.until = None if minutes is None else time.time() + 60 * minutes
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.free: list[int | None] = (
            cores[:most] if most <= len(cores) and most > 1 else [None] * max(1, most)
        )
        self.running: list[Running] = []
        self.rows: list[dict] = []
        self.failed: list[tuple[Job, Path]] = []
        self.told = 0
        try:
            results.mkdir(parents=True, exist_ok=True)
            (cache / "jobs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                error.filename,
                "the folders of rows and caches must be writable",
                error.strerror,
                "choose others",
            ) from None

    @property
    def late(self) -> bool:
        """Whether nothing may begin any more."""
        return self.until is not None and time.time() >= self.until

    def step(self) -> bool:
        """Collects what ended, begins what can begin; False when nothing runs and nothing may begin."""
        for running in [r for r in self.running if r.process.poll() is not None]:
            self.running.remove(running)
            self.free.append(running.core)
            self._collect(running)
        late = self.late
        while self.free and not late and (job := self._next()) is not None:
            self._begin(job)
        return bool(self.running) or bool(self.waiting) and not late

    def news(self) -> list[str]:
        """One line for every row since the last call."""
        new, self.told = self.rows[self.told :], len(self.rows)
        return [
            f"{r['experiment']}, {r['variant']}, seed {r['seed']}: acceptance length {r['measured'][0]['acceptance_length']:.3f}, "
            f"{r['train_seconds'] / 60:.1f} minutes of training"
            for r in new
        ]

    def stop(self) -> None:
        for running in self.running:
            running.process.terminate()
        for running in self.running:
            running.process.wait()
        self.running = []

    def _next(self) -> Job | None:
        """The first one whose head nobody else is training: that one will find it trained."""
        busy = {key for r in self.running for key in heads(r.job)}
        for i, job in enumerate(self.waiting):
            if not busy & heads(job):
                return self.waiting.pop(i)
        return None

    def _begin(self, job: Job) -> None:
        # the variant's name too: two of one experiment may be the same run under a small budget
        name = f"{job.key}-{job.experiment.name}-{re.sub('[^A-Za-z0-9]+', '-', job.name)}"
        spec, out, log = (
            self.cache / "jobs" / f"{name}.{end}" for end in ("spec.json", "row.json", "log")
        )
        if out.exists():  # ended after its parent did
            self.waiting.insert(0, job) if not self._keep(job, out) else None
            return
        facts = {
            "experiment": job.experiment.name,
            "variant": job.name,
            "seed": job.seed,
            "budget": job.budget_name,
        }
        facts |= {"cache": str(self.cache), "out": str(out), "command": self.command}
        write_atomically(spec, json.dumps(facts) + "\n")
        core = self.free.pop(0)
        where = {
            "JAX_COMPILATION_CACHE_DIR": str((self.cache / "compiled").absolute()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        }
        with _whole(), log.open("w") as file, _on(core):
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.work", str(spec.absolute())],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=Path.cwd(),
                env={
                    **where,
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                },
            )
            self.running.append(
                Running(job, process, core, out, log, job.head_folder(self.cache), time.time())
            )

    def _collect(self, running: Running) -> None:
        if running.process.returncode != 0 or not self._keep(running.job, running.out):
            self.failed.append((running.job, running.log))

    def _keep(self, job: Job, out: Path) -> bool:
        """Appends the row to its experiment's file; then it may go."""
        try:
            row = json.loads(out.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            out.unlink(missing_ok=True)
            return False
        _append(self.results / f"{job.experiment.name}.jsonl", json.dumps(row))
        out.unlink()
        self.rows.append(row)
        return True


@contextlib.contextmanager
def _on(core: int | None) -> Iterator[None]:
    """A process started meanwhile runs on this core alone: it inherits its parent's place. (Popen's preexec_fn would fork in the midst of
    JAX's threads, which may deadlock.)"""
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
def _whole() -> Iterator[None]:
    """Ctrl-C comes behind this block: a process that had begun, but was not yet among those running, would be stopped by nobody."""
    came, numbers = [], (signal.SIGINT, signal.SIGTERM)
    before = [
        signal.signal(number, lambda number, frame: came.append(number)) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _append(path: Path, line: str) -> None:
    """Adds a line, of its own also where a crash tore the last one."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())


def heads(job: Job) -> set[str]:
    """Keys of the heads that a job may have to train."""
    warm = job.warm()
    return {job.head_key} | (heads(warm) if warm else set())
