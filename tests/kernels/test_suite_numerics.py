"""The GPU suite's numerics with every Triton kernel in its interpreter, in bfloat16: before a GPU's time is spent on them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.interpreter import interpret_later

from peagle_jax.kernels import cache_write
from peagle_jax.kernels.launch import interpret_kernels

PARTS = {
    "products": "fp8_matmul",
    "attention": "attention",
    "experts": "experts",
    "words": "vocab peaks",
    "distances": "vocab distance",
    "writes": "cache_write",
    "training": "packed_attention",
    "fusion": "fusion",
}


@pytest.mark.parametrize("part", PARTS)
def test_kernels_are_right(part, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from gpu import numerics

    assert set(numerics.PARTS) == {*PARTS, "mosaic"}
    monkeypatch.setattr(numerics, "DTYPE", jnp.bfloat16)
    monkeypatch.setattr(numerics, "forms", lambda *names: ["reference", "triton"])
    jax.clear_caches()
    with interpret_kernels(interpret_later):
        rows = list(numerics.PARTS[part](np.random.default_rng(3), True))
    jax.clear_caches()
    rows = [row for row in rows if row["form"] == "triton"]
    assert rows and {row["kernel"] for row in rows} == {PARTS[part]}
    assert all(row["right"] for row in rows) and (
        part == "writes" or all(row["error"] > 0 for row in rows)
    ), rows


def test_a_wrong_kernel_is_noticed(monkeypatch):
    """A cache whose new scales are a tenth too large, one slot of which lost what it held, one that is right."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from gpu import numerics

    right = cache_write.reference
    spoil = {
        "scales": lambda k, v, slot, held: tuple(
            x * 1.1 if x.ndim == 3 else x for x in right(k, v, slot, held)
        ),
        "a slot": lambda k, v, slot, held: (
            right(k, v, slot, held)[0]
            .at[1, 0, jnp.setdiff1d(jnp.arange(40), slot[1], size=1)[0]]
            .set(0),
            *right(k, v, slot, held)[1:],
        ),
        "nothing": right,
    }
    found = {}
    for name, form in spoil.items():
        monkeypatch.setitem(cache_write.FORMS, "reference", form)
        found[name] = [row["right"] for row in numerics.writes(np.random.default_rng(3), True)]
    assert found == {"scales": [True, False], "a slot": [False, False], "nothing": [True, True]}
