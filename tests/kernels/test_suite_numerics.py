"""The GPU suite's numerics with every Triton kernel in its interpreter, in bfloat16.

This runs before a GPU's time is spent on them.
"""

import dataclasses
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
    "writes": "cache_write",
    "training": "packed_attention",
    "fusion": "fusion",
    "routing": "routing",
    "norm_rotate": "norm_rotate",
    "joint": "joint fp8_matmul",
}


@pytest.mark.parametrize("part", PARTS)
def test_kernels_are_right(part, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from gpu import checking, numerics

    assert set(numerics.PARTS) == {*PARTS, "losses", "mosaic"}
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


def test_losses_are_right_and_a_wrong_one_is_noticed(monkeypatch):
    """They have no kernel: the suite holds XLA's products on a GPU against float64."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from gpu import numerics

    from peagle_jax.train import loss

    def right():
        return [row["right"] for row in numerics.PARTS["losses"](np.random.default_rng(3), True)]

    assert right() == [True, True]
    whole = loss.Form
    monkeypatch.setattr(loss, "Form", lambda *form: dataclasses.replace(whole(*form), logit_cap=None))
    assert right() == [False, True]
    monkeypatch.setitem(loss.LOSSES, "cross_entropy", loss.total_variation)
    assert right() == [False, False]


def test_wrong_routing_is_noticed(monkeypatch):
    """The second and third choice of each token exchanged; and weights without their norm."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from gpu import numerics

    from peagle_jax.kernels import routing

    reference = routing.FORMS["reference"]

    def with_other_experts(*args, **rule):
        weights, ids = reference(*args, **rule)
        return weights, ids[:, jnp.asarray([0, 2, 1])]

    def without_norm(x, w, bias, k, *, normalized):
        return reference(x, w, bias, k, normalized=False)

    for wrong in (with_other_experts, without_norm):
        monkeypatch.setitem(routing.FORMS, "reference", wrong)
        rows = numerics.PARTS["routing"](np.random.default_rng(3), True)
        assert not any(row["right"] for row in rows)


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
