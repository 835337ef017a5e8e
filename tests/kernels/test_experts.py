"""Four forms of a mixture of experts are one sum; the sparse ones look at no expert that was not chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.kernels import experts
from peagle_jax.layers.moe import Bank, Gated, Stack

D, WIDTH, E, K = 12, 10, 7, 3


def bank(seed: int = 0):
    rng = np.random.default_rng(seed)
    stacks = [Stack(E, *size, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0)) for size in ((D, 2 * WIDTH), (WIDTH, D))]
    for stack in stacks:
        stack.kernel[...] = jnp.asarray(rng.normal(0, 0.5, stack.kernel.shape), jnp.float32)
        stack.bias[...] = jnp.asarray(rng.normal(0, 0.5, stack.bias.shape), jnp.float32)
    return Bank(*stacks, Gated(jax.nn.silu), E)


def by_hand(x, chosen, weight, bank):
    """In float64, one token and one expert at a time."""
    out = np.zeros(x.shape)
    up, down = (np.asarray(s.kernel[...], np.float64) for s in (bank.gate_up, bank.down))
    b_up, b_down = (np.asarray(s.bias[...], np.float64) for s in (bank.gate_up, bank.down))
    for t, (row, ids, shares) in enumerate(zip(x, chosen, weight, strict=True)):
        for e, share in zip(ids, shares, strict=True):
            if e < E:
                gate, value = np.split(row @ up[e] + b_up[e], 2)
                out[t] += share * (gate / (1 + np.exp(-gate)) * value @ down[e] + b_down[e])
    return out


@pytest.mark.parametrize("form", experts.FORMS)
@pytest.mark.parametrize("n, spread", [(1, "even"), (5, "even"), (29, "even"), (40, "one"), (23, "elsewhere"), (130, "even")])
def test_forms(form, n, spread):
    """`one`: all tokens choose the same experts; `elsewhere`: some choices are no expert of this bank."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, D)).astype(np.float32)
    chosen = np.stack([np.arange(K) if spread == "one" else rng.permutation(E)[:K] for _ in range(n)]).astype(np.int32)
    if spread == "elsewhere":
        chosen[rng.random(chosen.shape) < 0.4] = E
        chosen[0] = E
    weight = rng.uniform(0.1, 1, (n, K)).astype(np.float32)
    b = bank()
    got = jax.jit(lambda *inputs: experts.FORMS[form](*inputs, b))(x, chosen, weight)
    np.testing.assert_allclose(got, by_hand(x, chosen, weight, b), atol=2e-5, rtol=0)


@pytest.mark.parametrize("form", ["looped", "gathered"])
def test_experts_that_nobody_chose_are_not_read(form):
    b = bank()
    for stack in (b.gate_up, b.down):
        stack.kernel[...] = stack.kernel[...].at[jnp.array([0, 3, 4, 6])].set(jnp.nan)
    chosen = jnp.array([[1, 2, 5], [5, 1, 2], [2, 5, 1]])
    x, weight = jnp.ones((3, D)), jnp.ones((3, K))
    assert np.isfinite(experts.FORMS[form](x, chosen, weight, b)).all()
    assert not np.isfinite(experts.reference(x, chosen, weight, b)).all()


def test_a_loop_has_a_round_a_tile():
    """Rounds, counted: as many as chosen experts while each fits a tile, so the work follows active parameters."""
    rounds = []
    b = bank()
    one = b.one
    b.one = lambda e, rows: (jax.debug.callback(lambda e: rounds.append(int(e)), e), one(e, rows))[1]
    chosen = jnp.array([[1, 2, 5], [5, 1, 0]])
    experts.looped(jnp.ones((2, D)), chosen, jnp.ones((2, K)), b).block_until_ready()
    jax.effects_barrier()
    assert sorted(rounds) == [0, 1, 2, 5]
    rounds.clear()
    n = 30  # 30 rows of each of three experts, in tiles of 16
    experts.looped(jnp.ones((n, D)), jnp.tile(jnp.array([[6, 0, 3]]), (n, 1)), jnp.ones((n, K)), b).block_until_ready()
    jax.effects_barrier()
    assert experts.tile_rows(n, K, E, parts=1, few=4, most=64) == 16 and sorted(rounds) == [0, 0, 3, 3, 6, 6]


@pytest.mark.parametrize("n, k, count, rows", [(1, 8, 128, 1), (2, 8, 128, 2), (8, 8, 128, 4), (128, 8, 128, 8), (512, 4, 32, 64), (9999, 4, 32, 64)])
def test_tiles(n, k, count, rows):
    assert experts.tile_rows(n, k, count, parts=1, few=experts.FEW, most=experts.TILE) == rows


def test_choice():
    assert [experts.choose(n, 8, 128, b) for n, b in ((1, "cpu"), (999, "cpu"), (8, "gpu"), (16, "gpu"), (17, "gpu"))] == [
        "looped", "looped", "gathered", "gathered", "grouped",
    ]  # fmt: skip
