"""Bytes that a decoding step has to read, and the experts that it touches."""

from collections.abc import Iterator
from typing import Protocol
from unittest import mock

import jax.numpy as jnp

from peagle_jax.decode import loop
from peagle_jax.decode.memory import cache_bytes
from peagle_jax.kernels import experts
from peagle_jax.types import CacheShape, DecodeState, Model, Params
from peagle_jax.weights import flatten_params

CONTEXT = 1024  # tokens that a step has before it


class Case(Protocol):
    """What of a `steps.Case` bytes depend on."""

    @property
    def method(self) -> str: ...
    @property
    def k(self) -> int: ...
    @property
    def batch(self) -> int: ...


def experts_read(target: Model, params: Params, state: DecodeState) -> float:
    """How many experts of a layer one verification touches on average.

    They are counted on random tokens, as every step verifies them. This runs without `jax.jit`,
    operation by operation: a second program of all layers would take longer to compile than
    everything else here.
    """
    counts = []

    def counting(form):
        def counted(x, topk_ids, routing_weights, weights):
            counts.append(jnp.unique(topk_ids).size)
            return form(x, topk_ids, routing_weights, weights)

        return counted

    forms = {name: counting(form) for name, form in experts.FORMS.items()}
    with mock.patch.dict(experts.FORMS, forms):
        loop.verify_forward(target.bind(params), state.tokens, state.cache)
    return sum(counts) / len(counts)


def floor_bytes(case: Case, target: Model, head: Model | None, num_experts: float) -> float:
    """Bytes that a step has to read.

    These are the weights once, with `num_experts` experts a layer, and caches as far as a token
    after CONTEXT others sees them. An EAGLE-3 head is read once a draft token.

    Args:
      target, head: their parameters may be shapes.
    """

    def weights_of(model: Model) -> Iterator[tuple[str, int]]:
        """(path, bytes) of all weights but the embedding, of which few rows are read."""
        for path, x in flatten_params(model.params):
            if not path.startswith("embed"):
                yield path, x.size * jnp.dtype(x.dtype).itemsize

    share = num_experts / target.config.experts
    total = sum(size * (share if ".experts." in path else 1) for path, size in weights_of(target))
    c = target.config
    for shape in c.cache_shapes():
        visible = min(CONTEXT, shape.window or CONTEXT)
        total += cache_bytes([shape], case.batch, visible, c.kv_cache_dtype)
    if head:
        c = head.config
        passes = 1 if case.method == "peagle" else case.k
        for path, size in weights_of(head):
            total += size * (1 if path.startswith("fusion") else passes)
        layers = CacheShape(tuple(range(c.layers)), c.kv_heads, c.head_dim, None)
        total += passes * cache_bytes([layers], case.batch, CONTEXT, c.kv_cache_dtype)
    return total
