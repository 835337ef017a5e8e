"""All forms of a mixture of experts are one sum; sparse ones read no expert that was not chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu.interpreter import interpret, interpret_counting

from peagle_jax.kernels import choose, experts, experts_gemv_triton, experts_triton
from peagle_jax.kernels.launch import H200
from peagle_jax.layers.moe import (
    GLU,
    ExpertLinear,
    ExpertWeights,
    Fp8ExpertLinear,
    Mxfp4ExpertLinear,
)

D, WIDTH, E, K = 12, 10, 7, 3


def expert_weights(seed: int = 0):
    """E experts with biases, none of whose numbers is a default."""
    rng = np.random.default_rng(seed)
    linears = [
        ExpertLinear(E, *size, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
        for size in ((D, 2 * WIDTH), (WIDTH, D))
    ]
    for linear in linears:
        linear.kernel[...] = jnp.asarray(rng.normal(0, 0.5, linear.kernel.shape), jnp.float32)
        linear.bias[...] = jnp.asarray(rng.normal(0, 0.5, linear.bias.shape), jnp.float32)
    return ExpertWeights(*linears, GLU(jax.nn.silu), E)


def by_hand(x, topk_ids, routing_weights, weights):
    """In float64, one token and one expert at a time."""
    out = np.zeros(x.shape)
    up, down = (np.asarray(s.kernel[...], np.float64) for s in (weights.gate_up, weights.down))
    b_up, b_down = (np.asarray(s.bias[...], np.float64) for s in (weights.gate_up, weights.down))
    for t, (row, ids, shares) in enumerate(zip(x, topk_ids, routing_weights, strict=True)):
        for e, share in zip(ids, shares, strict=True):
            if e < E:
                gate, value = np.split(row @ up[e] + b_up[e], 2)
                out[t] += share * (gate / (1 + np.exp(-gate)) * value @ down[e] + b_down[e])
    return out


def run(form):
    """A form as a function of arrays and weights; Triton in its interpreter, the others jitted."""

    def run_triton(*inputs):
        arrays, weights = map(jnp.asarray, inputs[:3]), inputs[3]
        return experts_triton.mixture(*arrays, weights, start=interpret)

    def run_xla(*inputs):
        arrays, weights = inputs[:3], inputs[3]
        return jax.jit(lambda *arrays: experts.FORMS[form](*arrays, weights))(*arrays)

    return run_triton if form == "triton" else run_xla


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
    """`one`: all tokens choose the same experts; `elsewhere`: some choices are of other devices."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, D)).astype(np.float32)
    topk_ids = np.stack(
        [np.arange(K) if spread == "one" else rng.permutation(E)[:K] for _ in range(n)]
    ).astype(np.int32)
    if spread == "elsewhere":
        topk_ids[rng.random(topk_ids.shape) < 0.4] = E
        topk_ids[0] = E
    if spread == "some elsewhere":  # the first choice, so that what is here does not stand first
        topk_ids[0] = [E, 2, 5]
    routing_weights = rng.uniform(0.1, 1, (n, K)).astype(np.float32)
    b = expert_weights()
    got = run(form)(x, topk_ids, routing_weights, b)
    np.testing.assert_allclose(got, by_hand(x, topk_ids, routing_weights, b), atol=2e-5, rtol=0)


@pytest.mark.parametrize("form", ["looped", "gathered", "triton"])
def test_experts_that_nobody_chose_are_not_read(form):
    b = expert_weights()
    for linear in (b.gate_up, b.down):
        linear.kernel[...] = linear.kernel[...].at[jnp.array([0, 3, 4, 6])].set(jnp.nan)
    topk_ids = jnp.array([[1, 2, 5], [5, 1, 2], [2, 5, 1]])
    x, routing_weights = jnp.ones((3, D)), jnp.ones((3, K))
    assert np.isfinite(run(form)(x, topk_ids, routing_weights, b)).all()
    assert not np.isfinite(experts.reference(x, topk_ids, routing_weights, b)).all()


