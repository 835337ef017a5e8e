"""All forms of a mixture of experts are one sum; the sparse ones look at no expert that was not chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.interpreter import interpret

from peagle_jax.kernels import choose, experts, experts_triton
from peagle_jax.layers.moe import (
    GLU,
    ExpertLinear,
    ExpertWeights,
    Fp8ExpertLinear,
    Mxfp4ExpertLinear,
)

D, WIDTH, E, K = 12, 10, 7, 3


def bank(seed: int = 0):
    rng = np.random.default_rng(seed)
    stacks = [
        ExpertLinear(E, *size, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
        for size in ((D, 2 * WIDTH), (WIDTH, D))
    ]
    for stack in stacks:
        stack.kernel[...] = jnp.asarray(rng.normal(0, 0.5, stack.kernel.shape), jnp.float32)
        stack.bias[...] = jnp.asarray(rng.normal(0, 0.5, stack.bias.shape), jnp.float32)
    return ExpertWeights(*stacks, GLU(jax.nn.silu), E)


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


def run(form):
    if form == "triton":
        return lambda x, chosen, weight, bank: experts_triton.mixture(
            jnp.asarray(x), jnp.asarray(chosen), weight, bank, start=interpret
        )
    return lambda *inputs: jax.jit(lambda *arrays: experts.FORMS[form](*arrays, inputs[3]))(
        *inputs[:3]
    )


@pytest.mark.parametrize("form", experts.FORMS)
@pytest.mark.parametrize(
    "n, spread",
    [
        (1, "even"),
        (1, "some elsewhere"),
        (5, "even"),
        (29, "even"),
        (40, "one"),
        (23, "elsewhere"),
        (130, "even"),
    ],
)
def test_forms(form, n, spread):
    """`one`: all tokens choose the same experts; `elsewhere`: some choices are no expert of this bank."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, D)).astype(np.float32)
    chosen = np.stack(
        [np.arange(K) if spread == "one" else rng.permutation(E)[:K] for _ in range(n)]
    ).astype(np.int32)
    if spread == "elsewhere":
        chosen[rng.random(chosen.shape) < 0.4] = E
        chosen[0] = E
    if spread == "some elsewhere":  # the first choice, so that what is here does not stand first
        chosen[0] = [E, 2, 5]
    weight = rng.uniform(0.1, 1, (n, K)).astype(np.float32)
    b = bank()
    got = run(form)(x, chosen, weight, b)
    np.testing.assert_allclose(got, by_hand(x, chosen, weight, b), atol=2e-5, rtol=0)


@pytest.mark.parametrize("form", ["looped", "gathered", "triton"])
def test_experts_that_nobody_chose_are_not_read(form):
    b = bank()
    for stack in (b.gate_up, b.down):
        stack.kernel[...] = stack.kernel[...].at[jnp.array([0, 3, 4, 6])].set(jnp.nan)
    chosen = jnp.array([[1, 2, 5], [5, 1, 2], [2, 5, 1]])
    x, weight = jnp.ones((3, D)), jnp.ones((3, K))
    assert np.isfinite(run(form)(x, chosen, weight, b)).all()
    assert not np.isfinite(experts.reference(x, chosen, weight, b)).all()


