"""Whether the caches of requests fit the device's memory, checked before they are allocated."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from peagle_jax.decode import growth
from peagle_jax.decode.prefill import WIDTH_STEP, num_positions
from peagle_jax.decode.requests import Request
from peagle_jax.decode.rows import num_reserved
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.free_memory import free_bytes
from peagle_jax.types import CacheShape, Device, InputError


class LacksMemoryError(InputError):
    """Caches that do not fit the memory; those of fewer requests at a time may."""


def cache_bytes(
    shapes: Sequence[CacheShape],
    batch: int,
    cache_size: int,
    dtype: DTypeLike,
    block: int | None = None,
    parts: int = 1,
    slots: int | None = None,
) -> int:
    """Bytes on each device of the cache that `KVCache.empty` makes of the same arguments.

    Args:
      parts: devices that the KV heads are spread over. Where their number does not divide the
        heads, every device has all heads.
    """
    value_bytes = jnp.dtype(dtype).itemsize
    scale_bytes = 4 if value_bytes == 1 else 0  # float8: a float32 scale beside every vector

    def group_bytes(shape: CacheShape) -> int:
        divides = shape.kv_heads % parts == 0
        heads = shape.kv_heads // parts if divides else shape.kv_heads
        num_slots = shape.num_slots(cache_size, block)
        if num_slots == cache_size and slots is not None:
            num_slots = slots
        vectors = 2 * len(shape.layers) * batch * heads * num_slots  # 2: keys and values
        return vectors * (shape.head_dim * value_bytes + scale_bytes)

    return sum(map(group_bytes, shapes))


def check_cache(size: Callable[[int], int], batch: int, cache_size: int, free: int | None) -> None:
    """Checks that caches fit the memory.

    Args:
      size: the bytes of caches of so many positions.
      batch: their rows.
      cache_size: positions of a row.
      free: bytes; None where nobody knows, and nothing is checked.

    Raises:
      LacksMemoryError: they do not. The message says how many tokens would fit.
    """
    if free is None or size(cache_size) <= free:
        return
    fits, too_many = 0, cache_size
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if size(middle) <= free:
            fits = middle
        else:
            too_many = middle
    rule = f"{batch} rows x {cache_size} tokens must fit the memory"
    got = f"{size(cache_size) / 1e9:.1f} GB wanted, {max(free, 0) / 1e9:.1f} GB free"
    if fits:
        next_step = f"{batch} x {fits} would fit: lower max_new_tokens, or max_batch"
    else:
        next_step = "lower max_batch, or use a machine with more memory"
    raise LacksMemoryError("cache_size", rule, got, next_step)


class CacheMemory:
    """The memory of an engine's caches: the target's, and the drafter's.

    Args:
      spec: how rows are decoded.
      max_batch: the most rows.
      parts: devices that the target's KV heads are spread over.
      num_threads: engines that share the memory.
      device: whose memory it is; None for the first of this process.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        max_batch: int,
        parts: int,
        num_threads: int,
        device: Device | None = None,
    ) -> None:
        self._spec, self._max_batch = spec, max_batch
        self._parts, self._num_threads = parts, num_threads
        self._device = device

    def size(self, num_rows: int, slots: int) -> int:
        """Bytes on each device of the caches of so many rows with so many slots."""
        spec, config = self._spec, self._spec.target_config
        size = spec.ring_cache_size or slots
        about = config.cache_shapes(), num_rows, size, config.kv_cache_dtype, spec.ring_block
        return cache_bytes(*about, self._parts, slots) + _draft_bytes(spec, num_rows, slots)

    def check(self, requests: Sequence[Request], held: int) -> None:
        """Raises InputError where requests would not fit together, if all others were done.

        Args:
          held: bytes that are free then.
        """
        free = free_bytes(self._device)
        num_rows = growth.num_rows(len(requests), max(self._max_batch, len(requests)))
        check_cache(
            lambda positions: self.size(num_rows, growth.num_slots(positions, positions)),
            num_rows,
            self._most_positions(requests),
            None if free is None else free + held,
        )

    def shape(self, group: Sequence[Request]) -> tuple[int, int]:
        """Rows and slots of the caches that a group's prompts are read into."""
        longest = max(len(request.prompt) for request in group)
        needed = max(longest + self._spec.num_ahead, num_positions(self._spec, longest))
        slots = growth.num_slots(needed, self._most_positions(group))
        return growth.num_rows(len(group), self._max_batch), slots

    def num_allowed(self, waiting: Sequence[Request], running: Sequence[Request], held: int) -> int:
        """How many of those who wait, from the first on, can be read together (see `allows`)."""
        n = 0
        while n < len(waiting) and self.allows(waiting[: n + 1], running, held):
            n += 1
        return n

    def allows(self, group: Sequence[Request], running: Sequence[Request], held: int) -> bool:
        """Whether a group can be read together, and decoded beside what is running.

        Args:
          held: bytes that the caches of what is running have now.
        """
        if len(group) + len(running) == 1:
            return True  # `check` has seen that it fits
        # a group is padded to its longest prompt: at most as many tokens again, where that is much
        lengths = [self._tokens_read(len(request.prompt)) for request in group]
        if len(lengths) * max(lengths) > 2 * sum(lengths):
            return False
        everyone = [*group, *running]
        num_rows = growth.num_rows(len(everyone), self._max_batch)
        positions = self._most_positions(everyone)
        needed = self.size(num_rows, growth.num_slots(positions, positions))
        if running:
            # until they are rows of the batch, what was read has caches beside those of the batch
            needed = max(needed, held) + self.size(*self.shape(group))
        free = free_bytes(self._device)
        # the other engines' caches grow, too
        return free is None or needed <= free // self._num_threads + held

    def _tokens_read(self, length: int) -> int:
        """Tokens that a prompt counts as: whole chunks, and at least WIDTH_STEP."""
        padded = -(-length // WIDTH_STEP) * WIDTH_STEP
        return max(num_positions(self._spec, length), padded)

    def _most_positions(self, requests: Sequence[Request]) -> int:
        """Of answers as long as they may be, or of prompts in whole chunks."""
        longest = max(len(request.prompt) for request in requests)
        reserved = max(num_reserved(request, self._spec) for request in requests)
        return max(reserved, num_positions(self._spec, longest))


@functools.lru_cache(maxsize=256)
def _draft_bytes(spec: DecodeSpec, num_rows: int, slots: int) -> int:
    """Bytes of the drafter's cache."""
    if spec.drafter is None or not num_rows:
        return 0
    init = functools.partial(spec.drafter.init, num_rows, slots + spec.k)
    arrays = jax.eval_shape(lambda: jax.tree.leaves(init()))
    return sum(x.size * x.dtype.itemsize for x in arrays)
