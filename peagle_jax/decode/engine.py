"""Continuous batching: requests enter and leave a batch while others are decoded.

    engine = Engine(target, make_drafter(head, 5), head.params, max_batch=8)
    for prompt in prompts:
        engine.add(Request(prompt=prompt))
    while engine.has_work:
        for output in engine.step():
            ...

Every row of the batch holds one request. `Engine.step` reads a chunk of the prompts that wait, and
then decodes until a row is done. Waiting requests take the places of rows that are done; where
none waits, the rows that are left go on in a smaller batch.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from peagle_jax.decode import growth
from peagle_jax.decode.adaptive_k import KChooser, candidates
from peagle_jax.decode.answer_text import AnswerText
from peagle_jax.decode.base_engine import BaseEngine
from peagle_jax.decode.batch import Batch
from peagle_jax.decode.drafters import Drafter
from peagle_jax.decode.engine_checks import can_go_on, check_options
from peagle_jax.decode.engine_stats import EngineStats
from peagle_jax.decode.memory import CacheMemory
from peagle_jax.decode.prefill import (
    cache_sizes,
    chunk_size,
    distinct_prompts,
    next_chunk,
    pad_prompts,
    prefill,
)
from peagle_jax.decode.request_queue import RequestQueue
from peagle_jax.decode.requests import Output, Request, check_request
from peagle_jax.decode.row_outputs import output_of_row
from peagle_jax.decode.rows import Row, output_without_answer, row_options, sampling_kind
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.decode.step_times import head_digest, open_step_times
from peagle_jax.decode.stop_strings import Detokenizer, end_tokens, first_line
from peagle_jax.decode.switching import LOOKBACK
from peagle_jax.layers import full_precision
from peagle_jax.layers.matrix_layouts import layout_of
from peagle_jax.targets.sharding import MODEL, device_of, mesh_of
from peagle_jax.types import DecodeState, Model

# Tokens of each prompt in one forward where nothing else is asked for. Rows wait for one forward.
PREFILL_CHUNK = 512
# Steps that other requests take between two chunks of a prompt.
STEPS_PER_CHUNK = 4
# Steps between two looks at the text of requests that end with a string.
STEPS_PER_STOP_CHECK = 8
NO_LIMIT = 2**31 - 1  # steps


class Engine(BaseEngine):
    """Decodes requests, up to `max_batch` at a time. Drafting does not change the target's output.

    The tokens of a request depend on the request, and not on what is decoded beside it: in float32
    up to ties of the largest logits that are closer than rounding. With `adaptive_k` this holds for
    greedy requests: which tokens a seed draws depends on K, and K on all requests.

    Args:
      target: from `load_target`, with the draft head's aux hidden state layers.
      drafter: what proposes tokens, from `make_drafter`; None for plain decoding.
      draft_params: the drafter's parameters.
      num_tree_nodes: drafts of a tree that is verified at once, in the place of a chain of K: the
        likeliest paths by what a P-EAGLE head drafts at its K positions, or for requests that
        sample ones that are drawn from that.
      adaptive_k: choose again and again how many tokens to draft, from 0 to the drafter's K, by
        what was accepted, or a calibrated confidence head expected, and by a step's seconds.
      step_times: folder where these seconds are kept; None for ~/.cache/peagle_jax/step_times.
      max_batch: requests that are decoded together.
      cache_size: positions that a request may take, prompt + new tokens + K; None for as many as
        the target's context has.
      prefill_chunk: the most tokens of each prompt in one forward, which reads the prompts that
        enter together side by side; None for whole prompts.
      sliding_cache: ring caches for layers with a sliding window, of window + chunk positions.
      sample_drafts: at a temperature above 0, sample the drafts or draft argmaxes (of a tree: the
        likeliest paths).
      max_steps: decoding steps before `step` returns; None: until a request is done.
      tokenizer: the target's, for stop strings and for answers as text.
      num_threads: engines that decode at the same time, this one included: a step's seconds, which
        `adaptive_k` keeps, depend on it. `make_engine` makes such engines.

    Raises:
      InputError: `max_batch`, `prefill_chunk`, `max_steps` or `num_tree_nodes` is below 1; a tree
        is asked for of a drafter that is not parallel, or that has synthetic rates; or an adaptive
        K with a tree, without a draft head, or with a confidence head without calibration.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None = None,
        draft_params: Any = None,
        *,
        num_tree_nodes: int | None = None,
        adaptive_k: bool = False,
        step_times: Path | None = None,
        max_batch: int = 8,
        cache_size: int | None = None,
        prefill_chunk: int | None = PREFILL_CHUNK,
        sliding_cache: bool = False,
        sample_drafts: bool = True,
        max_steps: int | None = None,
        tokenizer: Detokenizer | None = None,
        num_threads: int = 1,
    ) -> None:
        about = {"max_batch": max_batch, "prefill_chunk": prefill_chunk, "max_steps": max_steps}
        about |= {"num_tree_nodes": num_tree_nodes, "adaptive_k": adaptive_k}
        check_options(drafter, about)
        self.target, self.tokenizer = target, tokenizer
        self.max_batch, self.cache_size, self.max_steps = max_batch, cache_size, max_steps
        self._stats = EngineStats()
        self.spec = DecodeSpec(
            target=target.graph,
            target_config=target.config,
            drafter=drafter,
            sample_drafts=sample_drafts,
            num_nodes=num_tree_nodes,
            lookback=max(LOOKBACK, drafter.k + 1) if adaptive_k and drafter else 0,
            chunk=PREFILL_CHUNK if sliding_cache and prefill_chunk is None else prefill_chunk,
            ring_cache_size=(cache_size or target.config.context) if sliding_cache else None,
            matrix_layout=layout_of(target.params),
        )
        self._mesh = mesh_of(target.params)
        if self._mesh is not None:
            # each of several processes may hold another part of the target; all have the head
            everywhere = NamedSharding(self._mesh, PartitionSpec())
            draft_params = jax.device_put(draft_params, everywhere)
        self._batch = Batch(self.spec, target.params, draft_params, max_batch)
        parts = 1 if self._mesh is None else self._mesh.shape[MODEL]
        about = self.spec, max_batch, parts, num_threads
        self._memory = CacheMemory(*about, device_of(target.params))
        self.chooser = KChooser(self.spec.k) if adaptive_k else None
        if adaptive_k:
            about = self.spec, self._batch.params
            self._step_times = open_step_times(*about, step_times, num_threads)
            self._head = head_digest(draft_params)
            self._sampling: str | None = None  # how rows sampled when K was last chosen
        self._waiting = RequestQueue()
        # requests whose prompts are being read, and what reads them
        self._entering: list[Row] = []
        self._prefill: Generator[None, None, DecodeState] | None = None
        super().__init__()
        self._new_ids = itertools.count()
        self.others_wait = False  # requests that this engine may get next
        self._more_to_come = False  # after the last step

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> int:
        row = self.check(request)
        self.enqueue(row)
        return row.id

    def check(self, request: Request, held_elsewhere: int = 0) -> Row:
        """The row of a request that can be served. InputError as of `add`.

        Args:
          held_elsewhere: bytes of caches of other engines.
        """
        number = next(self._new_ids)
        if request.seed is None:
            request = dataclasses.replace(request, seed=number)
        where = request.name or f"request {number}"
        check_request(where, request, self.target.config, self.spec.k, self.cache_size)
        # a copy: the caller's list may change
        request = dataclasses.replace(request, prompt=tuple(map(int, request.prompt)))
        stop_ids = end_tokens(where, request, self.target.config.stop_ids, self.tokenizer)
        with self._on_devices():  # on a mesh caches may be of another dtype
            self._memory.check([request], self.held_bytes + held_elsewhere)
        text = None if self.tokenizer is None else AnswerText(self.tokenizer, request)
        return Row(number, request, stop_ids, text)

    def enqueue(self, row: Row) -> None:
        """Takes in a row that `check` made, of this engine or of one like it."""
        self._waiting.add(row)

    def give_back(self) -> list[Row]:
        """Takes back what `enqueue` got and what does not enter yet, for another engine."""
        return self._waiting.take_all()

    def check_memory(self, requests: Sequence[Request]) -> None:
        with self._on_devices():
            self._memory.check(requests, self.held_bytes)

    def cancel(self, request_id: int) -> None:
        self._waiting.cancel(request_id)

    @property
    def models(self) -> tuple[Model, Any]:
        return self.target, self._batch.params[1]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._entering or self._kept or self._batch.running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._batch.running)

    @property
    def num_taken(self) -> int:
        """Requests that have a row, or will have one next."""
        return len(self._waiting) + len(self._entering) + self.num_running

    @property
    def stats(self) -> EngineStats:
        return self._stats

    # ------------------------------------------------------------ a step

    def step(self) -> list[Output]:
        self._kept += self._leave_queue()
        try:
            with self._on_devices():
                self._read_and_decode()
        except BaseException as error:  # Ctrl-C, too
            is_bearable = can_go_on(error)
            if self._batch.running and (is_bearable or not self._batch.is_intact):
                self._kept += self._batch.give_up(f"decoding failed: {first_line(error)}")
            if not is_bearable or not self._kept:  # nor where nothing would change
                raise
        self._waiting.forget_cancelled([*self._entering, *filter(None, self._batch.rows)])
        outputs, self._kept = self._kept, []
        if self.chooser is not None and self._sampling is not None and not self.has_work:
            self._step_times.keep_drafts(self._sampling, self._head, self.chooser)
        return outputs

    def _read_and_decode(self) -> None:
        """Reads a chunk of prompts, and decodes; what is new in rows goes to the outputs."""
        is_one_done = is_refused = False
        before = self._batch.num_rows, self._batch.slots, self._batch.running
        if self._prefill is None:
            is_refused = not self._begin_prefill()
        if self._prefill is not None:
            start = time.perf_counter()
            self._read_chunk()
            self._stats.prefill_seconds += time.perf_counter() - start
            is_one_done |= self._collect()
        if self._batch.running:
            if self.chooser is not None:
                self._choose_k(self.chooser)
            self._decode()
            is_one_done |= self._collect()
        more_to_come = bool(self._waiting or self.others_wait or self._prefill is not None)
        after = self._batch.num_rows, self._batch.slots, self._batch.running
        has_changed = before != after or more_to_come != self._more_to_come
        self._more_to_come = more_to_come
        if not self._batch.running or is_refused or (has_changed and not more_to_come):
            self._batch.shrink()  # spare rows take memory that others wait for
        elif self._prefill is None and is_one_done:
            self._batch.shrink_caches()  # a long request may have left

    @contextlib.contextmanager
    def _on_devices(self) -> Iterator[None]:
        """The target's precision, and the mesh that its parameters are spread over."""
        on_mesh = contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)
        with full_precision(self.target), on_mesh:
            yield

    def _leave_queue(self) -> list[Output]:
        """Answers requests that were cancelled before their prompt was read."""
        leaving = self._waiting.take_cancelled(self._entering)
        if self._entering and self._entering[0] in leaving:
            self._prefill, self._entering = None, []
        return [output_without_answer(row, "cancelled") for row in leaving]

    def _begin_prefill(self) -> bool:
        """Takes requests that can enter now from the queue, to read their prompts.

        Returns:
          False where one must wait although there is a free row.
        """
        running = [row.request for row in self._batch.rows if row is not None]
        group = self._waiting.first(self.max_batch - len(running))
        if not group:
            return True
        requests = [row.request for row in group]
        group = group[: self._memory.num_allowed(requests, running, self._held_by_rows())]
        if not group:
            return False
        error = None
        try:
            reading = self._reading(group)  # after Ctrl-C they still wait
        except Exception as failure:
            reading, error = None, failure
        self._entering, self._prefill = [] if error else group, reading
        self._waiting.remove(group)
        if error is not None:
            self._fail(group, error)
        return True

    def _fail(self, rows: Sequence[Row], error: BaseException) -> None:
        """Answers requests whose prompts cannot be read; raises what is no lack of memory."""
        why = f"reading the prompt failed: {first_line(error)}"
        self._kept += [output_without_answer(row, "error", why) for row in rows]
        if not can_go_on(error) or not self._batch.is_intact:
            raise error

    def _reading(self, group: Sequence[Row]) -> Generator[None, None, DecodeState]:
        """What reads the prompts of a group. A prompt of several requests is read once."""
        num_rows, slots = self._memory.shape([row.request for row in group])
        distinct, rows = distinct_prompts([row.request.prompt for row in group], num_rows)
        num_read = growth.num_rows(len(distinct), num_rows)
        prompts, lengths = pad_prompts(distinct, num_read)
        longest = prompts.shape[1]
        options = row_options([*group, *[None] * (num_rows - len(group))], self.target.config.vocab)
        chunk = chunk_size(self.spec, longest)
        sizes = cache_sizes(chunk, longest, slots)
        self._stats.programs.update(("prefill", num_read, size, chunk) for size in sizes)
        self._stats.programs.add(("first tokens", num_rows, slots, sampling_kind(options)))
        models = self._batch.params
        return prefill(self.spec, slots, *models, prompts, lengths, options, prompt_of_answer=rows)

    def _held_by_rows(self) -> int:
        """Bytes of the caches that the batch has now."""
        return self._memory.size(len(self._batch.rows), self._batch.slots)

    @property
    def held_bytes(self) -> int:
        """Bytes of all caches of this engine: of its rows, and of prompts that are being read."""
        entering = [row.request for row in self._entering]
        read = self._memory.size(*self._memory.shape(entering)) if entering else 0
        return self._held_by_rows() + read

    def _read_chunk(self) -> None:
        """Reads one chunk; after the last, the requests are rows of the batch.

        Where the memory does not suffice, these requests alone fail.
        """
        assert self._prefill is not None
        self._stats.num_chunks += 1
        entering = self._entering
        try:
            state = next_chunk(self._prefill)
            if state is None:
                return
            self._batch.make_places(len(entering), state)
            self._batch.insert(entering, state)
        except BaseException as error:  # Ctrl-C, too: what reads the prompts has ended with it
            self._prefill, self._entering = None, []
            placed = {row.id for row in self._batch.rows if row is not None}
            self._fail([row for row in entering if row.id not in placed], error)
        self._prefill, self._entering = None, []

    def _decode(self) -> None:
        requests = [row.request for row in self._batch.rows if row is not None]
        limits = [self.max_steps or NO_LIMIT]
        if any(request.stream for request in requests):
            limits.append(1)
        if any(request.stop for request in requests):
            limits.append(STEPS_PER_STOP_CHECK)
        if self._prefill is not None:
            limits.append(STEPS_PER_CHUNK)
        if self.chooser is not None:
            limits.append(self.chooser.steps_left)
        begin = time.perf_counter()
        self._batch.make_room()  # which may leave rows out
        shape = self._batch.shape
        before = None if self.chooser is None else self._batch.drafts()
        is_compiled = self.chooser is not None and self._batch.has_compiled_steps(self._batch.k)
        num_steps = self._batch.decode(min(limits))
        end = time.perf_counter()
        self._stats.decode_seconds += end - begin
        k, program = self._batch.k, ("decode", *self._batch.shape)
        if self.chooser is not None and before is not None:
            program = *program, k
            seen = self._batch.drafts().since(before)
            self.chooser.observe(num_steps, seen.num_drafts, seen.accepted, seen.expected)
            self._step_times.count(*shape, num_steps, end - begin if is_compiled else 0.0)
            self._stats.measure_seconds += time.perf_counter() - end
        self._stats.num_steps += num_steps
        self._stats.steps_by_k[k] += num_steps
        self._stats.programs.add(program)

    def _choose_k(self, chooser: KChooser) -> None:
        """Lets the batch draft as many tokens as pay."""
        self._batch.make_room()  # which may leave rows out
        start = time.perf_counter()
        ks, measure = candidates(self.spec.k), self._batch.step_seconds
        is_compiled = self._batch.has_compiled_steps
        seconds = self._step_times.get(ks, *self._batch.shape, measure, is_compiled)
        if self._sampling is None:
            self._step_times.recall_drafts(self._batch.shape[-1], self._head, chooser)
        self._sampling = self._batch.shape[-1]
        self._stats.measure_seconds += time.perf_counter() - start
        self._batch.change_k(chooser.choose(seconds))

    def _collect(self) -> bool:
        """Adds what is new in the rows to the outputs. Requests that are done leave theirs.

        Returns:
          Whether one is done.
        """
        is_one_done = False
        if self._batch.running:
            self._batch.numbers()  # waits for the device
        now = time.perf_counter()
        for i in self._batch.running:
            row = self._batch.rows[i]
            assert row is not None
            output = output_of_row(
                self._batch,
                i,
                now,
                is_cancelled=self._waiting.is_cancelled(row.id),
                k_changes=self.chooser is not None,
            )
            if output is None:
                continue
            row.num_reported += len(output.new_token_ids)
            self._kept.append(output)
            if output.answer is not None:
                is_one_done = True
                self._batch.leave(i)
        return is_one_done
