"""Caches that grow with the text: the same answers, no copy of a cache in the compiled loop."""

import cache_copies
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.decode import growth, loop, prefill
from peagle_jax.decode.generate import generate
from peagle_jax.kernels import cache_write, processor
from peagle_jax.layers import CachedAttention, default_cache_dtype
from peagle_jax.layers.rope import Rope
from peagle_jax.types import AttentionRule, CacheShape, KVCache

CONTEXT = {"context": 640}


def test_sizes():
    """The fewest slots that hold what is written, whatever is reserved."""
    assert [growth.num_slots(n, 16_384) for n in (1, 256, 257, 513)] == [256, 256, 512, 1024]
    assert growth.num_slots(9_000, 9_100) == 9_216  # not 16,384: no more than is reserved
    assert growth.num_slots(300, 290) == 512  # more than is reserved, where a step needs it
    assert growth.num_slots(20, 70) == 128  # less than the smallest size is reserved
    assert len({growth.num_slots(n, n) for n in range(1, 257)}) == 4
    # programs are few: no more than 8 sizes between one power of two and the next
    assert len({growth.num_slots(n, n) for n in range(257, 32_769)}) == 1 + 2 + 4 + 4 * 8


@pytest.mark.parametrize("method", [None, "peagle", "eagle3", "eagle"])
def test_growth_does_not_change_the_text(method, monkeypatch):
    """Beside caches that have all slots from the start; rows are full at different times."""
    target, head = tiny.pair(method, **CONTEXT)
    prompts = [[3, 14, 15], [9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 23]]

    def answers(first_slots):
        monkeypatch.setattr(growth, "FIRST_SLOTS", first_slots)
        return generate(
            target,
            head if method else None,
            prompts,
            k=3 if method else None,
            method=method,
            max_new_tokens=61,
        )

    grown, whole = answers(16), answers(128)
    assert [a.output_token_ids for a in grown] == [a.output_token_ids for a in whole]
    assert [a.num_accepted_per_pos for a in grown] == [a.num_accepted_per_pos for a in whole]


def test_programs_are_few(monkeypatch):
    """One program for a size, and not one for each number of tokens that is reserved."""
    monkeypatch.setattr(growth, "FIRST_SLOTS", 16)
    target = tiny.target(seed=5, **CONTEXT)
    sizes = set()
    decode = loop.decode

    def noting(*arguments):
        sizes.add(arguments[-1].output.shape[1])
        return decode(*arguments)

    monkeypatch.setattr(loop, "decode", noting)
    for new in (5, 20, 33, 38, 60, 85, 90):
        (answer,) = generate(target, None, [[3, 14, 15, 9]], max_new_tokens=new)
        assert len(answer.output_token_ids) == new
    assert sizes == {16, 32, 48, 64, 96}  # doubled, or multiples of 16 up to 4 + 90


def test_sizes_while_a_prompt_is_read(monkeypatch):
    """They hold every chunk, and end with what decoding asks for."""
    monkeypatch.setattr(prefill, "FIRST_SLOTS", 16)
    assert prefill.cache_sizes(8, 45, 96) == [16, 16, 32, 32, 64, 96]
    assert prefill.cache_sizes(8, 40, 40) == [16, 16, 32, 32, 40]
    assert prefill.cache_sizes(40, 40, 300) == [300]  # nothing to grow


