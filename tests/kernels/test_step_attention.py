"""Attention of decoding steps in C++ against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import native
from kernels.test_cached_attention import RULES, case, ring, slow

from peagle_jax.kernels import (
    attention,
    cache_write,
    native_code,
    processor,
    step_attention,
)
from peagle_jax.kernels.fp8_matmul import E4M3


@pytest.fixture(params=native.SETS, autouse=True)
def lanes(request, monkeypatch):
    return native.use(request.param, monkeypatch)


def attend(q, k, v, positions, kv_positions=None, *, visible=None, **rule):
    def call(q, k, v, positions, kv_positions, visible):
        return attention.native(q, k, v, positions, kv_positions, visible=visible, **rule)

    return np.asarray(jax.jit(call)(q, k, v, positions, kv_positions, visible))


@pytest.mark.parametrize(
    "shape",
    [
        {"H": 32},
        dict(T=1, N=2, G=2, H=16),
        dict(T=1, N=10, G=2, H=80, S=300, lengths=(1, 200, 300)),
        dict(T=9, N=16, G=1, H=64, S=200),
        dict(T=63, N=4, G=4, H=128, S=151, lengths=(1, 70, 89)),
        dict(T=5, N=28, G=4, H=48, S=161),
        dict(T=130, N=6, G=2, H=32, S=300, lengths=(1, 70, 170)),
        dict(T=70, N=80, G=1, H=16, S=99, lengths=(1, 7, 29)),
    ],
    ids=str,
)
def test_shapes(shape):
    """Rows for one pass and for several, slots that fill no vector, values of several vectors;
    tokens of one block and of several, also of one token each."""
    args = case(**shape)
    rule = RULES["plain"]
    assert np.abs(attend(*args, **rule) - slow(*args, None, **rule)).max() < 1e-5


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules(rule):
    args = case(H=32)
    assert np.abs(attend(*args, **rule) - slow(*args, None, **rule)).max() < 2e-6


@pytest.mark.parametrize("rule", ["window", "window, sinks"])
def test_rings(rule):
    q, k, v, positions = case(S=40, H=16)
    rule = RULES[rule] | {"window": 30}
    want = slow(q, k, v, positions, ring(), **rule)
    assert np.abs(attend(q, k, v, positions, ring(), **rule) - want).max() < 2e-6


def test_masks_of_trees():
    q, k, v, positions = case(H=32)
    visible = jnp.asarray(np.random.default_rng(3).random((3, 4, 150)) < 0.3)
    rule = RULES["sinks"]
    want = attention.reference(q, k, v, positions, None, visible=visible, **rule)
    got = attend(q, k, v, positions, visible=visible, **rule)
    assert np.abs(got - np.asarray(want)).max() < 2e-6


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_weights_of_all_sizes(scale):
    """Scores that hardly differ, and scores of which one has all the weight."""
    args = case(H=64)
    rule = RULES["plain"] | {"scale": scale}
    assert np.abs(attend(*args, **rule) - slow(*args, None, **rule)).max() < 1e-5


def test_exponentials():
    """From 0 down to where float32 has no normal numbers, and below: two slots tell each."""
    differences = np.float32([0, 1e-6, 0.1, 0.5, 1, 3, 10, 50, 86.9, 87.5, 200, 1e30])
    for x in differences:
        q = jnp.zeros((1, 1, 1, 16)).at[..., 0].set(1)
        k = jnp.zeros((1, 1, 2, 16)).at[0, 0, 1, 0].set(-x)
        v = jnp.zeros((1, 1, 2, 16)).at[0, 0, 1].set(1)
        y = attend(q, k, v, jnp.ones((1, 1), jnp.int32), window=None, scale=1.0, sinks=None)
        weight = np.exp(-np.float64(x)) if x < 87 else 0
        np.testing.assert_allclose(y[0, 0, 0, 3], weight / (1 + weight), rtol=1e-6, atol=0)


def test_sinks_far_above_and_below_all_scores():
    args = case(H=32)
    rule = RULES["plain"] | {"sinks": jnp.asarray([300.0, -300, 0, 0, 300, 1])}
    got = attend(*args, **rule)
    assert np.abs(got - slow(*args, None, **rule)).max() < 2e-6
    assert not got[:, :, 0].any()


@pytest.mark.parametrize("sizes", [dict(N=8, H=64), dict(N=2, H=48), dict(N=2, H=16)], ids=str)
def test_a_query_is_the_same_beside_any_others(sizes):
    """To the bit: of several tokens and heads, or alone, and whatever other sequences have."""
    q, k, v, positions = case(T=13, S=180, **sizes)
    rule = RULES["window"] | {"window": 60}
    together = attend(q, k, v, positions, **rule)
    for b, t in [(0, 0), (1, 7), (2, 12)]:
        alone = attend(
            q[b : b + 1, t : t + 1],
            k[b : b + 1],
            v[b : b + 1],
            positions[b : b + 1, t : t + 1],
            **rule,
        )
        np.testing.assert_array_equal(alone[0, 0], together[b, t])


def test_what_lies_past_a_sequence_is_not_read():
    """Not even NaN there; and a sequence with NaN concerns itself alone."""
    q, k, v, positions = case(H=32)
    rule = RULES["plain"]
    clean = attend(q, k, v, positions, **rule)
    past = jnp.arange(150)[None, None, :, None] > positions[:, -1][:, None, None, None]
    dirty = (jnp.where(past, np.nan, x) for x in (k, v))
    np.testing.assert_array_equal(attend(q, *dirty, positions, **rule), clean)
    got = attend(q, k.at[1, :, 3].set(np.nan), v, positions, **rule)
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])


def test_a_query_that_sees_nothing_gets_zeros():
    q, k, v, positions = case(H=32)
    got = attend(q, k, v, positions.at[0, 1].set(-1), **RULES["plain"])
    assert not got[0, 1].any()
    np.testing.assert_array_equal(got[1:], attend(q, k, v, positions, **RULES["plain"])[1:])


def stored(x):
    """As a bfloat16 cache on a CPU has it."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


