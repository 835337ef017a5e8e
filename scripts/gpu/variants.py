"""Choices that arithmetic made, beside their alternatives: splits, warps, forms by rows.

Each row has the choice of today twice, "now" and "now, again": what differs between these two is
what the timings cannot tell.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gpu.numerics import random_expert_linear
from gpu.speed import Rows, attended, available, mixture, normal, product_by_blocks, tokens
from gpu.timing import bytes_of, compare, rotation
from peagle_jax.kernels import fp8_matmul, routing
from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.layers.moe import GLU, ExpertWeights

PASSES = 20
# experts, choices of a token, and sizes of both matrices; of a dry run at True
EXPERTS = {False: (128, 8, 2048, 768), True: (5, 2, 64, 32)}


def twice(now: Callable, others: dict[str, Callable]) -> dict[str, Callable]:
    """The forms to compare; "now" stands first and last."""
    return {"now": now, **others, "now, again": lambda *operands: now(*operands)}


def with_triton(part: Callable[[dict, bool], Iterator[dict]]) -> Callable:
    """The part, which has no rows where Triton kernels do not run."""

    @functools.wraps(part)
    def rows(ceilings: dict, tiny: bool) -> Iterator[dict]:
        if available("triton"):
            yield from part(ceilings, tiny)

    return rows


@with_triton
def splits(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """Attention over a float8 cache of one row, cut into more and fewer splits."""
    from peagle_jax.kernels import attention_triton

    row = Rows("variants: attention", ceilings)
    N, G, H = (4, 2, 16) if tiny else (32, 4, 128)

    def attend(q, positions, k, v, k8, k_scale, v8, v_scale, **overrides):
        rule = dict(window=None, scale=H**-0.5, sinks=None, k_scale=k_scale, v_scale=v_scale)
        return attention_triton.attend(q, k8, v8, positions, None, **rule, **overrides)

    overrides = {
        "99 shares": dict(shares=99),
        "132 shares": dict(shares=132),
        "spans of 128": dict(min_span=128),
        "spans of 32": dict(min_span=32, bs=32),
        "8 warps": dict(warps=8),
    }
    for T, context in [(3, 200)] if tiny else [(1, 1024), (8, 1024), (1, 16384), (8, 16384)]:
        positions = jnp.asarray(context + np.arange(T)[None], jnp.int32)

        def operands(key, T=T, S=context + 64, positions=positions):
            a, b, c = jax.random.split(key, 3)
            k, v = normal(b, 1, G, S, H), normal(c, 1, G, S, H)
            (k8, ks), (v8, vs) = fp8_matmul.scaled(k, axis=-1), fp8_matmul.scaled(v, axis=-1)
            return normal(a, 1, T, N, H), positions, k, v, k8, ks, v8, vs

        others: dict[str, Callable] = {
            name: functools.partial(attend, **override)
            for name, override in list(overrides.items())[: 1 if tiny else None]
        }
        others["xla"] = functools.partial(attended, "reference", True)
        forms = twice(functools.partial(attended, "triton", True), others)
        sets = rotation(operands, jax.random.key(0))
        seconds = compare(forms, sets, passes=PASSES)
        yield row(f"{T} queries over {context}, FP8", *seconds, 2 * context * G * (H + 4))


@with_triton
def products(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """FP8 products of few rows: warps of the form without tensor cores, splits of the other."""
    from peagle_jax.kernels import fp8_matmul_triton, gemv_triton

    row = Rows("variants: matmul", ceilings)

    def vector_form(x, w, values, row_scale, block_scale, **overrides):
        return gemv_triton.product(x, [Fp8Matrix(values, block_scale)], x.dtype, **overrides)[0]

    def tensor_form(x, w, values, row_scale, block_scale, **overrides):
        x8, x_scale = fp8_matmul_triton.quantize_rows(x, blocks=True)
        return fp8_matmul_triton.product(x8, x_scale, values, block_scale, x.dtype, **overrides)

    def quantized_in_xla(x, w, values, row_scale, block_scale):
        x8, x_scale = fp8_matmul.quantize_rows(x, blocks=True)
        return fp8_matmul_triton.product(x8, x_scale, values, block_scale, x.dtype)

    for N, K in [(96, 256)] if tiny else [(2048, 4096), (4096, 2048)]:
        for M in (3,) if tiny else (8, 4, 1):

            def operands(key, M=M, N=N, K=K):
                a, b = jax.random.split(key)
                w = normal(b, N, K, scale=K**-0.5)
                rows, blocks = fp8_matmul.quantize(w), fp8_matmul.quantize(w, blocks=True)
                return normal(a, M, K), w.T, rows.values, rows.scale, blocks.scale

            others: dict[str, Callable] = {}
            if M <= 4:
                for bn, warps in ((8, 2), (4, 2), (8, 4), (4, 4), (4, 1))[: 1 if tiny else None]:
                    overrides = dict(bn=bn, warps=warps)
                    others[f"vectors, {bn} outputs, {warps} warps"] = functools.partial(
                        vector_form, **overrides
                    )
            if M > 1:
                for bn, parts in ((64, 4), (64, 1), (64, 2), (64, 8))[: 1 if tiny else None]:
                    overrides = dict(bn=bn, splits=parts, warps=4)
                    others[f"{bn} outputs, {parts} parts"] = functools.partial(
                        tensor_form, **overrides
                    )
                others["quantized by XLA"] = quantized_in_xla
            others["bf16 by XLA"] = lambda x, w, values, row_scale, block_scale: x @ w
            forms = twice(functools.partial(product_by_blocks, "triton"), others)
            sets = rotation(operands, jax.random.key(M))
            seconds = compare(forms, sets, passes=PASSES)
            yield row(f"{M} x {N} x {K}, blocks", *seconds, N * K + 2 * M * (N + K))


def random_experts(rng: np.random.Generator, tiny: bool) -> tuple:
    """(their nnx graph, two states of them) at the sizes of Qwen3-Coder-30B-A3B."""
    count, _, dim, width = EXPERTS[tiny]
    shapes = (dim, 2 * width), (width, dim)

    def one():
        kind = "row" if tiny else "block"
        return nnx.split(
            nnx.List([random_expert_linear(rng, kind, count, *shape) for shape in shapes])
        )

    (graph, state), (_, other_state) = one(), one()
    return graph, (state, other_state)


@with_triton
def mixtures(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """FP8 experts of few tokens, pair by pair and sorted into tiles."""
    from peagle_jax.kernels import experts_gemv_triton, experts_triton

    row, rng = Rows("variants: experts", ceilings), np.random.default_rng(0)
    count, k, dim, _ = EXPERTS[tiny]
    graph, states = random_experts(rng, tiny)
    expert_bytes = bytes_of(states[0]) / count
    act = GLU(jax.nn.silu)

    def by(form, state, x, topk_ids, routing_weights):
        weights = ExpertWeights(*nnx.merge(graph, state), act, count)
        return form(x, topk_ids, routing_weights, weights)

    others = {
        "pair by pair": functools.partial(by, experts_gemv_triton.mixture),
        "in tiles": functools.partial(by, experts_triton.mixture_in_tiles),
    }
    now = functools.partial(mixture, "triton", graph, count, act)
    for n in (1, 3) if tiny else (1, 2, 4, 8, 12, 16):
        names = ("even", "alike") if n > 1 else ("even",)
        settings = [
            [tokens(rng, i, states[i % 2], n, dim, count, k, name == "alike") for i in range(6)]
            for name in names
        ]
        for name, sets, seconds in zip(
            names, settings, compare(twice(now, others), *settings, passes=PASSES), strict=True
        ):
            used = float(np.mean([len(np.unique(topk_ids)) for _, _, topk_ids, _ in sets]))
            shape = f"{n} tokens of {k} of {count}, {name}"
            yield row(shape, seconds, used * expert_bytes) | {"experts_read": used}


@with_triton
def matrices(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """The two products of such experts, in other tiles."""
    from peagle_jax.kernels import experts_gemv_triton

    row, rng = Rows("variants: experts' tiles", ceilings), np.random.default_rng(0)
    count, k, dim, width = EXPERTS[tiny]
    graph, states = random_experts(rng, tiny)

    def multiply(which, state, x, hidden, topk_ids, **overrides):
        weights = ExpertWeights(*nnx.merge(graph, state), GLU(jax.nn.silu), count)
        up, down = weights.matrices()
        if which == "up":
            rule = dict(choices=k, gated=True)
            return experts_gemv_triton.product(x, topk_ids, up, **rule, **overrides)
        return experts_gemv_triton.product(hidden, topk_ids, down, choices=1, **overrides)

    tiles = {
        "up": ((8, 4), (8, 8), (2, 2), (2, 4), (4, 2)),
        "down": ((32, 4), (32, 8), (4, 1), (4, 2), (8, 2), (8, 4)),
    }
    for n in (3,) if tiny else (1, 8):
        sets = []
        for i in range(6):
            state, x, topk_ids, _ = tokens(rng, i, states[i % 2], n, dim, count, k, False)
            sets.append((state, x, normal(jax.random.key(i), n * k, width), topk_ids))
        used = float(np.mean([len(np.unique(topk_ids)) for *_, topk_ids in sets]))
        for which, sizes in tiles.items():
            others = {
                f"{bn} outputs, {warps} warps": functools.partial(
                    multiply, which, bn=bn, warps=warps
                )
                for bn, warps in sizes[: 1 if tiny else None]
            }
            forms = twice(functools.partial(multiply, which), others)
            num_bytes = used * dim * width * (2 if which == "up" else 1)
            yield row(f"{which}, {n} tokens", *compare(forms, sets, passes=PASSES), num_bytes)


@with_triton
def packed_matrices(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """The two products of GPT-OSS-20B's MXFP4 experts, in other tiles and parts."""
    from peagle_jax.kernels import experts, experts_triton

    row, rng = Rows("variants: MXFP4 experts", ceilings), np.random.default_rng(0)
    count, k, dim, width = (5, 2, 64, 96) if tiny else (32, 4, 2880, 2880)
    shapes = {"up": (dim, 2 * width), "down": (width, dim)}

    def one():
        return nnx.split(
            nnx.List([random_expert_linear(rng, "mxfp4", count, *s) for s in shapes.values()])
        )

    (graph, state), (_, other_state) = one(), one()

    def multiply(which, state, x, hidden, topk_ids, **overrides):
        up, down = ExpertWeights(*nnx.merge(graph, state), GLU(jax.nn.silu), count).matrices()
        n = len(x)
        if n == 1:
            tiles = experts.tiles_of_one_token(topk_ids, count)
        else:
            rows = experts.tile_rows(
                n, k, count, num_shards=1, least=experts.MIN_GPU_TILE, most=128
            )
            tiles = experts.make_tiles(topk_ids, count, rows)
        rule = dict(one_token=n == 1, **overrides)
        if which == "up":
            return experts_triton.product(x, tiles, up, gather=True, **rule)
        return experts_triton.product(hidden, tiles, down, gather=False, **rule)

    # inputs of a step, outputs of a tile, warps, stages
    sizes = [(256, 64, 4, 3), (128, 64, 4, 4), (512, 64, 4, 3), (256, 128, 8, 3)]
    parts = {1: (1, 2, 3, 4, 6), 8: (2,)}
    for n in (3,) if tiny else (8, 1):
        sets = []
        for i in range(6):
            a_state, x, topk_ids, _ = tokens(
                rng, i, (state, other_state)[i % 2], n, dim, count, k, False
            )
            sets.append((a_state, x, normal(jax.random.key(i), n * k, width), topk_ids))
        used = float(np.mean([len(np.unique(topk_ids)) for *_, topk_ids in sets]))
        for which, (inputs, outputs) in shapes.items():
            others = {}
            for bk, bn, warps, stages in sizes[: 1 if tiny else None]:
                name = f"{bk} inputs, {bn} outputs, {warps} warps, {stages} stages"
                # without a part that has no inputs
                rule = dict(bk=bk, bn=bn, warps=warps, stages=stages, splits=2 if n == 1 else 1)
                others[name] = functools.partial(multiply, which, **rule)
            for splits in parts.get(n, (2,)):
                others[f"{splits} parts"] = functools.partial(multiply, which, splits=splits)
            forms = twice(functools.partial(multiply, which), others)
            num_bytes = used * inputs * outputs * 17 / 32
            shape = f"{which}, {n} tokens of {k} of {count}"
            yield row(shape, *compare(forms, sets, passes=PASSES), num_bytes) | {
                "experts_read": used
            }