def stored(kind, dtype):
    """A bank of 5 experts, 96 -> 2 x 160 -> 96, as checkpoints store them, no number of which is a default."""
    rng = np.random.default_rng(4)

    def random(like):
        return jnp.asarray(rng.normal(0, 0.3, like.shape), like.dtype)

    stacks = []
    for inputs, outputs in ((96, 320), (160, 96)):
        if kind == "mxfp4":
            stack = Mxfp4ExpertLinear(5, inputs, outputs, bias=True, dtype=dtype, rngs=nnx.Rngs(0))
            stack.blocks[...] = jnp.asarray(rng.integers(0, 256, stack.blocks.shape), jnp.uint8)
            stack.scales[...] = jnp.asarray(rng.integers(120, 127, stack.scales.shape), jnp.uint8)
            stack.bias[...] = random(stack.bias)
        else:
            bias = nnx.Param(jnp.asarray(rng.normal(0, 0.3, (5, outputs)), dtype))
            stack = Fp8ExpertLinear(5, inputs, outputs, bias=bias, blocks=kind == "block")
            stack.values[...] = jnp.asarray(
                rng.normal(0, 20, stack.values.shape), stack.values.dtype
            )
            stack.scale[...] = jnp.asarray(rng.uniform(0.002, 0.02, stack.scale.shape), jnp.float32)
        stacks.append(stack)
    return ExpertWeights(*stacks, GLU(jax.nn.silu), 5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["row", "block", "mxfp4"])
@pytest.mark.parametrize("n", [1, 6, 40])
def test_triton_decodes_what_is_stored(n, kind, dtype):
    """One row, some, and more than a tile of rows for an expert; one expert has none."""
    rng = np.random.default_rng(n)
    b = stored(kind, dtype)
    x = jnp.asarray(rng.normal(size=(n, 96)), dtype)
    chosen = jnp.asarray(np.stack([rng.permutation([0, 1, 2, 4])[:2] for _ in range(n)]), jnp.int32)
    weight = jnp.asarray(rng.uniform(0.1, 1, (n, 2)), dtype)
    exact = ExpertWeights(b.gate_up, b.down, b.act, b.count)
    want = np.asarray(experts.reference(x.astype(jnp.float32), chosen, weight, exact))
    got = np.asarray(experts_triton.mixture(x, chosen, weight, b, start=interpret))
    assert np.abs(got - want).max() < (1e-5 if dtype == jnp.float32 else 2**-6) * np.abs(want).max()


