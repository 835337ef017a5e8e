"""Engines that decode at the same time, each in a thread of its own and with a part of the rows.

    engine = make_engine(target, make_drafter(head, 5), head.params, max_batch=8)

XLA spreads an operation over the processor's cores. Where weights fit the cores' caches, operations
take some 0.1 ms, and handing half of each to another core and waiting for it costs as much as it
saves: a step of 8 rows takes two cores 10.7 ms and one core 11.7. Two engines of 4 rows, each with
an operation of its own at any time, take 7.2 ms each (LOG.md, "one engine for each core"), and
their matrices can be in the layout that one core reads fastest (`fastest_layout`). Where weights
come from memory, each engine reads all of them, and one engine is faster.

The tokens of a request do not depend on the rows beside it, and so not on the number of engines: in
float32 up to ties of the largest logits that are closer than rounding. Which rows are beside it
depends on times.

On several devices of an accelerator each group of devices that has a whole target gets an engine
(`device_groups`).

Threads have their own contexts of JAX (`jax.enable_x64` and the like, but for `default_device`):
set the configuration for the whole process, or ask for one engine.
"""

import collections
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import jax

from peagle_jax.decode.base_engine import BaseEngine
from peagle_jax.decode.device_groups import DeviceGroup, device_groups
from peagle_jax.decode.drafters import METHODS, Drafter
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.engine_checks import check_at_least_1, check_options
from peagle_jax.decode.engine_stats import EngineStats
from peagle_jax.decode.fastest_layout import in_fastest_layout
from peagle_jax.decode.requests import Output, Request
from peagle_jax.decode.rows import Row, output_without_answer
from peagle_jax.decode.stop_strings import Detokenizer
from peagle_jax.kernels.launch import platform
from peagle_jax.targets.sharding import mesh_of
from peagle_jax.types import Device, InputError, Model

# With larger weights one engine is faster. Of 58 MB one and two take the same time with 8 rows, and
# of 400 MB two take 1.5 times as long (Xeon; LOG.md, "one engine for each core"). Of 72 MB, in the
# layout that one core reads fastest, two take 0.8 times as long (EPYC; LOG.md, 2026-11-28).
MOST_WEIGHT_BYTES = 96 << 20
# Measured with two cores. More than four engines would each have few rows.
MOST_THREADS = 4
# Steps of an engine before `ParallelEngine.step` may hand it other requests, so that a process that
# is interrupted does not wait for long answers.
MOST_STEPS = 64


class EngineOptions(TypedDict, total=False):
    """Options of `Engine`, which says what they mean."""

    num_tree_nodes: int | None
    adaptive_k: bool
    step_times: Path | None
    cache_size: int | None
    prefill_chunk: int | None
    sliding_cache: bool
    sample_drafts: bool
    max_steps: int | None
    tokenizer: Detokenizer | None


def make_engine(
    target: Model,
    drafter: Drafter | None = None,
    draft_params: Any = None,
    *,
    max_batch: int = 8,
    num_threads: int | None = None,
    donate_models: bool = False,
    **options: Unpack[EngineOptions],
) -> BaseEngine:
    """The engine, or engines side by side, that decode `max_batch` requests together fastest.

    Args:
      target: as of `Engine`. One on a mesh with an axis "data" is decoded by an engine for each
        group of devices along it, which share the rows.
      drafter, draft_params, max_batch, options: as of `Engine`.
      num_threads: engines that share the rows on one device; None for `default_threads`.
      donate_models: free the target's and the head's matrices where the engines have copies in
        another layout, which they never have on a mesh. Nobody else may use these models then.

    Raises:
      InputError: as `Engine`; or `num_threads` is below 1, or above 1 for a target on several
        devices.
    """
    check_options(drafter, {**options, "max_batch": max_batch})  # before models are donated
    check_at_least_1("num_threads", num_threads, 1)
    if num_threads is None:
        num_threads = default_threads(target, drafter, draft_params, max_batch)
    num_threads = min(num_threads, max_batch)
    if num_threads > 1 and mesh_of(target.params) is not None:
        rule = "a target on several devices is not divided among threads"
        raise InputError("num_threads", rule, num_threads, "leave out num_threads")
    groups = device_groups(target, draft_params)[:max_batch]
    if len(groups) > 1:
        return _engines_on(groups, drafter, max_batch, options)
    target, draft_params = groups[0].target, groups[0].draft_params
    rows = _divided(max_batch, num_threads)
    if platform() == "cpu" and mesh_of(target.params) is None:
        num_drafts = options.get("num_tree_nodes") or (drafter.k if drafter else 0)
        target, draft_params = in_fastest_layout(
            target,
            drafter,
            draft_params,
            rows=rows[0],
            num_places=1 + num_drafts,
            num_threads=num_threads,
            donate=donate_models,
        )
    models = target, drafter, draft_params
    if num_threads == 1:
        return Engine(*models, max_batch=max_batch, **options)
    engines = [Engine(*models, max_batch=n, num_threads=num_threads, **options) for n in rows]
    return ParallelEngine(engines)


