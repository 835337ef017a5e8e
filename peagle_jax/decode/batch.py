"""The rows that are decoded together: which request is in which, and their state on the device."""

import dataclasses
import math
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from peagle_jax.decode import growth, loop, switching
from peagle_jax.decode.first_call import first_call, was_called
from peagle_jax.decode.requests import Generation, Output, Request
from peagle_jax.decode.rows import (
    Row,
    WrittenTokens,
    num_reserved,
    num_stop_ids,
    output_without_answer,
    row_options,
    sampling_kind,
)
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.types import DecodeState, Params, RowOptions

# A batch is made smaller if a row may still write as many tokens. Copying the rows takes about a
# step, and a program for the smaller batch may have to be compiled.
MIN_TOKENS_LEFT = 16
# A step's time is measured by steps of so many seconds together, and of at most so many.
TIMED_SECONDS, MOST_TIMED_STEPS = 0.006, 16


@dataclasses.dataclass(frozen=True)
class RowNumbers:
    """The small arrays of a `DecodeState`, on the host. `position` is the cache's length."""

    done: Bool[np.ndarray, " B"]
    failed: Bool[np.ndarray, " B"]
    length: Int[np.ndarray, " B"]
    position: Int[np.ndarray, " B"]
    num_drafts: Int[np.ndarray, " B"]
    num_draft_tokens: Int[np.ndarray, " B"]
    num_accepted_per_pos: Int[np.ndarray, "B K"]
    num_expected_per_pos: Float[np.ndarray, "B K"] | None = None


@dataclasses.dataclass(frozen=True)
class DraftCounts:
    """What became of the drafts of a batch, or of some of its steps.

    Attributes:
      num_drafts: steps that drafted, of all rows.
      accepted: in how many of them the draft at each position was accepted.
      expected: in how many it should have been, by a calibrated confidence head; None without one.
    """

    num_drafts: int
    accepted: Int[np.ndarray, " K"]
    expected: Float[np.ndarray, " K"] | None

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """Of the steps after an earlier count."""
        expected = None
        if self.expected is not None and before.expected is not None:
            expected = np.maximum(self.expected - before.expected, 0)
        num_drafts = self.num_drafts - before.num_drafts
        return DraftCounts(num_drafts, self.accepted - before.accepted, expected)