@pytest.mark.parametrize(
    "shape",
    [{"H": 32}, dict(T=1, N=6, G=6, H=80), dict(T=70, N=6, G=2, H=80, S=151)],
    ids=str,
)
@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_caches(shape, rule):
    """To the bit what float32 caches of the same numbers give."""
    q, k, v, positions = case(**shape)
    rounded = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))
    want = attend(q, *rounded, positions, **RULES[rule])
    got = attend(q, stored(k), stored(v), positions, **RULES[rule])
    np.testing.assert_array_equal(got, want)
    assert np.abs(want - attend(q, k, v, positions, **RULES[rule])).max() > 1e-4


@pytest.mark.parametrize("operands", [None, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["reference", "blocks"])
def test_bfloat16_caches_that_xla_reads(form, operands, monkeypatch):
    """Without a kernel: as float32 caches of the same numbers. Only operands round queries."""
    monkeypatch.setattr(attention, "is_native", lambda *_: False)
    q, k, v, positions = case(H=32, T=70, S=151, lengths=(1, 7, 80))
    rule = RULES["plain"] | {"form": "auto", "operands": operands}
    if form == "blocks":
        monkeypatch.setattr(attention, "MAX_SCORES", 0)
    rounded = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))
    want = attention.attend(q, *rounded, positions, None, **rule)
    got = attention.attend(q, stored(k), stored(v), positions, None, **rule)
    assert np.abs(got - want).max() < 1e-6
    assert (
        np.abs(attention.attend(q, k, v, positions, None, **rule) - want).max() > 1e-4 or operands
    )


def test_a_step_that_xla_reads_rounds_no_queries(monkeypatch):
    monkeypatch.setattr(attention, "is_native", lambda *_: False)
    q, k, v, positions = case(H=32, T=1)
    rounded = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))
    rule = RULES["plain"] | {"form": "auto"}
    want = attention.attend(q, *rounded, positions, None, **rule)
    got = attention.attend(q, stored(k), stored(v), positions, None, **rule)
    assert np.abs(got - want).max() < 1e-6


def calls(*args, **rule) -> bool:
    """Whether attention that may choose its form calls our code."""
    rule = RULES["plain"] | rule

    def attend(q, k, v, positions):
        return attention.attend(q, k, v, positions, None, form="auto", **rule)

    return "peagle_step_attention" in jax.jit(attend).lower(*args).as_text()