def test_a_chosen_expert_is_read_once():
    """Tiles without rows read nothing, not even the last expert, whose number they have."""
    b, reads = expert_weights(), []
    topk_ids = jnp.array([[1, 2, E], [5, 1, 2], [E, E, 1]])
    x, routing_weights = jnp.ones((3, D)), jnp.ones((3, K))
    experts_triton.mixture(x, topk_ids, routing_weights, b, start=interpret_counting(reads))
    weights = [counts[5] for name, counts in reads if name == "expert_kernel"]
    assert [counts.shape for counts in weights] == [(E, D, 2 * WIDTH), (E, WIDTH, D)]
    for counts in weights:
        for e in range(E):
            assert (counts[e] == (1 if e in (1, 2, 5) else 0)).all(), e


def stored(kind, dtype):
    """5 experts, 96 -> 2 x 160 -> 96, as checkpoints store them; no number is a default."""
    rng = np.random.default_rng(4)

    def random(like):
        return jnp.asarray(rng.normal(0, 0.3, like.shape), like.dtype)

    linears = []
    for inputs, outputs in ((96, 320), (160, 96)):
        if kind == "mxfp4":
            linear = Mxfp4ExpertLinear(5, inputs, outputs, bias=True, dtype=dtype, rngs=nnx.Rngs(0))
            linear.blocks[...] = jnp.asarray(rng.integers(0, 256, linear.blocks.shape), jnp.uint8)
            linear.scales[...] = jnp.asarray(rng.integers(120, 127, linear.scales.shape), jnp.uint8)
            linear.bias[...] = random(linear.bias)
        else:
            bias = nnx.Param(jnp.asarray(rng.normal(0, 0.3, (5, outputs)), dtype))
            linear = Fp8ExpertLinear(5, inputs, outputs, bias=bias, blocks=kind == "block")
            linear.values[...] = jnp.asarray(
                rng.normal(0, 20, linear.values.shape), linear.values.dtype
            )
            linear.scale[...] = jnp.asarray(
                rng.uniform(0.002, 0.02, linear.scale.shape), jnp.float32
            )
        linears.append(linear)
    return ExpertWeights(*linears, GLU(jax.nn.silu), 5)


DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", ["row", "block", "mxfp4"])
@pytest.mark.parametrize("n", [1, 6, 9, 40])
def test_triton_decodes_what_is_stored(n, kind, dtype):
    """One row, some, and more than a tile of rows for an expert; one expert has none.

    Up to eight rows are multiplied without tensor cores, pair by pair, where experts are float8.
    """
    rng = np.random.default_rng(n)
    b = stored(kind, dtype)
    x = jnp.asarray(rng.normal(size=(n, 96)), dtype)
    topk_ids = jnp.asarray(
        np.stack([rng.permutation([0, 1, 2, 4])[:2] for _ in range(n)]), jnp.int32
    )
    routing_weights = jnp.asarray(rng.uniform(0.1, 1, (n, 2)), dtype)
    exact = ExpertWeights(b.gate_up, b.down, b.act, b.count)
    want = np.asarray(experts.reference(x.astype(jnp.float32), topk_ids, routing_weights, exact))
    got = np.asarray(experts_triton.mixture(x, topk_ids, routing_weights, b, start=interpret))
    assert np.abs(got - want).max() < (1e-5 if dtype == jnp.float32 else 2**-6) * np.abs(want).max()


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("bk, K, rows", [(128, 160, 1), (256, 352, 3), (128, 288, 40)])
def test_mxfp4_in_several_steps(bk, K, rows, splits):
    """The last step and the last part are cut off; every step has the scales of its own inputs."""
    rng = np.random.default_rng(K)
    linear = Mxfp4ExpertLinear(3, K, 70, bias=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    linear.blocks[...] = jnp.asarray(rng.integers(0, 256, linear.blocks.shape), jnp.uint8)
    linear.scales[...] = jnp.asarray(rng.integers(118, 127, linear.scales.shape), jnp.uint8)
    linear.bias[...] = jnp.asarray(rng.normal(size=linear.bias.shape), jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(rows, K)), jnp.bfloat16)
    tiles = experts.make_tiles(jnp.full((rows, 1), 2), 3, max(2, rows))
    rule = dict(gather=True, start=interpret, bk=bk, splits=splits)
    got = np.asarray(experts_triton.product(x, tiles, linear.stored(), **rule), float)
    matrix = np.asarray(linear.matrices(2, jnp.float32), float)
    want = np.asarray(x, float) @ matrix + np.asarray(linear.bias[2], float)
    assert np.abs(got - want).max() < 2**-7 * np.abs(want).max()