class Batch:
    """Rows, of which some hold a request, and their state.

    Args:
      spec: how they are decoded. Its K is the largest for `change_k`.
      target_params: of the target.
      draft_params: of the drafter.
      max_rows: the most rows.

    Attributes:
      rows: what is in each row; None for a free one.
    """

    def __init__(
        self, spec: DecodeSpec, target_params: Params, draft_params: Any, max_rows: int
    ) -> None:
        self.spec, self.max_rows = spec, max_rows
        self.params = target_params, draft_params
        self._step_spec = spec  # of the next step: `spec`, unless `change_k` was called
        self._call_seconds: dict[Hashable, float] = {}  # the least, by shape and stop ids
        self._timed_steps: dict[Hashable, int] = {}  # by program
        self.rows: list[Row | None] = []
        self._state: DecodeState | None = None
        self._options: RowOptions | None = None
        self._numbers: RowNumbers | None = None

    @property
    def state(self) -> DecodeState:
        """The state on the device. There is one where a row holds a request."""
        assert self._state is not None
        return self._state

    @property
    def running(self) -> list[int]:
        """The rows that hold a request."""
        return [i for i, row in enumerate(self.rows) if row is not None]

    @property
    def num_rows(self) -> int:
        """Rows, whether they hold a request or not."""
        return len(self.rows)

    @property
    def slots(self) -> int:
        """Slots of the caches; 0 without a state."""
        state = self._state  # once: another thread may ask while it changes
        return 0 if state is None else state_shape(state)[1]

    @property
    def k(self) -> int:
        """Drafts of the next step."""
        return self._step_spec.k

    @property
    def shape(self) -> tuple[int, int, str]:
        """What a program is compiled for: rows, slots, and how the rows sample."""
        assert self._options is not None
        return len(self.rows), self.slots, sampling_kind(self._options)

    def numbers(self) -> RowNumbers:
        """The small arrays of the state, read once after every change."""
        if self._numbers is None:
            state = self.state
            arrays = (state.done, state.failed, state.length, state.cache.length)
            counters = (state.num_drafts, state.num_draft_tokens, state.num_accepted_per_pos)
            if state.num_expected_per_pos is not None:
                counters = (*counters, state.num_expected_per_pos)
            self._numbers = RowNumbers(*on_host((*arrays, *counters)))
        return self._numbers

    def drafts(self) -> DraftCounts:
        """What became of the drafts of all rows so far."""
        numbers = self.numbers()
        accepted, expected = numbers.num_accepted_per_pos, numbers.num_expected_per_pos
        return DraftCounts(
            num_drafts=int(numbers.num_drafts.sum()),
            accepted=accepted.sum(axis=0),
            expected=None if expected is None else expected.sum(axis=0),
        )

    def tokens(self, i: int) -> WrittenTokens:
        """What was written in a row so far, of which lists are made of what is new alone."""
        row, length = self.rows[i], self.numbers().length[i]
        assert row is not None
        written, known = row.written, len(row.written.token_ids)
        if known < length:
            state, new = self.state, slice(known, length)
            arrays = state.output, state.is_draft, state.logprobs
            begin_copies(arrays)
            token_ids, is_draft, logprobs = (np.asarray(x)[i, new].tolist() for x in arrays)
            written.is_draft[known:] = is_draft
            written.logprobs[known:] = logprobs
            written.token_ids += token_ids  # last: Ctrl-C before it leaves nothing out
        return written

    def answer(
        self,
        row: int,
        reason: str,
        num_tokens: int,
        text: str | None,
        error: str | None = None,
        stop_reason: int | str | None = None,
    ) -> Generation:
        """The answer in a row.

        Args:
          reason: why it ends.
          num_tokens: of `self.tokens`, those of the answer.
          text: what the tokens spell.
          error: what failed.
          stop_reason: what of the request ended it.
        """
        numbers, request, written = self.numbers(), self._request(row), self.tokens(row)
        return Generation(
            prompt_token_ids=list(request.prompt),
            output_token_ids=written.token_ids[:num_tokens],
            finish_reason=reason,
            is_draft=written.is_draft[:num_tokens],
            num_drafts=int(numbers.num_drafts[row]),
            num_draft_tokens=int(numbers.num_draft_tokens[row]),
            num_accepted_per_pos=numbers.num_accepted_per_pos[row].tolist(),
            logprobs=written.logprobs[:num_tokens] if request.logprobs else None,
            text=text,
            error=error,
            stop_reason=stop_reason,
        )

    @property
    def is_intact(self) -> bool:
        """Whether the state is all there, and fits the rows.

        A failure may leave arrays that were given away, or that a program failed to compute.
        """
        if self._state is None:
            return not self.running
        if any(x.is_deleted() for x in jax.tree.leaves(self._state)):
            return False
        try:
            jax.block_until_ready(self._state)
        except Exception:
            return False
        options = self._options
        counts = len(self.rows), len(self._state.done), options and len(options.max_new_tokens)
        return len(set(counts)) == 1

    def give_up(self, why: str) -> list[Output]:
        """Answers all rows with an error, and with what they have, and begins anew."""
        outputs, is_intact = [], self.is_intact
        for i in self.running:
            row = self.rows[i]
            assert row is not None
            if not is_intact:
                outputs.append(output_without_answer(row, "error", why))
                continue
            token_ids = self.tokens(i).token_ids
            answer = self.answer(i, "error", len(token_ids), None, why)
            new = token_ids[row.num_reported :]
            outputs.append(Output(row.id, new, answer, time.perf_counter()))
        self.rows, self._state, self._options, self._numbers = [], None, None, None
        return outputs

    def make_places(self, num_entering: int, new: DecodeState) -> None:
        """Makes room for rows of `new`. Rows are no more than needed where slots become more."""
        if running := self.running:
            num_rows = growth.num_rows(len(running) + num_entering, self.max_rows)
            slots = max(self.slots, new.output.shape[1])
            self._resize(num_rows if slots > self.slots else max(num_rows, len(self.rows)), slots)
            jax.block_until_ready(self._state)  # so that a failure is known now

    def insert(self, entering: Sequence[Row], new: DecodeState) -> None:
        """Takes in requests whose prompts were read, after `make_places`: first rows of `new`."""
        if not self.running:
            rows = [*entering, *[None] * (len(new.done) - len(entering))]
            state, options = new, self._options_of(rows)
        else:
            state, rows = self.state, list(self.rows)
            places = [i for i, row in enumerate(rows) if row is None][: len(entering)]
            for place, row in zip(places, entering, strict=True):
                rows[place] = row
            options = self._options_of(rows)  # first: it may lack memory, and rows are donated next
            sizes = state_shape(state), state_shape(new)
            for source, place in enumerate(places):
                with first_call("put_row", self.spec, *sizes):
                    state = growth.put_row(state, new, np.int32(source), np.int32(place))
        self._state, self.rows, self._options, self._numbers = state, rows, options, None

    def decode(self, max_steps: int) -> int:
        """Takes steps until a further row is done, and returns how many."""
        self.make_room()
        num_free = len(self.rows) - len(self.running)
        num_steps = self._take_steps(self._step_spec, num_free + 1, max_steps)
        return int(np.asarray(num_steps))

    def change_k(self, k: int) -> None:
        """Lets the next steps draft `k` tokens; with 0 they keep their tokens for the head."""
        if k == self.k:
            return
        self.make_room()
        assert self.spec.drafter is not None
        if 0 < k < self.k or not self.k:
            # of other steps the head may have more tokens to read than those with `k` pass to it
            with first_call("change_k", self.spec, *state_shape(self.state)):
                self._state = switching.change_k(self.spec.drafter, self.params[1], k, self.state)
            self._numbers = None
        self._step_spec = self.spec.with_k(k)

    def step_seconds(self, k: int) -> float:
        """Seconds of a step with `k` drafts, measured with the rows as they are; a first call
        compiles.

        Rows that are done cost as much as others, and steps leave them as they are. For the time
        of these steps all are. What the call costs is not counted: 0.3 to 2 ms on a CPU, whatever
        number of steps it takes.
        """
        self.make_room()
        spec = self.spec.with_k(k)
        state = self.state
        names = ("done", "tokens", "aux_hidden_states", "count")
        kept = {name: jnp.copy(getattr(state, name)) for name in names}
        all_done, count = jnp.ones_like(state.done), jnp.ones_like(state.count)
        state = dataclasses.replace(state, done=all_done, count=count)
        jax.block_until_ready(state)
        program = self._step_program(spec)
        num_steps = self._timed_steps.get(program, 1)
        try:
            self._state = state
            self._seconds_of(spec, 0)  # the first after another program takes longer
            without, seconds = self._seconds_of(spec, 0), self._seconds_of(spec, num_steps)
        finally:  # Ctrl-C while it compiles: no row is done because of it
            self._state = dataclasses.replace(self.state, **kept)
            self._numbers = None
        # of all K alike, so that an error does not favour one of them
        without = min(without, self._call_seconds.get(program[1:], math.inf))
        self._call_seconds[program[1:]] = without
        of_a_step = max(seconds - without, seconds / 2) / num_steps
        self._timed_steps[program] = min(max(1, int(TIMED_SECONDS / of_a_step)), MOST_TIMED_STEPS)
        return of_a_step

    def _seconds_of(self, spec: DecodeSpec, num_steps: int) -> float:
        """Seconds of a call that takes so many steps."""
        start = time.perf_counter()
        jax.block_until_ready(self._take_steps(spec, len(self.rows) + 1, num_steps))
        return time.perf_counter() - start

    def has_compiled_steps(self, k: int) -> bool:
        """Whether steps with `k` drafts were taken before, with so many rows and slots."""
        return was_called(*self._step_program(self.spec.with_k(k)))

    def _step_program(self, spec: DecodeSpec) -> tuple[Hashable, ...]:
        """What steps are compiled for."""
        return spec, self.shape, num_stop_ids(self._options)

    def _take_steps(self, spec: DecodeSpec, until_done: int, max_steps: int) -> jax.Array:
        """Takes steps until so many rows are done, and returns how many."""
        limits = np.int32(until_done), np.int32(max_steps)
        arguments = (*self.params, self._options, *limits, self.state)
        with first_call(*self._step_program(spec)):
            num_steps, self._state = loop.decode(spec, *arguments)
        self._numbers = None
        return num_steps

    def make_room(self) -> None:
        """Larger caches where the next step, or a switch of K, would not fit."""
        positions = self.numbers().position[self.running]
        if positions.max() + self.spec.num_ahead > self.slots:
            num_rows = growth.num_rows(len(self.running), self.max_rows)
            self._resize(min(num_rows, len(self.rows)), self._slots_needed())

    def leave(self, row: int) -> None:
        """Makes a row free."""
        self.rows[row] = None
        if not self.numbers().done[row]:
            done = self.state.done.at[row].set(True)
            self._state = dataclasses.replace(self.state, done=done)
            self._numbers = None

    def shrink(self) -> None:
        """Makes the batch as small as the rows that are left, where that pays."""
        running = self.running
        if not running:
            self.rows, self._state, self._options, self._numbers = [], None, None, None
            return
        lengths = self.numbers().length
        left = max(self._request(i).max_new_tokens - lengths[i] for i in running)
        num_rows = growth.num_rows(len(running), self.max_rows)
        if num_rows >= len(self.rows) or left < MIN_TOKENS_LEFT:
            num_rows = len(self.rows)
        slots = self._slots_needed()
        if num_rows < len(self.rows) or 2 * slots <= self.slots:
            self._resize(num_rows, min(slots, self.slots))

    def shrink_caches(self) -> None:
        """Makes the caches as small as the rows that are left, where that halves them at least."""
        slots = self._slots_needed()
        if 2 * slots <= self.slots:
            self._resize(len(self.rows), slots)

    def _options_of(self, rows: Sequence[Row | None]) -> RowOptions:
        """What rows ask for: on the device, for calls of programs are more than changes of rows.

        On a mesh it stays on the host, from which each call gives it to every device.
        """
        options = row_options(rows, self.spec.target_config.vocab)
        is_alone = jax.sharding.get_abstract_mesh().empty
        return jax.device_put(options) if is_alone else options

    def _request(self, i: int) -> Request:
        row = self.rows[i]
        assert row is not None
        return row.request

    def _slots_needed(self) -> int:
        """Slots that hold the next step of every row."""
        positions = self.numbers().position
        requests = [self._request(i) for i in self.running]
        return growth.num_slots(
            int(positions[self.running].max()) + self.spec.num_ahead,
            max(num_reserved(request, self.spec) for request in requests),
        )

    def _resize(self, num_rows: int, slots: int) -> None:
        """Moves the running rows to the front of `num_rows` rows with `slots` slots."""
        if (num_rows, slots) == (len(self.rows), self.slots):
            return
        running = self.running
        rows = list(range(num_rows)) if num_rows == len(self.rows) else running
        keeps_rows = rows == list(range(len(self.rows)))
        sizes = *state_shape(self.state), num_rows, slots
        kept = [self.rows[i] for i in rows]
        kept += [None] * (num_rows - len(kept))
        options = self._options_of(kept)
        with first_call("resize", self.spec, *sizes, keeps_rows):
            state = growth.resize(self.state, slots, rows, num_rows)
        self._state, self.rows, self._options, self._numbers = state, kept, options, None


def on_host(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Copies of small arrays, of which others may give the memory away.

    On a CPU numpy reads an array where it lies, which takes a fifth of `jax.device_get`'s time.
    """
    begin_copies(arrays)
    return [np.array(array) for array in arrays]


def begin_copies(arrays: Sequence[jax.Array]) -> None:
    """Copies arrays of a GPU to the host, all side by side."""
    for array in arrays:
        if array.platform() != "cpu":
            array.copy_to_host_async()


def state_shape(state: DecodeState) -> tuple[int, int]:
    """Rows and slots."""
    num_rows, slots = state.output.shape
    return num_rows, slots
