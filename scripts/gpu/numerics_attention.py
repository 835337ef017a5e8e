"""Attention and cache writes against float64, on fresh random operands."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gpu import checking, exact
from gpu.checking import error
from gpu.exact import to_float64
from peagle_jax.kernels import attention, cache_write, fp8_matmul, packed_attention
from peagle_jax.kernels.packed_attention import AttentionIntervals

# rows, tokens, query heads, KV heads, head size, slots, window, ring
ATTENTION_SHAPES = [
    (8, 1, 32, 4, 128, 4096, None, False),
    (8, 8, 32, 4, 128, 4096, None, False),
    (3, 17, 32, 4, 128, 5000, None, False),
    (4, 8, 64, 8, 64, 3000, 128, False),
    (4, 8, 64, 8, 64, 144, 128, True),
    (2, 8, 32, 16, 256, 2000, 1024, False),
    (2, 8, 32, 4, 512, 2000, None, False),
    (1, 512, 32, 4, 128, 2048, None, False),
]
TINY_ATTENTION_SHAPES = [(2, 3, 4, 2, 16, 70, None, False), (2, 3, 4, 2, 16, 40, 30, True)]


def attentions(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """Cached attention, each shape with a cache in the dtype of queries and one in float8."""
    for shape in TINY_ATTENTION_SHAPES if tiny else ATTENTION_SHAPES:
        B, T, N, G, H, S, window, ring = shape
        q = checking.random(rng, B, T, N, H)
        k, v = checking.random(rng, B, G, S, H), checking.random(rng, B, G, S, H)
        lengths = rng.integers(T, 5 * S if ring else S + 1, B)
        lengths[-1] = T  # a row that has only these queries, and one that is full
        lengths[0] = 4 * S - 1 if ring else S
        positions = jnp.asarray(lengths[:, None] - T + np.arange(T)[None], jnp.int32)
        newest, slot = lengths[:, None] - 1, np.arange(S)[None]
        if ring:
            kv_positions = newest - (newest - slot) % S
        else:
            kv_positions = np.broadcast_to(slot, (B, S))
        sinks = checking.random(rng, N) if window else None
        for float8 in (False, True):
            scales = {}
            cache = k, v
            exact_k, exact_v = to_float64(k), to_float64(v)
            if float8:
                (k8, k_scale), (v8, v_scale) = (fp8_matmul.scaled(x, axis=-1) for x in (k, v))
                scales = {"k_scale": k_scale, "v_scale": v_scale}
                cache = k8, v8
                exact_k = to_float64(k8) * to_float64(k_scale)[..., None]
                exact_v = to_float64(v8) * to_float64(v_scale)[..., None]
            rule = dict(window=window, scale=H**-0.5, sinks=sinks, **scales)
            want = exact.attention(
                to_float64(q),
                exact_k,
                exact_v,
                np.asarray(positions),
                kv_positions,
                window,
                H**-0.5,
                None if sinks is None else to_float64(sinks),
            )
            ring_positions = jnp.asarray(kv_positions, jnp.int32) if ring else None
            for form in checking.forms("triton"):

                def attend(q, k, v, positions, form=form, rule=rule, ring_positions=ring_positions):
                    return attention.attend(q, k, v, positions, ring_positions, form=form, **rule)

                more = ", window and sinks" * bool(window) + ", ring" * ring + ", float8" * float8
                text = f"{B} x {T} queries, {N}/{G} heads of {H}, {S} slots{more}"
                got = checking.run(attend, q, *cache, positions)
                yield checking.row("attention", form, text, error(got, want))


def writes(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """Caches after two blocks, written in a loop, the second over part of the first.

    Slots that nobody wrote to must be what they were.
    """
    shapes = [(1, 8, 4, 4096, 128), (32, 8, 8, 136, 64), (1, 1024, 4, 2048, 128)]
    for B, T, G, S, H in [(2, 4, 2, 40, 16)] if tiny else shapes:
        slots = np.stack([rng.permutation(S + 5) for _ in range(B)])  # S and more: dropped
        slots = np.stack([slots[:, :T], slots[:, T // 2 : T // 2 + T]])
        # [keys and values, block, B T G H]; values are larger than keys
        new = checking.random(rng, 2, 2, B, T, G, H)
        new *= jnp.asarray([1, 5], checking.DTYPE)[:, None, None, None, None, None]
        is_written = np.zeros((B, S + 5), bool)
        is_written[np.arange(B)[None, :, None], slots] = True
        is_written = is_written[:, :S]
        for dtype in (checking.DTYPE, fp8_matmul.E4M3):
            cache = tuple(checking.random(rng, B, G, S, H, dtype=dtype) for _ in range(2))
            if dtype == fp8_matmul.E4M3:
                cache += tuple(
                    checking.random(rng, B, G, S, dtype=jnp.float32, scale=0.01) for _ in range(2)
                )
            want = exact.written(cache, new[0, 0], new[1, 0], slots[0])
            want = exact.written(want, new[0, 1], new[1, 1], slots[1])
            for form in checking.forms("triton"):

                def write_twice(new, slots, cache, form=form):
                    def write(i, cache):
                        return cache_write.write(new[0, i], new[1, i], slots[i], cache, form=form)

                    return jax.lax.fori_loop(0, 2, write, cache)

                got = checking.run(write_twice, new, jnp.asarray(slots, jnp.int32), cache)
                # slots before heads, as in `is_written`
                pairs = [
                    (np.moveaxis(np.asarray(a), 2, 1), np.moveaxis(b, 2, 1))
                    for a, b in zip(got, want, strict=True)
                ]
                untouched = all(
                    a[~is_written].tobytes() == b[~is_written].tobytes() for a, b in pairs
                )
                errors = [
                    error(to_float64(a[is_written]), to_float64(b[is_written])) for a, b in pairs
                ]
                yield checking.row(
                    "cache_write",
                    form,
                    f"2 x {B} x {T} tokens, {G} heads of {H}, {S} slots, {jnp.dtype(dtype).name}",
                    *(errors if untouched else [np.nan]),
                )


def trainings(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """Three documents and chains behind them; the output and all three gradients."""
    n, P, N, G, H = (40, 60, 4, 2, 16) if tiny else (1000, 2500, 16, 4, 128)
    intervals = chains(rng, n, P)
    q, k, v, dy = (checking.random(rng, 1, P, heads, H) for heads in (N, G, G, N))
    key, query = np.arange(P)[None], np.arange(P)[:, None]
    first, last, chain_len = (
        np.asarray(x)[0][:, None] for x in (intervals.first, intervals.last, intervals.chain_len)
    )
    sees_depth0 = (key < n) & (key >= first) & (key <= last)
    sees_chain = (key >= n) & (key <= query) & (key > query - chain_len)
    arrays = (to_float64(x)[0] for x in (q, k, v, dy))
    y, grads = exact.attention_gradients(*arrays, sees_depth0 | sees_chain, H**-0.5)
    for form in checking.forms("triton"):

        def output_and_grads(q, k, v, dy, form=form):
            def attend(q, k, v):
                return packed_attention.attend(q, k, v, intervals, H**-0.5, form=form)[0]

            out, vjp = jax.vjp(attend, q, k, v)
            return out, *vjp(dy)

        got = checking.run(output_and_grads, q, k, v, dy)
        errors = [error(a[0], b) for a, b in zip(got, (y, *grads), strict=True)]
        text = f"{P} rows over {n} keys, {N}/{G} heads of {H}, with gradients"
        yield checking.row("packed_attention", form, text, *errors)


def chains(rng: np.random.Generator, n: int, P: int) -> AttentionIntervals:
    """What P rows see: n positions of three documents, then chains of up to 7 behind anchors.

    The rest is padding, which sees itself.
    """
    cuts = np.sort(rng.choice(np.arange(1, n), 2, replace=False))
    begin = np.concatenate([[0], cuts])[np.searchsorted(cuts, np.arange(n), side="right")]
    first, last, chain_len = list(begin), list(range(n)), [0] * n
    for anchor in np.sort(rng.choice(n, (P - n) // 5, replace=False)):
        for depth in range(int(rng.integers(1, 8))):
            first.append(begin[anchor])
            last.append(anchor)
            chain_len.append(depth + 1)

    def to_rows(values, padding):
        values = [*values[:P], *[padding] * (P - len(values))]
        return jnp.asarray(values, jnp.int32)[None]

    return AttentionIntervals(to_rows(first, 1), to_rows(last, 0), to_rows(chain_len, 1), n, 7)