@pytest.mark.parametrize("method", [None, "peagle", "eagle3"])
@pytest.mark.parametrize("kind", ["full", "window", "float8", "bfloat16", "bfloat16 window"])
def test_growth_in_prefill_does_not_change_the_text(method, kind, monkeypatch):
    """Beside a cache that has all slots when the first chunk is read; a ring keeps its slots."""
    changes = {
        "full": {},
        "window": {"windows": (None, 13, 13, None)},
        "float8": {"cache_dtype": jnp.dtype(jnp.float8_e4m3fn)},
        "bfloat16": {"dtype": jnp.dtype(jnp.bfloat16)},
        "bfloat16 window": {"dtype": jnp.dtype(jnp.bfloat16), "windows": (None, 13, 13, None)},
    }[kind]
    size = {"head_dim": 16, "rope": Rope.from_hf({"rope_theta": 777.0}, 16, "")}  # for the kernels
    size = {**CONTEXT, **(size if "dtype" in changes else {})}
    of_head = {name: value for name, value in changes.items() if name == "dtype"}
    target, head = tiny.target(**size, **changes), tiny.head(**size, **of_head)
    prompts = [np.random.default_rng(n).integers(1, 41, n).tolist() for n in (9, 45)]
    sizes = []
    read_chunk = prefill.read_chunk

    def noting(*arguments):
        group = arguments[-1].cache.groups[0]
        sizes.append(group.k[0].shape[2])
        return read_chunk(*arguments)

    monkeypatch.setattr(prefill, "read_chunk", noting)

    def answers(first_slots):
        monkeypatch.setattr(prefill, "FIRST_SLOTS", first_slots)
        sizes.clear()
        return generate(
            target,
            head if method else None,
            prompts,
            k=3 if method else None,
            method=method,
            max_new_tokens=11,
            prefill_chunk=8,
            sliding_cache="window" in kind,
            num_threads=1,
        )

    grown = answers(16)
    assert sizes[:5] == [16, 16, 32, 32, 64] and sizes[5] >= 64
    whole = answers(256)
    assert len(set(sizes)) == 1
    assert [a.output_token_ids for a in grown] == [a.output_token_ids for a in whole]
    assert [a.num_accepted_per_pos for a in grown] == [a.num_accepted_per_pos for a in whole]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 8, 17])
@pytest.mark.parametrize("method", cache_copies.METHODS)
def test_no_cache_is_copied(method, batch, dtype):
    """All that makes an array of a cache's size and dtype is an update in place.

    Matrix units read keys and values in bfloat16: that conversion is not of the cache's dtype.
    """
    text, arrays = cache_copies.compiled_loop(method, batch, dtype)
    stored = cache_write.array_dtype(default_cache_dtype(dtype, [16]))
    assert {dtype for dtype, _ in arrays} == {jnp.dtype(stored).name}
    made = cache_copies.operations(text, arrays)
    assert made  # else nothing was looked at
    assert not [operation for operation in made if not operation[-1]]


@pytest.mark.parametrize("batch, dtype", [(1, "float32"), (8, "bfloat16")])
def test_no_cache_is_copied_by_attention_in_blocks(batch, dtype, monkeypatch):
    """The loop over blocks reads caches, as bfloat16 or as they are, that the other one writes."""
    monkeypatch.setattr(processor, "instructions", lambda: "avx512_bf16")
    calls = tiny.attend_in_blocks(monkeypatch)
    text, arrays = cache_copies.compiled_loop("peagle", batch, dtype)
    assert 6 in calls  # the tokens of a verification
    made = cache_copies.operations(text, arrays)
    assert made and not [operation for operation in made if not operation[-1]]


@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_consecutive_slots(T, dtype):
    """As the scatter, up to the last slot."""
    rng = np.random.default_rng(4)
    dtype = cache_write.array_dtype(dtype)
    cache = tuple(jnp.asarray(99 * rng.normal(size=(3, 2, 9, 6)), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(3, T, 2, 6)), jnp.float32) for _ in range(2))
    slots = jnp.array([0, 3, 9 - T])[:, None] + jnp.arange(T)[None]
    got = cache_write.write(k, v, slots, cache, are_consecutive=True)
    want = cache_write.reference(k, v, slots, cache)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert not np.array_equal(got[0], cache[0])


def test_one_slot_alone():
    cache = KVCache.empty((CacheShape((0,), 2, 6, None),), 1, 1, jnp.float32)
    q, k, v = (jnp.full((1, 1, n, 6), x) for n, x in ((4, 1.0), (2, 2.0), (2, 3.0)))
    attend = CachedAttention(jnp.zeros((1, 1), jnp.int32))
    y, cache = attend(0, q, k, v, cache, AttentionRule(None, 1.0))
    assert np.array_equal(y, np.full((1, 1, 4, 6), 3.0))
    assert np.array_equal(cache.groups[0].k[0], np.full((1, 2, 1, 6), 2.0))