def test_scales_of_tiles_without_rows_are_not_read():
    b, reads = stored("mxfp4", jnp.bfloat16), []
    topk_ids, start = jnp.array([[1, 2], [2, 1], [1, 2]]), interpret_counting(reads)
    x, routing_weights = jnp.ones((3, 96), jnp.bfloat16), jnp.ones((3, 2))
    experts_triton.mixture(x, topk_ids, routing_weights, b, start=start)
    scales = [counts[6] for name, counts in reads if name == "expert_kernel"]
    assert [counts.shape for counts in scales] == [(5, 320, 3), (5, 96, 5)]
    for counts in scales:
        assert (counts[[1, 2]] == 1).all() and not counts[[0, 3, 4]].any()


@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("n", [1, 5])
def test_parts_along_the_inputs_add_up(n, splits):
    """Three blocks of 32 inputs: parts get different shares, the last of four none; one bias."""
    b = stored("mxfp4", jnp.float32)
    up, _ = b.matrices()
    x = jnp.asarray(np.random.default_rng(n).normal(size=(n, 96)), jnp.float32)
    topk_ids = jnp.asarray([[4, 2], [2, 1], [1, 4], [4, 1], [2, 4]][:n])
    tiles = experts.make_tiles(topk_ids, 5, 2)
    if n == 1:
        tiles = experts.tiles_of_one_token(topk_ids, 5)
    rule = dict(gather=True, one_token=n == 1, start=interpret, bk=32)
    whole = experts_triton.product(x, tiles, up, **rule, splits=1)
    got = experts_triton.product(x, tiles, up, **rule, splits=splits)
    np.testing.assert_allclose(got, whole, rtol=0, atol=1e-5 * float(jnp.abs(whole).max()))


def test_a_product_of_few_programs_is_split():
    """GPT-OSS's experts of one token are for 360 and 180 programs, of eight for thousands."""
    config = functools.partial(experts_triton.tile_config, 1, K=2880, gpu=H200)
    assert config("mxfp4", 4, 5760)["splits"] == 2
    assert config("mxfp4", 4, 2880)["splits"] == 4
    assert config("mxfp4", 32, 2880)["splits"] == 1
    assert config("block", 4, 2880)["splits"] == 1
    # parts of 512 inputs and more
    assert experts_triton.tile_config(1, "mxfp4", 4, 512, 1024, H200)["splits"] == 2


def test_parts_are_float32_and_their_sum_has_the_rows_dtype():
    b, started = stored("mxfp4", jnp.bfloat16), []

    def start(launch):
        started.append(launch)
        return interpret(launch)

    up, _ = b.matrices()
    tiles = experts.tiles_of_one_token(jnp.asarray([[4, 2]]), 5)
    rule = dict(gather=True, one_token=True, bk=32, splits=3, start=start)
    got = experts_triton.product(jnp.ones((1, 96), jnp.bfloat16), tiles, up, **rule)
    (parts,) = started[0].outputs
    assert parts.shape == (3, 2, 320) and parts.dtype == jnp.float32 and got.dtype == jnp.bfloat16


def test_sums_of_parts_do_not_go_through_silu():
    b = stored("block", jnp.float32)
    tiles = experts.tiles_of_one_token(jnp.asarray([[4, 2]]), 5)
    with pytest.raises(ValueError, match="SiLU needs whole sums, and K is in 2 parts"):
        rule = dict(gather=True, gated=True, one_token=True, splits=2)
        experts_triton.product(jnp.ones((1, 96)), tiles, b.matrices()[0], **rule)