def _engines_on(
    groups: Sequence[DeviceGroup], drafter: Drafter | None, max_batch: int, options: EngineOptions
) -> "ParallelEngine":
    """An engine for each group. The devices of a CPU, which are simulated, share its memory."""
    sharing = len(groups) if platform() == "cpu" else 1
    rows = _divided(max_batch, len(groups))
    engines = [
        Engine(
            group.target,
            drafter,
            group.draft_params,
            max_batch=num_rows,
            num_threads=sharing,
            **options,
        )
        for group, num_rows in zip(groups, rows, strict=True)
    ]
    return ParallelEngine(engines, [group.device for group in groups])


def _divided(max_batch: int, num_engines: int) -> list[int]:
    """The rows of each engine."""
    return [len(range(i, max_batch, num_engines)) for i in range(num_engines)]


def default_threads(
    target: Model, drafter: Drafter | None, draft_params: Any, max_batch: int
) -> int:
    """How many engines to use: one for each core where that pays, else one."""
    if platform() != "cpu" or mesh_of(target.params) is not None:
        return 1
    if drafter is not None and not isinstance(drafter, tuple(METHODS.values())):
        return 1  # somebody else's, which may not expect it
    if weight_bytes(target, draft_params) > MOST_WEIGHT_BYTES:
        return 1
    return max(1, min(num_cores(), max_batch, MOST_THREADS))


