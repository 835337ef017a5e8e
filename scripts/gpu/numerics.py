"""Every kernel against float64 on fresh random operands, in memory that was full of NaN before."""

import functools
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from gpu import exact
from gpu.exact import wide
from peagle_jax.kernels import (
    attention,
    cache_write,
    experts,
    fp8_matmul,
    fusion,
    packed_attention,
    vocab,
)
from peagle_jax.kernels.launch import unavailable_reason
from peagle_jax.kernels.packed_attention import AttentionIntervals
from peagle_jax.layers.moe import (
    GLU,
    ExpertLinear,
    ExpertWeights,
    Fp8ExpertLinear,
    Mxfp4ExpertLinear,
)
from peagle_jax.targets.gpt_oss import ClampedSwiGLU

DTYPE = (
    jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
)  # CPUs lack some products in bfloat16
LIMIT = 0.01  # relative error; bfloat16 operands lie between 0.001 and 0.01


def poison(gigabytes: float) -> None:
    """Free memory full of NaN, in pieces of every size: what a kernel does not write shows in its result."""
    large = [int(gigabytes * 2**30 / 2**i) for i in range(1, 8)]
    small = [2**i for i in range(8, 26)] * 8
    jax.block_until_ready([jnp.full(size // 4, jnp.nan, jnp.float32) for size in (*large, *small)])


def error(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def random(rng, *shape, dtype=None, scale=1.0):
    return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, dtype or DTYPE)


def forms(*names: str) -> list[str]:
    """Of these, those that run here, and the reference."""
    return ["reference", *(name for name in names if unavailable_reason(name) is None)]


def run(call, *args):
    """Its result; NaN in its place where it fails."""
    try:
        program = jax.jit(call).lower(*args).compile()
        poison(0.01 if jax.default_backend() == "cpu" else 8)
        return jax.block_until_ready(program(*args))
    except Exception as problem:
        print(f"failed: {type(problem).__name__}: {str(problem)[:500]}", file=sys.stderr)

        def unavailable_reason(x):
            return np.full(x.shape, np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0)

        return jax.tree.map(unavailable_reason, jax.eval_shape(call, *args))


def row(kernel: str, form: str, shape: str, *errors: float) -> dict:
    right = all(e < LIMIT for e in errors)  # and not NaN
    return {
        "part": "numerics",
        "kernel": kernel,
        "form": form,
        "shape": shape,
        "error": float(np.max(errors)),
        "right": right,
    }


def products(rng, tiny: bool, kind: str = "triton") -> Iterator[dict]:
    odd = [
        (1, 2048, 4096),
        (7, 4000, 2080),
        (16, 4096, 4096),
        (64, 4096, 8192),
        (130, 6144, 4096),
        (2000, 4096, 4096),
    ]
    for M, N, K in [(3, 96, 256)] if tiny else odd:
        for blocks in (False, True):
            w = fp8_matmul.quantize(random(rng, N, K, dtype=jnp.float32), blocks=blocks)
            x = random(rng, M, K) * jnp.asarray(rng.uniform(0.1, 10, (M, 1)), DTYPE)
            values, scale = fp8_matmul.quantize_rows(x, blocks=blocks)
            exact = (
                wide(values)
                * np.repeat(wide(scale), K if not blocks else 128, axis=1)[:, :K]
                @ wide(w.dequantized()).T
            )
            for form in forms(kind):
                if form == "mosaic" and fp8_matmul._unsupported("mosaic", x, w):
                    continue
                got = run(
                    lambda x, v, s, form=form: fp8_matmul.matmul(
                        x, fp8_matmul.Fp8Matrix(v, s), form
                    ),
                    x,
                    w.values,
                    w.scale,
                )
                yield row(
                    "fp8_matmul",
                    form,
                    f"{M} x {N} x {K}{', blocks' if blocks else ''}",
                    error(got, exact),
                )


def fusions(rng, tiny: bool) -> Iterator[dict]:
    for M, E, D in (
        [(3, 128, 64)] if tiny else [(1, 2048, 2048), (14, 2880, 2880), (100, 4096, 4096)]
    ):
        aux_hidden_states, gain = (
            random(rng, M, 3, E),
            jnp.asarray(rng.uniform(0.5, 2, 3 * E), DTYPE),
        )
        w = random(rng, 3 * E, D, scale=E**-0.5)
        for norm in ("none", "whole", "per_tap"):
            x = wide(aux_hidden_states)
            mean = (x**2).mean(axis=(1, 2) if norm == "whole" else 2, keepdims=True)
            x = x if norm == "none" else x / np.sqrt(mean + 1e-5)
            exact = (x.reshape(M, -1) * (1 if norm == "none" else wide(gain))) @ wide(w)
            used = None if norm == "none" else gain
            for form in forms("triton"):
                how = functools.partial(fusion.fuse, norm=norm, eps=1e-5, form=form)
                got = run(lambda t, w, g, how=how: how(t, w, g), aux_hidden_states, w, used)
                yield row("fusion", form, f"{M} x {E} x {D}, {norm}", error(got, exact))
        low = fp8_matmul.quantize(w.T)
        parts = (
            [fp8_matmul.quantize_rows(aux_hidden_states[:, i], blocks=True) for i in range(3)]
            if E % 128 == 0
            else []
        )
        exact = sum(
            wide(v)
            * np.repeat(wide(s), 128, axis=1)
            @ wide(low.dequantized()[:, i * E : (i + 1) * E]).T
            for i, (v, s) in enumerate(parts)
        )
        for form in forms("triton") if parts else ():

            def how(t, v, s, form=form):
                return fusion.fuse(t, fp8_matmul.Fp8Matrix(v, s), None, "none", 1e-5, form=form)

            yield row(
                "fusion",
                form,
                f"{M} x {E} x {D}, float8",
                error(run(how, aux_hidden_states, low.values, low.scale), exact),
            )


def attentions(rng, tiny: bool) -> Iterator[dict]:
    shapes = (
        [(2, 3, 4, 2, 16, 70, None, False), (2, 3, 4, 2, 16, 40, 30, True)]
        if tiny
        else [
            (8, 1, 32, 4, 128, 4096, None, False),
            (8, 8, 32, 4, 128, 4096, None, False),
            (3, 17, 32, 4, 128, 5000, None, False),
            (4, 8, 64, 8, 64, 3000, 128, False),
            (4, 8, 64, 8, 64, 144, 128, True),
            (2, 8, 32, 16, 256, 2000, 1024, False),
            (2, 8, 32, 4, 512, 2000, None, False),
            (1, 512, 32, 4, 128, 2048, None, False),
        ]
    )
    for B, T, N, G, H, S, window, ring in shapes:
        q, k, v = random(rng, B, T, N, H), random(rng, B, G, S, H), random(rng, B, G, S, H)
        lengths = rng.integers(T, 5 * S if ring else S + 1, B)
        lengths[-1] = T  # one that has only these queries, and one that is full
        lengths[0] = 4 * S - 1 if ring else S
        at = jnp.asarray(lengths[:, None] - T + np.arange(T)[None], jnp.int32)
        newest, slot = lengths[:, None] - 1, np.arange(S)[None]
        held = newest - (newest - slot) % S if ring else np.broadcast_to(slot, (B, S))
        sinks = random(rng, N) if window else None
        for float8 in (False, True):
            scales = {}
            if float8:
                (k8, k_scale), (v8, v_scale) = (fp8_matmul.scaled(x, axis=-1) for x in (k, v))
                scales = {"k_scale": k_scale, "v_scale": v_scale}
                wide_k, wide_v = (
                    wide(k8) * wide(k_scale)[..., None],
                    wide(v8) * wide(v_scale)[..., None],
                )
                kept = (k8, v8)
            else:
                wide_k, wide_v, kept = wide(k), wide(v), (k, v)
            rule = dict(window=window, scale=H**-0.5, sinks=sinks, **scales)
            want = exact.attention(
                wide(q),
                wide_k,
                wide_v,
                np.asarray(at),
                held,
                window,
                H**-0.5,
                None if sinks is None else wide(sinks),
            )
            where = jnp.asarray(held, jnp.int32) if ring else None
            for form in forms("triton"):

                def how(q, k, v, at, form=form, rule=rule, where=where):
                    return attention.attend(q, k, v, at, where, form=form, **rule)

                more = ", window and sinks" * bool(window) + ", ring" * ring + ", float8" * float8
                shape = f"{B} x {T} queries, {N}/{G} heads of {H}, {S} slots{more}"
                yield row("attention", form, shape, error(run(how, q, *kept, at), want))


def writes(rng, tiny: bool) -> Iterator[dict]:
    """Caches after two blocks, in a loop, the second over part of the first; slots that nobody wrote must be what they were."""
    for B, T, G, S, H in (
        [(2, 4, 2, 40, 16)]
        if tiny
        else [(1, 8, 4, 4096, 128), (32, 8, 8, 136, 64), (1, 1024, 4, 2048, 128)]
    ):
        slots = np.stack([rng.permutation(S + 5) for _ in range(B)])
        slots = np.stack([slots[:, :T], slots[:, T // 2 : T // 2 + T]])  # S and more: dropped
        new = (
            random(rng, 2, 2, B, T, G, H)
            * jnp.asarray([1, 5], DTYPE)[:, None, None, None, None, None]
        )  # keys and values; block
        mine = np.zeros((B, S + 5), bool)
        mine[np.arange(B)[None, :, None], slots] = True
        for dtype in (DTYPE, fp8_matmul.E4M3):
            held = tuple(random(rng, B, G, S, H, dtype=dtype) for _ in range(2))
            if dtype == fp8_matmul.E4M3:
                held += tuple(random(rng, B, G, S, dtype=jnp.float32, scale=0.01) for _ in range(2))
            want = exact.written(
                exact.written(held, new[0, 0], new[1, 0], slots[0]), new[0, 1], new[1, 1], slots[1]
            )
            for form in forms("triton"):

                def twice(new, slots, held, form=form):
                    def put(i, held):
                        return cache_write.write(new[0, i], new[1, i], slots[i], held, form=form)

                    return jax.lax.fori_loop(0, 2, put, held)

                got = [
                    np.moveaxis(np.asarray(x), 2, 1)
                    for x in run(twice, new, jnp.asarray(slots, jnp.int32), held)
                ]
                pairs = [(a, np.moveaxis(b, 2, 1)) for a, b in zip(got, want, strict=True)]
                here = mine[:, :S]
                same = all(a[~here].tobytes() == b[~here].tobytes() for a, b in pairs)
                errors = [error(wide(a[here]), wide(b[here])) if same else np.nan for a, b in pairs]
                yield row(
                    "cache_write",
                    form,
                    f"2 x {B} x {T} tokens, {G} heads of {H}, {S} slots, {jnp.dtype(dtype).name}",
                    *errors,
                )


def trainings(rng, tiny: bool) -> Iterator[dict]:
    """Three documents and chains behind them; output and all three gradients."""
    n, P, N, G, H = (40, 60, 4, 2, 16) if tiny else (1000, 2500, 16, 4, 128)
    seen = chains(rng, n, P)
    q, k, v, dy = (
        random(rng, 1, P, N, H),
        random(rng, 1, P, G, H),
        random(rng, 1, P, G, H),
        random(rng, 1, P, N, H),
    )
    slot, rows = np.arange(P)[None], np.arange(P)[:, None]
    first, last, own = (np.asarray(x)[0][:, None] for x in (seen.first, seen.last, seen.own))
    mask = (slot < n) & (slot >= first) & (slot <= last) | (slot >= n) & (slot <= rows) & (
        slot > rows - own
    )
    y, grads = exact.attention_gradients(*(wide(x)[0] for x in (q, k, v, dy)), mask, H**-0.5)
    for form in forms("triton"):

        def both(q, k, v, dy, form=form):
            out, back = jax.vjp(
                lambda *x: packed_attention.attend(*x, seen, H**-0.5, form=form)[0], q, k, v
            )
            return out, *back(dy)

        got = run(both, q, k, v, dy)
        errors = [error(a[0], b) for a, b in zip(got, (y, *grads), strict=True)]
        yield row(
            "packed_attention",
            form,
            f"{P} rows over {n} keys, {N}/{G} heads of {H}, with gradients",
            *errors,
        )


def chains(rng, n: int, P: int) -> AttentionIntervals:
    """What rows see: n positions of three documents, then chains of up to 7 behind anchors, and padding, which sees itself."""
    cuts = np.sort(rng.choice(np.arange(1, n), 2, replace=False))
    begin = np.concatenate([[0], cuts])[np.searchsorted(cuts, np.arange(n), side="right")]
    first, last, own = list(begin), list(range(n)), [0] * n
    for anchor in np.sort(rng.choice(n, (P - n) // 5, replace=False)):
        for depth in range(int(rng.integers(1, 8))):
            first.append(begin[anchor]), last.append(anchor), own.append(depth + 1)
    first, last, own = (
        [*x[:P], *[fill] * (P - len(x))] for x, fill in ((first, 1), (last, 0), (own, 1))
    )
    return AttentionIntervals(*(jnp.asarray(x, jnp.int32)[None] for x in (first, last, own)), n, 7)


def words(rng, tiny: bool) -> Iterator[dict]:
    """The logits of the words that were chosen beside the largest."""
    for M, K, V in (
        [(3, 64, 300)] if tiny else [(1, 2048, 151936), (8, 2048, 151936), (100, 2880, 32000)]
    ):
        x, w = random(rng, M, K), random(rng, K, V, scale=K**-0.5)
        logits = wide(x) @ wide(w)
        for form in forms("triton"):
            found = run(lambda x, w, form=form: vocab.peaks(x, w, 1, form=form), x, w)
            chosen = np.take_along_axis(logits, np.asarray(found.ids), 1)[:, 0]
            lse = np.log(np.exp(logits).sum(axis=1))
            yield row(
                "vocab peaks",
                form,
                f"{M} x {K} x {V}",
                error(found.lse, lse),
                error(chosen, logits.max(axis=1)),
            )
            tied = run(
                lambda x, w, form=form: vocab.peaks(x, w, 3, by_word=True, form=form), x, w.T
            )
            argmax_logits, chosen = (
                np.sort(logits, axis=1)[:, :-4:-1],
                np.take_along_axis(logits, np.asarray(tied.ids), 1),
            )
            yield row(
                "vocab peaks",
                form,
                f"{M} x {K} x {V}, tied, three largest",
                error(tied.values, argmax_logits),
                error(chosen, argmax_logits),
            )
        low = fp8_matmul.quantize(w.T)
        logits = wide(x) @ wide(low.dequantized()).T
        for form in forms("triton"):
            found = run(
                lambda x, v, s, form=form: vocab.peaks(x, v, 1, s, by_word=True, form=form),
                x,
                low.values,
                low.scale,
            )
            chosen = np.take_along_axis(logits, np.asarray(found.ids), 1)[:, 0]
            yield row(
                "vocab peaks",
                form,
                f"{M} x {K} x {V}, float8",
                error(chosen, logits.max(axis=1)),
                error(found.values[:, 0], chosen),
            )


def distances(rng, tiny: bool) -> Iterator[dict]:
    """KL alone; and both losses, weighted by row, with capped teacher's logits. With the gradients of their sums."""
    P, D, W = (20, 32, 200) if tiny else (300, 1024, 20000)
    x, w, tx, tw = (
        random(rng, P, D),
        random(rng, D, W, scale=D**-0.5),
        random(rng, P, D),
        random(rng, D, W, scale=D**-0.5),
    )
    for cap in (None, 3.0):
        of_kl, of_hard = np.ones(P), np.zeros(P)
        if cap is not None:
            of_kl, of_hard = rng.uniform(0.5, 2, P), rng.uniform(0.5, 2, P)
        above = jnp.asarray(of_kl, jnp.float32), jnp.asarray(of_hard, jnp.float32)
        want = exact.distance(*(wide(y) for y in (x, w, tx, tw)), cap, of_kl, of_hard)
        for form in forms("triton"):

            def both(x, w, tx, tw, form=form, cap=cap, above=above):
                losses, back = jax.vjp(
                    lambda x, w: vocab.distance(x, w, tx, tw, cap, form)[:2], x, w
                )
                return *losses, *back(above)

            shape = (
                f"{P} x {D} x {W}, with gradients"
                + f", teacher capped at {cap}, cross entropy" * (cap is not None)
            )
            yield row("vocab distance", form, shape, *map(error, run(both, x, w, tx, tw), want))


def mixtures(rng, tiny: bool) -> Iterator[dict]:
    """By every form that a GPU may take. MXFP4 as GPT-OSS has it, gate and up in turns and biases; some pairs are another device's."""
    from flax import nnx

    count, dim, width, k = (5, 64, 32, 2) if tiny else (32, 1024, 512, 4)
    for kind in ("plain", "row", "block", "mxfp4"):
        act = ClampedSwiGLU(1.5, 1.3) if kind == "mxfp4" else GLU(jax.nn.silu)
        stacks = [stack(rng, kind, count, *size) for size in ((dim, 2 * width), (width, dim))]
        graph, state = nnx.split(nnx.List(stacks))

        def bank(state, graph=graph, act=act):
            return ExpertWeights(*nnx.merge(graph, state), act, count)

        for n in (1, 7) if tiny else (1, 8, 77, 300):
            x = random(rng, n, dim)
            chosen = np.stack([rng.permutation(count)[:k] for _ in range(n)])
            share = rng.uniform(0.1, 1, (n, k))
            chosen[rng.random((n, k)) < 0.1] = count
            want = exact.mixture(wide(x), chosen, share, stacks, act)
            for form in ["grouped", *forms("triton")[1:]]:
                args = state, x, jnp.asarray(chosen, jnp.int32), jnp.asarray(share, jnp.float32)
                got = run(
                    lambda state, *a, form=form, bank=bank: experts.FORMS[form](*a, bank(state)),
                    *args,
                )
                yield row(
                    "experts",
                    form,
                    f"{n} tokens of {k} of {count}, {dim} x {width}, {kind}",
                    error(got, want),
                )


def stack(rng, kind: str, count: int, inputs: int, outputs: int):
    from flax import nnx

    if kind == "plain":
        made = ExpertLinear(count, inputs, outputs, bias=False, dtype=DTYPE, rngs=nnx.Rngs(0))
        made.kernel[...] = random(rng, count, inputs, outputs, scale=inputs**-0.5)
    elif kind == "mxfp4":
        made = Mxfp4ExpertLinear(count, inputs, outputs, bias=True, dtype=DTYPE, rngs=nnx.Rngs(0))
        made.blocks[...] = jnp.asarray(rng.integers(0, 256, made.blocks.shape), jnp.uint8)
        made.scales[...] = jnp.asarray(rng.integers(118, 123, made.scales.shape), jnp.uint8)
        made.bias[...] = random(rng, count, outputs, scale=0.3)
    else:
        made = Fp8ExpertLinear(count, inputs, outputs, bias=None, blocks=kind == "block")
        made.values[...] = jnp.asarray(
            rng.standard_normal(made.values.shape, np.float32).astype(ml_dtypes.float8_e4m3fn)
        )
        made.scale[...] = jnp.asarray(
            rng.uniform(0.5, 2, made.scale.shape) * inputs**-0.5, jnp.float32
        )
    return made


PARTS = {
    "products": products,
    "attention": attentions,
    "experts": mixtures,
    "words": words,
    "distances": distances,
    "training": trainings,
    "writes": writes,
    "fusion": fusions,
    "mosaic": functools.partial(products, kind="mosaic"),
}