def test_which_steps_are_ours(lanes, monkeypatch):
    q, k, v, positions = args = case(H=2 * lanes)
    assert calls(*args)
    assert calls(*args, visible=jnp.ones((3, 4, 150), bool))
    assert not calls(*case(H=lanes + 2))
    assert not calls(q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16), positions)
    assert calls(q, stored(k), stored(v), positions, operands=jnp.bfloat16)
    scales = {"k_scale": jnp.ones((3, 2, 150)), "v_scale": jnp.ones((3, 2, 150))}
    assert not calls(q, k.astype(E4M3), v.astype(E4M3), positions, **scales)
    monkeypatch.setattr(processor, "instructions", lambda: "avx512_bf16")
    assert calls(*args, operands=jnp.bfloat16)
    # prompts: where products of bfloat16 are faster, and where a mask is large, it is XLA's turn
    short, long = (case(H=lanes, T=64, S=S) for S in (1024, 1025))
    assert calls(*short, operands=jnp.bfloat16) and not calls(*long, operands=jnp.bfloat16)
    q, k, v, positions = long
    assert not calls(q, stored(k), stored(v), positions, operands=jnp.bfloat16)
    assert calls(q, stored(k), stored(v), positions)
    assert calls(*long, operands=None) and calls(*long, operands=jnp.float32)
    monkeypatch.setattr(attention, "MAX_MASK", 3 * 64 * 1024)
    assert calls(*short) and not calls(*long)
    monkeypatch.setattr(processor, "instructions", lambda: "amx_bf16")
    assert not calls(*args, operands=jnp.bfloat16) and calls(*args, operands=None)
    monkeypatch.setattr(native_code, "multi_device_reason", lambda: "a mesh")
    assert not calls(*args)
    monkeypatch.undo()
    monkeypatch.setattr(native_code, "load", lambda: None)
    assert not calls(*args)


def test_with_64_bits_switched_on():
    """The mask is float32 all the same."""
    q, k, v, positions = case(H=32)
    want = attend(q, k, v, positions, **RULES["sinks"])
    with jax.enable_x64(True):
        got = attend(q, k, v, jnp.asarray(positions, jnp.int64), **RULES["sinks"])
    np.testing.assert_array_equal(got, want)


RULE = dict(window=None, scale=0.3, sinks=None)


def write(q, k, v, positions, new_k, new_v, first, **rule):
    def call(*args):
        return attention.native_write(*args, **(RULE | rule))

    return jax.jit(call)(q, k, v, positions, new_k, new_v, first)


def new_tokens(num: int, size: int, seed: int = 5):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.standard_normal((3, num, 2, size)), jnp.float32) for _ in range(2))


@pytest.mark.parametrize("num, rule", [(1, {}), (4, {"window": 20}), (13, {})])
def test_new_keys_and_values_are_written_first(num, rule):
    """As XLA's updates write them, also where they would reach past the end."""
    q, k, v, positions = case(H=32)
    new_k, new_v = new_tokens(num, 32)
    first = jnp.array([0, 70, 149])
    old = cache_write.consecutive(new_k, new_v, first[:, None] + jnp.arange(num)[None], (k, v))
    want = attend(q, *old, positions, **(RULE | rule))
    kept = np.array(k), np.array(v)
    y, written_k, written_v = write(q, k, v, positions, new_k, new_v, first, **rule)
    np.testing.assert_array_equal(k, kept[0])  # it was not donated
    np.testing.assert_array_equal(v, kept[1])
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(written_k, old[0])
    np.testing.assert_array_equal(written_v, old[1])