def weight_bytes(target: Model, draft_params: Any) -> int:
    """Bytes of all arrays of both models."""
    arrays = jax.tree.leaves((target.params, draft_params))
    return sum(x.nbytes for x in arrays if hasattr(x, "nbytes"))


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ParallelEngine(BaseEngine):
    """Engines over the same models, each in a thread of its own, as one.

    A request goes to an engine when that has a free row, so that none waits while another has
    nothing to do.

    Args:
      engines: which nobody else uses; equal but for `max_batch`, and for their devices.
      devices: the first device of each, where each has its own; None: all are on the default one.
    """

    def __init__(
        self, engines: Sequence[Engine], devices: Sequence[Device | None] | None = None
    ) -> None:
        super().__init__()
        self.engines = tuple(engines)
        self._device_of = dict(zip(engines, devices or [None] * len(engines), strict=True))
        self._share_memory = devices is None or platform() == "cpu"
        self.max_batch = sum(engine.max_batch for engine in engines)
        self._max_steps: int | None = None
        self.max_steps = engines[0].max_steps
        # requests that no engine has yet; and which engine has a request. Other threads add and
        # cancel requests, so that a lock is held where one passes from here to an engine.
        self._waiting: collections.deque[Row] = collections.deque()
        self._engine_of: dict[int, Engine] = {}
        self._lock = threading.Lock()
        # is done when a request was added or cancelled since requests were handed out
        self._news: concurrent.futures.Future[None] = concurrent.futures.Future()
        # the steps that are under way, by engine
        self._running: dict[concurrent.futures.Future[list[Output]], Engine] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(len(engines), "peagle-decode")

    @property
    def max_steps(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._max_steps

    @max_steps.setter
    def max_steps(self, value: int | None) -> None:
        self._max_steps = value
        for engine in self.engines:
            engine.max_steps = min(value or MOST_STEPS, MOST_STEPS)

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> int:
        elsewhere = sum(engine.held_bytes for engine in self.engines[1:] if self._share_memory)
        row = self.engines[0].check(request, elsewhere)  # which counts the requests of all
        if not self._share_memory:  # the other devices may have less
            for engine in self.engines[1:]:
                engine.check_memory([row.request])
        with self._lock:
            self._waiting.append(row)
            self._wake()
        return row.id

    def cancel(self, request_id: int) -> None:
        with self._lock:
            if engine := self._engine_of.get(request_id):
                engine.cancel(request_id)
            for row in [row for row in self._waiting if row.id == request_id]:
                self._waiting.remove(row)
                self._kept.append(output_without_answer(row, "cancelled"))
            self._wake()

    def _wake(self) -> None:
        """Ends a step that waits for engines, so that one with nothing to do gets the request."""
        if not self._news.done():
            self._news.set_result(None)

    def check_memory(self, requests: Sequence[Request]) -> None:
        if self._share_memory:
            return self.engines[0].check_memory(requests)
        longest = sorted(requests, key=lambda request: len(request.prompt) + request.max_new_tokens)
        for engine in self.engines:  # each has a part of them, at worst the longest
            engine.check_memory(longest[-engine.max_batch :])

    @property
    def models(self) -> tuple[Model, Any]:
        return self.engines[0].models

    @property
    def has_work(self) -> bool:
        here = self._waiting or self._running or self._kept
        return bool(here or any(engine.has_work for engine in self.engines))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(engine.num_waiting for engine in self.engines)

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines)

    @property
    def stats(self) -> EngineStats:
        parts = [engine.stats for engine in self.engines]
        return EngineStats.of_all(parts, compile_apart=any(self._device_of.values()))

    # ------------------------------------------------------------ a step

    def step(self) -> list[Output]:
        under_way = self._running.values()
        idle = [engine for engine in self.engines if engine not in under_way]
        with self._lock:
            outputs, self._kept = self._kept, []
            self._news = concurrent.futures.Future()
            self._hand_out(idle)
            others_wait = bool(self._waiting)
        default = cast(Any, jax.config).jax_default_device  # may be set for this thread alone
        for engine in idle:
            engine.others_wait = others_wait
            if engine.has_work:
                device = self._device_of[engine] or default
                step_on = contextvars.copy_context().run, _step_on, device, engine
                try:
                    self._running[self._threads.submit(*step_on)] = engine
                except RuntimeError:
                    # the main thread has ended, and with it all pools; another one still decodes
                    outputs += _step_on(device, engine)
        if not outputs and self._running:
            outputs = self._finished()
        with self._lock:
            for output in outputs:
                if output.answer is not None:
                    self._engine_of.pop(output.request_id, None)
        return outputs

    def _finished(self) -> list[Output]:
        """What the engines say that end a step first. An error is raised after what others say.

        Nothing where a request was added meanwhile.
        """
        outputs: list[Output] = []
        ends: list[concurrent.futures.Future[Any]] = [*self._running, self._news]
        concurrent.futures.wait(ends, return_when="FIRST_COMPLETED")
        done = {future for future in self._running if future.done()}
        failed = [future for future in done if future.exception()]
        for future in done.difference(failed):
            del self._running[future]
            outputs += future.result()
        if failed and not outputs:  # else the next call raises
            del self._running[failed[0]]
            failed[0].result()
        return outputs

    def _hand_out(self, idle: Sequence[Engine]) -> None:
        """Gives requests that wait to engines with free rows, to the emptiest first.

        Also those that such an engine has and cannot begin yet, for it reads long prompts.
        """
        if given_back := [row for engine in idle for row in engine.give_back()]:
            for row in given_back:
                del self._engine_of[row.id]
            in_order = sorted([*given_back, *self._waiting], key=lambda row: row.id)
            self._waiting = collections.deque(in_order)
        free = {engine: engine.max_batch - engine.num_taken for engine in idle}
        while self._waiting and free:
            engine = max(free, key=lambda engine: free[engine])
            if free[engine] < 1:
                return
            row = self._waiting.popleft()
            self._engine_of[row.id] = engine
            engine.enqueue(row)
            free[engine] -= 1


def _step_on(device: Any, engine: Engine) -> list[Output]:
    """A step of an engine, mostly in a thread of its own, which has no default device yet."""
    with jax.default_device(device):
        return engine.step()
