"""New keys and values in a cache: Triton against the reference, the reference against loops."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu.interpreter import Sparse, interpret, interpret_sparse

from peagle_jax.kernels import cache_write, cache_write_triton
from peagle_jax.kernels.fp8_matmul import E4M3


def case(B, T, G, S, H, dtype, seed=1):
    """A cache full of other numbers; some slots do not exist, and no row's tokens share one."""
    rng = np.random.default_rng(seed)

    def random(*shape, dtype=np.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    slots = np.stack([rng.permutation(S + T)[:T] for _ in range(B)])  # S and more: dropped
    cache = random(B, G, S, H, dtype=dtype), random(B, G, S, H, dtype=dtype)
    if dtype == E4M3:
        cache += random(B, G, S), random(B, G, S)
    k, v = random(B, T, G, H) * 30, random(B, T, G, H)
    return k.at[0, 0, 0].set(0), v, jnp.asarray(slots, jnp.int32), cache


def by_hand(k, v, slots, cache):
    """One token and head at a time."""
    out = [np.array(x, np.float64) for x in cache]
    for b, t, g in np.ndindex(*k.shape[:3]):
        if (s := int(slots[b, t])) < cache[0].shape[2]:
            for i, new in enumerate((k, v)):
                x = np.asarray(new[b, t, g], np.float32)
                if len(cache) == 4:
                    top = np.abs(x).max()
                    scale = top / np.float32(448) if top > 0 else np.float32(1)
                    out[2 + i][b, g, s] = scale
                    x = (x / scale).astype(ml_dtypes.float8_e4m3fn)
                out[i][b, g, s] = x.astype(cache[i].dtype)
    return out


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, E4M3], ids=["float32", "bfloat16", "float8"]
)
@pytest.mark.parametrize("B, T, G, S, H", [(1, 1, 1, 3, 16), (3, 5, 3, 20, 24), (2, 9, 8, 8, 64)])
def test_all_agree(B, T, G, S, H, dtype):
    """The kernel agrees bit for bit; XLA may round a scale otherwise, and then a value.

    Slots that no token was written to stay as they are.
    """
    args = case(B, T, G, S, H, dtype)
    want = by_hand(*args)
    for a, b in zip(cache_write_triton.write(*args, start=interpret), want, strict=True):
        assert np.array_equal(np.asarray(a, np.float64), b)
    for got in (cache_write.reference(*args), cache_write.write(*args)):
        assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in args[3]]
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            a = np.asarray(a, np.float64)
            if i > 1:  # a scale
                assert np.allclose(a, b, rtol=2e-7, atol=0)
            else:
                assert np.mean(a != b) < 0.01 and (np.abs(a - b) <= np.abs(b) / 8).all()


def test_the_bits_of_bfloat16():
    """On a CPU, where XLA would make a whole cache float32 to move a part of it."""
    k, v, slots, cache = case(3, 5, 3, 20, 24, jnp.bfloat16)
    stored = tuple(jax.lax.bitcast_convert_type(x, jnp.uint16) for x in cache)
    assert cache_write.array_dtype(jnp.bfloat16) == stored[0].dtype
    assert cache_write.array_dtype(jnp.float32) == jnp.float32
    want = cache_write.reference(k, v, slots, cache)
    for got, expected in zip(cache_write.write(k, v, slots, stored), want, strict=True):
        assert got.dtype == jnp.uint16
        assert np.array_equal(cache_write.numbers(got), expected)


def test_nan_is_in_the_scale_of_what_is_written_in_float8():
    """Where numbers are decoded by their bits, NaN would otherwise count as 480."""
    k, v, slots, cache = case(2, 3, 2, 20, 24, E4M3)
    slots = jnp.asarray([[0, 1, 2], [5, 6, 7]], jnp.int32)
    k, v = k.at[1, 2, 0, 5].set(jnp.nan), v.at[0, 1, 1, 0].set(jnp.nan)
    for write in (
        functools.partial(cache_write_triton.write, start=interpret),
        cache_write.reference,
    ):
        _, _, k_scale, v_scale = write(k, v, slots, cache)
        assert np.argwhere(np.isnan(k_scale)).tolist() == [[1, 0, 7]]
        assert np.argwhere(np.isnan(v_scale)).tolist() == [[0, 1, 1]]


def test_slots_before_the_first_are_dropped_by_the_kernel():
    """There XLA would count from the end. Nobody writes there, and a kernel must not either."""
    k, v, _, cache = case(1, 2, 2, 4, 16, jnp.float32)
    got = cache_write_triton.write(k, v, jnp.asarray([[-1, 4]]), cache, start=interpret)
    assert all(np.array_equal(a, b) for a, b in zip(got, cache, strict=True))


def test_caches_of_more_than_2_31_numbers():
    """The second head's numbers begin at 2^31, where 32 bits wrap around."""
    H, S = 128, 2**24
    k, v, _, _ = case(1, 2, 2, 4, H, jnp.float32)
    caches = Sparse((1, 2, S, H), np.float32), Sparse((1, 2, S, H), np.float32)

    def write(k, v, slots, *cache, start):
        return cache_write_triton.write(k, v, slots, cache, start=start)

    interpret_sparse(write, k, v, jnp.asarray([[0, 2]], jnp.int32), *caches)
    for cache, new in zip(caches, (k, v), strict=True):
        assert np.array_equal(cache.array[:, :, [0, 2]], np.swapaxes(new, 1, 2))
        assert not cache.array[:, :, [1, 3]].any()


def test_an_output_is_the_array_that_it_changes():
    """Without an alias jax-triton would make new memory, which holds nothing of the cache."""
    for dtype, arrays in ((jnp.bfloat16, 2), (E4M3, 4)):
        launches = []

        def start(launch, launches=launches):
            launches.append(launch)
            return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.outputs)

        *new, cache = case(1, 2, 2, 4, 16, dtype)
        cache_write_triton.write(*new, cache, start=start)
        launch = launches[0]
        changed = launch.input_output_aliases
        assert sorted(changed.values()) == list(range(arrays)) and not launch.new_outputs
        assert all(launch.inputs[i] is cache[o] for i, o in changed.items())
