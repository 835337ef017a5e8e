"""The GPU suite's numerics with every Triton kernel in its interpreter, in bfloat16.

This runs before a GPU's time is spent on them.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.interpreter import interpret_later

from peagle_jax.kernels import cache_write
from peagle_jax.kernels.launch import interpret_kernels

PARTS = {
    "products": "fp8_matmul",
    "attention": "attention",
    "experts": "experts",
    "topk": "vocab topk",
    "distill_losses": "distillation losses",
    "writes": "cache_write",
    "training": "packed_attention",
    "fusion": "fusion",
}


@pytest.mark.parametrize("part", PARTS)
def test_kernels_are_right(part, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from gpu import checking, numerics

    assert set(numerics.PARTS) == {*PARTS, "mosaic"}
    monkeypatch.setattr(checking, "DTYPE", jnp.bfloat16)
    monkeypatch.setattr(checking, "forms", lambda *names: ["reference", "triton"])
    jax.clear_caches()
    with interpret_kernels(interpret_later):
        rows = list(numerics.PARTS[part](np.random.default_rng(3), True))
    jax.clear_caches()
    rows = [row for row in rows if row["form"] == "triton"]
    assert rows and {row["kernel"] for row in rows} == {PARTS[part]}
    assert all(row["right"] for row in rows), rows
    if part != "writes":  # which may be exact
        assert all(row["error"] > 0 for row in rows), rows


def test_a_wrong_kernel_is_noticed(monkeypatch):
    """New scales that are a tenth too large, and a slot that lost what it held."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from gpu import numerics

    right = cache_write.reference

    def with_large_scales(k, v, slots, cache):
        return tuple(x * 1.1 if x.ndim == 3 else x for x in right(k, v, slots, cache))

    def with_a_lost_slot(k, v, slots, cache):
        keys, *others = right(k, v, slots, cache)
        unwritten = jnp.setdiff1d(jnp.arange(40), slots[1], size=1)[0]
        return keys.at[1, 0, unwritten].set(0), *others

    results = {}
    for form in (with_large_scales, with_a_lost_slot, right):
        monkeypatch.setitem(cache_write.FORMS, "reference", form)
        rows = numerics.writes(np.random.default_rng(3), True)
        results[form] = [row["right"] for row in rows]
    # of the caches in the dtype of queries and in float8
    assert results[with_large_scales] == [True, False]
    assert results[with_a_lost_slot] == [False, False]
    assert results[right] == [True, True]