@pytest.mark.parametrize("topk_ids", [[[5, 2, 5]], [[5, 2, 4], [5, 5, 5], [2, 5, 1]]])
def test_choices_elsewhere_whose_parts_nobody_writes(topk_ids, monkeypatch):
    """What stands in their rows is NaN here, and in a sum of parts as well."""
    monkeypatch.setattr(experts_triton, "MIN_SPLIT", 32)
    b, splits = stored("mxfp4", jnp.float32), []

    def start(launch):
        splits.append(launch.constants.get("SPLITS"))
        return interpret(launch)

    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(len(topk_ids), 96)), jnp.float32)
    routing_weights = jnp.asarray(rng.uniform(0.1, 1, (len(topk_ids), 3)), jnp.float32)
    args = x, jnp.asarray(topk_ids), routing_weights
    got = experts_triton.mixture(*args, b, start=start)
    want = experts.reference(*args, b)
    assert max(filter(None, splits)) > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("kind", ["row", "block"])
def test_one_token_whose_choices_are_elsewhere(kind):
    """Their weights are not read, and weigh nothing; the last expert stands in for no other."""
    b, reads = stored(kind, jnp.float32), []
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 96)), jnp.float32)
    topk_ids, routing_weights = jnp.asarray([[5, 2, 5]]), jnp.asarray([[0.3, 0.6, 0.1]])
    start = interpret_counting(reads)
    got = experts_triton.mixture(x, topk_ids, routing_weights, b, start=start)
    want = experts.reference(x, topk_ids, routing_weights, b)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))
    assert [name for name, _ in reads] == ["expert_gemv_kernel"] * 2
    for _, counts in reads:
        assert counts[2][2].all() and not counts[2][[0, 1, 3, 4]].any()


def test_a_tile_of_gated_outputs_crosses_no_block():
    """Its other half begins N rows later, and has the scales of one block of 128, too."""
    for N in (96, 100, 130, 768):
        bn = experts_gemv_triton.tile_config(N, 96, gated=True)["bn"]
        assert N % bn == 0 and 128 % bn == 0
    b, x, ids = stored("block", jnp.float32), jnp.zeros((1, 96)), jnp.asarray([[1, 2]])
    up, _ = b.matrices()
    for bn in (12, 64):  # no part of a block, and of 160 gated outputs
        with pytest.raises(ValueError, match=f"within a block of 128 outputs; got {bn}"):
            experts_gemv_triton.product(x, ids, up, choices=2, gated=True, bn=bn)