def test_new_keys_and_values_are_rounded_to_bfloat16():
    """To the nearest, ties to even, as XLA rounds them; NaN and infinities are kept."""
    q, k, v, positions = case(H=32)
    new_k, new_v = new_tokens(2, 32)
    ties = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, 1e-40, np.inf, -np.inf])
    new_k = new_k.at[0, 1, 0, :7].set(ties).at[2, 0, 1, 3].set(np.nan)
    new_v = new_v.at[2, 1].set(jax.lax.bitcast_convert_type(jnp.int32(-1), jnp.float32))
    first, old = jnp.array([3, 9, 140]), (stored(k), stored(v))
    slots = first[:, None] + jnp.arange(2)[None]
    want = cache_write.consecutive(new_k, new_v, slots, old)
    y, *written = write(q, *old, positions, new_k, new_v, first)
    for got, expected in zip(written, want, strict=True):
        assert got.dtype == jnp.uint16
        got, expected = cache_write.numbers(got), cache_write.numbers(expected)
        np.testing.assert_array_equal(got.astype(jnp.float32), expected.astype(jnp.float32))
    assert np.isnan(y[2]).any() and np.isfinite(y[1]).all()


@pytest.mark.parametrize("kept", [lambda x: x, stored], ids=["float32", "bfloat16"])
def test_a_donated_cache_is_written_in_place(kept):
    q, k, v, positions = case(H=32)
    k, v = kept(k), kept(v)
    new, first = tuple(new_tokens(2, 32)), jnp.array([3, 9, 1])

    def steps(k, v):
        def step(i, caches):
            y, *caches = attention.native_write(q, *caches, positions, *new, first + i, **RULE)
            return tuple(caches)

        return jax.lax.fori_loop(0, 4, step, (k, v))

    compiled = jax.jit(steps, donate_argnums=(0, 1)).lower(k, v).compile()
    cache = f"[{','.join(map(str, k.shape))}]"
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if cache in line and (" copy(" in line or "copy-start" in line)
    ]
    assert not copies


@pytest.mark.parametrize("wrong", ["tokens", "heads", "rows", "values", "first"])
def test_new_tokens_that_do_not_fit_are_refused(wrong):
    q, k = jnp.zeros((2, 2, 6, 32)), jnp.zeros((2, 2, 8, 32))
    shape = [2, 3, 2, 32]
    for name, axis, size in [("tokens", 1, 9), ("heads", 2, 1), ("rows", 0, 1)]:
        if wrong == name:
            shape[axis] = size
    new_v = jnp.zeros((2, 4, 2, 32) if wrong == "values" else shape)
    first = jnp.zeros(3 if wrong == "first" else 2, jnp.int32)
    mask = jnp.zeros((2, 2, 8))
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, k)]
    aliases = {"input_output_aliases": {1: 1, 2: 2}}
    call = native_code.function("peagle_write_and_attend", results, **aliases)
    with pytest.raises(jax.errors.JaxRuntimeError, match="sizes do not fit"):
        call(q, k, k, mask, jnp.zeros(0), jnp.zeros(shape), new_v, first, scale=np.float32(1))


@pytest.mark.parametrize("wrong", [(jnp.uint16, jnp.float32), (jnp.bfloat16, jnp.bfloat16)])
def test_caches_of_other_numbers_are_refused(wrong):
    q, mask = jnp.zeros((1, 2, 6, 16)), jnp.zeros((1, 2, 8))
    k, v = (jnp.zeros((1, 2, 8, 16), dtype) for dtype in wrong)
    call = native_code.function("peagle_step_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match="caches must be"):
        call(q, k, v, mask, jnp.zeros(0), scale=np.float32(1))


@pytest.mark.parametrize("wrong", ["heads", "slots", "tokens", "sinks"])
def test_arrays_that_do_not_fit_are_refused(wrong):
    q, k = jnp.zeros((1, 2, 5 if wrong == "heads" else 6, 16)), jnp.zeros((1, 2, 8, 16))
    mask = jnp.zeros((1, 3 if wrong == "tokens" else 2, 9 if wrong == "slots" else 8))
    sinks = jnp.zeros(5 if wrong == "sinks" else 0)
    call = native_code.function("peagle_step_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match="sizes do not fit"):
        call(q, k, k, mask, sinks, scale=np.float32(1))


def test_heads_that_are_no_whole_vectors_are_refused(lanes):
    q = jnp.zeros((1, 1, 2, lanes + 2))
    k = jnp.zeros((1, 1, 8, lanes + 2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no whole number of vectors"):
        step_attention.attend(q, k, k, jnp.zeros((1, 1, 8)), 1.0, None)