def routers(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """The router in two launches, and by XLA."""
    row = Rows("variants: router", ceilings)
    D, E, k = (64, 20, 3) if tiny else (2048, 128, 8)
    for n in (3,) if tiny else (1, 4, 8, 32):

        def operands(key, n=n):
            a, b = jax.random.split(key)
            return normal(a, n, D), normal(b, D, E, scale=D**-0.5)

        forms = {"xla": functools.partial(routed, "reference", k)}
        if available("triton"):
            from peagle_jax.kernels import routing_triton

            for warps in (2,) if tiny else (1, 2, 4):
                rule = dict(normalized=True, choice_warps=warps)
                forms[f"{warps} warps"] = functools.partial(
                    lambda x, w, rule: routing_triton.route(x, w, None, k, **rule), rule=rule
                )
            forms = twice(functools.partial(routed, "triton", k), forms)
        sets = rotation(operands, jax.random.key(n))
        yield row(f"{n} tokens, {k} of {E}", *compare(forms, sets, passes=PASSES), 2 * D * E)


def routed(form: str, k: int, x, w):
    """Routing weights and ids by a form."""
    return routing.FORMS[form](x, w, None, k, normalized=True)


PARTS = {
    "variants: experts": mixtures,
    "variants: experts' tiles": matrices,
    "variants: MXFP4 experts": packed_matrices,
    "variants: matmul": products,
    "variants: attention": splits,
    "variants: router": routers,
}