def test_tiles_hold_every_pair_once():
    """Sorted by expert; the pairs of no expert in none, and tiles without rows last."""
    topk_ids = jnp.asarray([[0, 3], [3, 5], [5, 3], [3, 0], [5, 5]])  # 5: no expert
    tiles = experts.make_tiles(topk_ids, 5, 3)
    rows = [
        (int(e), int(f) + i)
        for e, f, size in zip(tiles.expert, tiles.first, tiles.size, strict=True)
        for i in range(int(size))
    ]
    pair = np.argsort(tiles.place)
    assert [(e, *divmod(int(pair[place]), 2)) for e, place in rows] == [
        (0, 0, 0),
        (0, 3, 1),
        (3, 0, 1),
        (3, 1, 0),
        (3, 2, 1),
        (3, 3, 0),
    ]
    assert tiles.size.tolist() == [2, 3, 1] + [0] * (len(tiles.size) - 3)
    assert tiles.token.tolist() == (pair // 2).tolist()
    alone = experts.tiles_of_one_token(jnp.asarray([[4, 5, 1]]), 5)
    assert alone.expert.tolist() == [4, 5, 1] and alone.size.tolist() == [1, 0, 1]
    assert alone.place.tolist() == alone.first.tolist() == [0, 1, 2]


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
    """Some pairs elsewhere, some experts without rows, some with more than a tile of them.

    Pairs and tiles are in several programs.
    """
    rng = np.random.default_rng(n)
    topk_ids = np.stack([rng.permutation(count + 1)[:k] for _ in range(n)])
    topk_ids[topk_ids == count // 2] = count if count > 1 else 0
    topk_ids = jnp.asarray(topk_ids, jnp.int32)
    got, want = (
        experts_triton.make_tiles(topk_ids, count, rows, interpret),
        experts.make_tiles(topk_ids, count, rows),
    )
    used = np.asarray(want.size) > 0
    for name in ("place", "token", "expert", "size", "first"):
        a, b = np.asarray(getattr(got, name)), np.asarray(getattr(want, name))
        if name == "first":  # tiles without rows lie anywhere
            a, b = a[used], b[used]
        assert np.array_equal(a, b), name


def test_many_pairs_are_left_to_xla(monkeypatch):
    """On either side of the bound, the same sum."""
    rng = np.random.default_rng(2)
    x, routing_weights = (
        rng.normal(size=(9, D)).astype(np.float32),
        rng.uniform(0.1, 1, (9, K)).astype(np.float32),
    )
    topk_ids = np.stack([rng.permutation(E)[:K] for _ in range(9)]).astype(np.int32)
    sorts = []
    make_tiles = experts.make_tiles
    monkeypatch.setattr(experts, "make_tiles", lambda *a: sorts.append(a) or make_tiles(*a))
    for bound, by_xla in ((9 * K, 0), (9 * K - 1, 1)):
        monkeypatch.setattr(experts_triton, "MAX_SORTED_PAIRS", bound)
        np.testing.assert_allclose(
            run("triton")(x, topk_ids, routing_weights, expert_weights()),
            by_hand(x, topk_ids, routing_weights, expert_weights()),
            atol=2e-5,
            rtol=0,
        )
        assert len(sorts) == by_xla
    monkeypatch.setattr(experts_triton, "MAX_SORTED_PAIRS", 9 * K)
    monkeypatch.setattr(experts_triton, "MAX_SORTED_EXPERTS", E - 1)
    np.testing.assert_allclose(
        run("triton")(x, topk_ids, routing_weights, expert_weights()),
        by_hand(x, topk_ids, routing_weights, expert_weights()),
        atol=2e-5,
        rtol=0,
    )
    assert len(sorts) == 2


def test_a_loop_has_a_round_a_tile():
    """There are as many rounds as chosen experts while each fits a tile: work follows them."""
    rounds = []
    b = expert_weights()
    run_expert = b.run_expert

    def counted(expert, rows):
        jax.debug.callback(lambda expert: rounds.append(int(expert)), expert)
        return run_expert(expert, rows)

    b.run_expert = counted
    topk_ids = jnp.array([[1, 2, 5], [5, 1, 0]])
    experts.looped(jnp.ones((2, D)), topk_ids, jnp.ones((2, K)), b).block_until_ready()
    jax.effects_barrier()
    assert sorted(rounds) == [0, 1, 2, 5]
    rounds.clear()
    n = 30  # 30 rows of each of three experts, in tiles of 16
    experts.looped(
        jnp.ones((n, D)), jnp.tile(jnp.array([[6, 0, 3]]), (n, 1)), jnp.ones((n, K)), b
    ).block_until_ready()
    jax.effects_barrier()
    assert experts.tile_rows(n, K, E, num_shards=1, least=4, most=64) == 16
    assert sorted(rounds) == [0, 0, 3, 3, 6, 6]


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
    bounds = {"least": experts.MIN_CPU_TILE, "most": experts.MAX_CPU_TILE}
    assert experts.tile_rows(n, k, count, num_shards=1, **bounds) == rows


def test_choice(monkeypatch):
    def picked(*why):
        return [
            experts.choose(n, 8, 128, b, *why)
            for n, b in ((1, "cpu"), (999, "cpu"), (8, "gpu"), (16, "gpu"), (17, "gpu"))
        ]

    assert picked() == ["looped", "looped", "gathered", "gathered", "grouped"]  # no GPU is here
    monkeypatch.setattr(choose, "unavailable_reason", lambda form: None)
    assert picked() == ["looped", "looped", "triton", "triton", "triton"]
    assert picked("operands are float32") == ["looped", "looped", "gathered", "gathered", "grouped"]