def test_tiles_hold_every_pair_once():
    """Sorted by expert; the pairs of no expert in none, and tiles without rows last."""
    chosen = jnp.asarray([[0, 3], [3, 5], [5, 3], [3, 0], [5, 5]])  # 5: no expert
    tiles = experts.tiled(chosen, 5, 3)
    held = [
        (int(e), int(f) + i)
        for e, f, size in zip(tiles.expert, tiles.first, tiles.size, strict=True)
        for i in range(int(size))
    ]
    pair = np.argsort(tiles.place)
    assert [(e, *divmod(int(pair[place]), 2)) for e, place in held] == [
        (0, 0, 0),
        (0, 3, 1),
        (3, 0, 1),
        (3, 1, 0),
        (3, 2, 1),
        (3, 3, 0),
    ]
    assert (
        tiles.size.tolist() == [2, 3, 1] + [0] * (len(tiles.size) - 3)
        and tiles.token.tolist() == (pair // 2).tolist()
    )
    alone = experts.unsorted(jnp.asarray([[4, 5, 1]]), 5)
    assert (
        alone.expert.tolist() == [4, 5, 1]
        and alone.size.tolist() == [1, 0, 1]
        and alone.place.tolist() == alone.first.tolist() == [0, 1, 2]
    )


@pytest.mark.parametrize(
    "n, k, count, rows",
    [
        (2, 1, 3, 1),
        (7, 3, 5, 4),
        (40, 2, 6, 16),
        (33, 8, 130, 16),
        (90, 4, 7, 64),
        (65, 1, 1, 16),
        (20, 4, 256, 16),
    ],
)
def test_triton_sorts_as_xla_does(n, k, count, rows):
    """Some pairs elsewhere, some experts without rows, some with more than a tile of them; pairs and tiles in several programs."""
    rng = np.random.default_rng(n)
    chosen = np.stack([rng.permutation(count + 1)[:k] for _ in range(n)])
    chosen[chosen == count // 2] = count if count > 1 else 0
    chosen = jnp.asarray(chosen, jnp.int32)
    got, want = (
        experts_triton.tiled(chosen, count, rows, interpret),
        experts.tiled(chosen, count, rows),
    )
    used = np.asarray(want.size) > 0
    for name in ("place", "token", "expert", "size", "first"):
        a, b = np.asarray(getattr(got, name)), np.asarray(getattr(want, name))
        assert np.array_equal(
            a[used] if name == "first" else a, b[used] if name == "first" else b
        ), name


def test_many_pairs_are_left_to_xla(monkeypatch):
    """On either side of the bound, the same sum."""
    rng = np.random.default_rng(2)
    x, weight = (
        rng.normal(size=(9, D)).astype(np.float32),
        rng.uniform(0.1, 1, (9, K)).astype(np.float32),
    )
    chosen = np.stack([rng.permutation(E)[:K] for _ in range(9)]).astype(np.int32)
    sorts = []
    monkeypatch.setattr(
        experts, "tiled", lambda *a, tiled=experts.tiled: sorts.append(a) or tiled(*a)
    )
    for bound, by_xla in ((9 * K, 0), (9 * K - 1, 1)):
        monkeypatch.setattr(experts_triton, "SORTED", bound)
        np.testing.assert_allclose(
            run("triton")(x, chosen, weight, bank()),
            by_hand(x, chosen, weight, bank()),
            atol=2e-5,
            rtol=0,
        )
        assert len(sorts) == by_xla
    monkeypatch.setattr(experts_triton, "SORTED", 9 * K)
    monkeypatch.setattr(experts_triton, "BANKS", E - 1)
    np.testing.assert_allclose(
        run("triton")(x, chosen, weight, bank()),
        by_hand(x, chosen, weight, bank()),
        atol=2e-5,
        rtol=0,
    )
    assert len(sorts) == 2


def test_a_loop_has_a_round_a_tile():
    """Rounds, counted: as many as chosen experts while each fits a tile, so the work follows active parameters."""
    rounds = []
    b = bank()
    one = b.one
    b.one = lambda e, rows: (jax.debug.callback(lambda e: rounds.append(int(e)), e), one(e, rows))[
        1
    ]
    chosen = jnp.array([[1, 2, 5], [5, 1, 0]])
    experts.looped(jnp.ones((2, D)), chosen, jnp.ones((2, K)), b).block_until_ready()
    jax.effects_barrier()
    assert sorted(rounds) == [0, 1, 2, 5]
    rounds.clear()
    n = 30  # 30 rows of each of three experts, in tiles of 16
    experts.looped(
        jnp.ones((n, D)), jnp.tile(jnp.array([[6, 0, 3]]), (n, 1)), jnp.ones((n, K)), b
    ).block_until_ready()
    jax.effects_barrier()
    assert experts.tile_rows(n, K, E, parts=1, few=4, most=64) == 16 and sorted(rounds) == [
        0,
        0,
        3,
        3,
        6,
        6,
    ]


@pytest.mark.parametrize(
    "n, k, count, rows",
    [
        (1, 8, 128, 1),
        (2, 8, 128, 2),
        (8, 8, 128, 4),
        (128, 8, 128, 8),
        (512, 4, 32, 64),
        (9999, 4, 32, 64),
    ],
)
def test_tiles(n, k, count, rows):
    assert experts.tile_rows(n, k, count, parts=1, few=experts.FEW, most=experts.TILE) == rows


def test_choice(monkeypatch):
    def picked(*why):
        return [
            experts.choose(n, 8, 128, b, *why)
            for n, b in ((1, "cpu"), (999, "cpu"), (8, "gpu"), (16, "gpu"), (17, "gpu"))
        ]

    assert picked() == ["looped", "looped", "gathered", "gathered", "grouped"]  # no GPU is here
    monkeypatch.setattr(choose, "missing", lambda form: None)
    choose._serving.cache_clear()
    assert picked() == ["looped", "looped", "triton", "triton", "triton"]
    assert picked("operands are float32") == ["looped", "looped", "gathered", "gathered", "grouped"]
    choose._serving.cache_clear()
