"""Times of every kernel beside XLA's best for the same numbers, in one run and in turns.

Each row has the floor of its bytes and arithmetic.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gpu import checking
from gpu.numerics import random_expert_linear
from gpu.numerics_attention import chains
from gpu.timing import bytes_of, compare, rotation
from peagle_jax.kernels import attention, experts, fp8_matmul, fusion, packed_attention, vocab
from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.kernels.launch import unavailable_reason
from peagle_jax.layers.moe import GLU, ExpertWeights
from peagle_jax.targets.gpt_oss import ClampedSwiGLU


class Rows:
    """Makes the rows of one part: seconds of each form, the floor, ratios to the first form."""

    def __init__(self, part: str, ceilings: dict):
        self.part, self.ceilings = part, ceilings

    def __call__(
        self,
        shape: str,
        seconds: dict[str, float],
        num_bytes: float,
        flop: float = 0,
        fp8_bytes: float | None = None,
    ) -> dict:
        """One row.

        Args:
          num_bytes: that a form has to read and write.
          flop: that it has to compute.
          fp8_bytes: those of forms whose name has fp8, blocks or rows in it, where they are fewer.
            Their arithmetic is then taken as FP8's.
        """
        floors = {}
        for name in seconds:
            bytes_of_form, rate = num_bytes, self.ceilings["bf16_flop_per_s"]
            if fp8_bytes is not None and any(word in name for word in ("fp8", "blocks", "rows")):
                bytes_of_form, rate = fp8_bytes, self.ceilings["fp8_flop_per_s"]
            floors[name] = max(bytes_of_form / self.ceilings["copy_bytes_per_s"], flop / rate)
        base = next((s for name, s in seconds.items() if name.startswith("xla")), None)
        return {
            "part": self.part,
            "shape": shape,
            "us": {k: 1e6 * s for k, s in seconds.items()},
            "floor_us": {k: 1e6 * f for k, f in floors.items()},
            "of_floor": {k: floors[k] / s for k, s in seconds.items()},
            "times_as_fast": {k: base / s for k, s in seconds.items()} if base else {},
        }


def available(*names: str) -> list[str]:
    """Those of the forms that run here."""
    return [name for name in names if unavailable_reason(name) is None]


def normal(key: jax.Array, *shape: int, scale: float = 1.0) -> jax.Array:
    """Normal numbers in the dtype of checks."""
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(checking.DTYPE)


def matmul(ceilings: dict, tiny: bool, kind: str = "triton") -> Iterator[dict]:
    """FP8 products beside XLA's in FP8 (cuBLASLt) and in bfloat16.

    Every FP8 form quantizes activations itself.
    """
    row = Rows("matmul", ceilings)
    for N, K in [(96, 256)] if tiny else [(4096, 2048), (4096, 4096), (24576, 4096)]:
        for M in (3,) if tiny else (1, 8, 32, 64, 512):

            def operands(key, M=M, N=N, K=K):
                a, b = jax.random.split(key)
                w = normal(b, N, K, scale=K**-0.5)
                rows, blocks = fp8_matmul.quantize(w), fp8_matmul.quantize(w, blocks=True)
                return normal(a, M, K), w.T, rows.values, rows.scale, blocks.scale

            sets = rotation(operands, jax.random.key(M))

            forms: dict[str, Callable] = {
                "xla fp8": functools.partial(product_by_rows, "reference"),
                "xla bf16": product_in_bf16,
            }
            for name in available(kind):
                if name == "triton" or fits_mosaic(sets[0]):
                    forms[f"{name} rows"] = functools.partial(product_by_rows, name)
                if name == "triton":
                    forms[f"{name} blocks"] = functools.partial(product_by_blocks, name)
            activations = 2 * M * (N + K)
            yield row(
                f"{M} x {N} x {K}",
                *compare(forms, sets),
                2 * N * K + activations,
                2 * M * N * K,
                N * K + activations,
            )


def product_in_bf16(x, w, values, row_scale, block_scale):
    """x @ w, w in bfloat16."""
    return x @ w


def product_by_rows(form: str, x, w, values, row_scale, block_scale):
    """x @ w by a form, w in FP8 with a scale a row."""
    return fp8_matmul.matmul(x, Fp8Matrix(values, row_scale), form)


def product_by_blocks(form: str, x, w, values, row_scale, block_scale):
    """x @ w by a form, w in FP8 with a scale a block."""
    return fp8_matmul.matmul(x, Fp8Matrix(values, block_scale), form)


def fits_mosaic(operands: tuple) -> bool:
    """Whether the kernel of Mosaic GPU takes these operands."""
    x, _, values, scale, _ = operands
    return fp8_matmul.unsupported("mosaic", x, Fp8Matrix(values, scale)) is None


def fused(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """Fusion of three layers, with a norm over each."""
    row = Rows("fusion", ceilings)
    for M, E, D in [(3, 128, 64)] if tiny else [(8, 2048, 2048), (8, 4096, 4096), (64, 4096, 4096)]:

        def operands(key, M=M, E=E, D=D):
            a, b, c = jax.random.split(key, 3)
            w = normal(b, 3 * E, D, scale=E**-0.5)
            w8 = fp8_matmul.quantize(w.T)
            return normal(a, M, 3, E), w, w8.values, w8.scale, 1 + normal(c, 3 * E, scale=0.1)

        forms: dict[str, Callable] = {"xla bf16": fused_plainly}
        for name in available("triton"):
            forms[f"{name} bf16"] = functools.partial(fused_by, name, False)
            forms[f"{name} fp8"] = functools.partial(fused_by, name, True)
        yield row(
            f"{M} x 3 x {E} x {D}",
            *compare(forms, rotation(operands, jax.random.key(0))),
            6 * E * D,
            fp8_bytes=3 * E * D,
        )


def fused_plainly(x, w, values, scale, gain):
    """The fusion with a norm over each layer, by XLA in bfloat16."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return (y.reshape(len(x), -1) * gain.astype(jnp.float32)).astype(x.dtype) @ w


def fused_by(form: str, fp8: bool, x, w, values, scale, gain):
    """The same by a form, with the matrix in bfloat16 or in FP8."""
    matrix = Fp8Matrix(values, scale) if fp8 else w
    return fusion.fuse(x, matrix, gain, norm="per_layer", eps=1e-5, form=form)


def cached(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """Attention of a verification, over ragged lengths around `context` in twice as many slots."""
    row = Rows("attention", ceilings)
    N, G, H = (4, 2, 16) if tiny else (32, 4, 128)
    real = [
        (1, 1, 4096),
        (1, 8, 4096),
        (8, 1, 4096),
        (8, 8, 4096),
        (8, 17, 4096),
        (32, 8, 4096),
        (8, 8, 512),
    ]
    for B, T, context in [(2, 3, 40)] if tiny else real:
        S = 2 * context
        lengths = jnp.full(1, context, jnp.int32)
        if B > 1:
            lengths = jnp.linspace(context // 2, context + context // 2, B).astype(jnp.int32)
        positions = (lengths[:, None] + jnp.arange(T)[None]).astype(jnp.int32)

        def operands(key, B=B, T=T, S=S, positions=positions):
            a, b, c = jax.random.split(key, 3)
            k, v = normal(b, B, G, S, H), normal(c, B, G, S, H)
            (k8, ks), (v8, vs) = fp8_matmul.scaled(k, axis=-1), fp8_matmul.scaled(v, axis=-1)
            return normal(a, B, T, N, H), positions, k, v, k8, ks, v8, vs

        forms = {
            f"{name} {dtype}": functools.partial(attended, form, dtype == "fp8")
            for name, form in [("xla", "reference"), *((f, f) for f in available("triton"))]
            for dtype in ("bf16", "fp8")
        }
        visible = float(lengths.sum() + B * T)  # slots
        sets = rotation(operands, jax.random.key(0))
        yield row(
            f"{B} x {T} queries over {context}",
            *compare(forms, sets),
            4 * visible * G * H,
            fp8_bytes=2 * visible * G * (H + 4),
        )


def attended(form: str, fp8: bool, q, positions, k, v, k8, k_scale, v8, v_scale):
    """Attention by a form, over the bfloat16 or the float8 cache."""
    rule = dict(window=None, scale=q.shape[-1] ** -0.5, sinks=None)
    if fp8:
        rule |= {"k_scale": k_scale, "v_scale": v_scale}
        k, v = k8, v8
    return attention.attend(q, k, v, positions, None, form=form, **rule)


def trained(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """COD attention, forward and backward.

    The reference works in chunks, and has every score of a chunk in memory.
    """
    row = Rows("packed attention", ceilings)
    N, G, H = (4, 2, 16) if tiny else (32, 4, 128)
    rng = np.random.default_rng(0)
    for n, P in [(40, 60)] if tiny else [(2048, 5120), (8192, 20480)]:
        intervals = chains(rng, n, P)
        depth0_keys = jnp.maximum(intervals.last - intervals.first + 1, 0)
        pairs = float(depth0_keys.sum() + intervals.chain_len.sum())

        def operands(key, P=P):
            a, b, c = jax.random.split(key, 3)
            return normal(a, 1, P, N, H), normal(b, 1, P, G, H), normal(c, 1, P, G, H)

        def grads(form, intervals=intervals):
            def loss(q, k, v):
                y, _ = packed_attention.attend(q, k, v, intervals, H**-0.5, form=form)
                return (y.astype(jnp.float32) ** 2).sum()

            return jax.grad(loss, (0, 1, 2))

        sets = [operands(jax.random.key(i)) for i in range(2)]
        forms = {"xla": grads("reference")} | {name: grads(name) for name in available("triton")}
        seconds = compare(forms, sets, rounds=3, passes=1)
        yield row(
            f"{P} rows over {n}, with gradients",
            *seconds,
            bytes_of(sets[0]) * 4,
            3.5 * 4 * pairs * N * H,
        )


def output_matrices(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """The argmax of decoding."""
    row = Rows("vocab", ceilings)
    K, V = (64, 300) if tiny else (2048, 151936)
    for M in (3,) if tiny else (1, 8, 64, 256):

        def operands(key, M=M):
            a, b = jax.random.split(key)
            w = normal(b, K, V, scale=K**-0.5)
            w8 = fp8_matmul.quantize(w.T)
            return normal(a, M, K), w, w8.values, w8.scale

        sets = rotation(operands, jax.random.key(0), least=2, most=3)
        forms: dict[str, Callable] = {"xla bf16": argmax_plainly}
        for name in available("triton"):
            forms[f"{name} bf16"] = functools.partial(argmax_by, name, False)
            forms[f"{name} fp8"] = functools.partial(argmax_by, name, True)
        yield row(
            f"argmax, {M} x {K} x {V}", *compare(forms, sets, passes=10), 2 * K * V, fp8_bytes=K * V
        )


def argmax_plainly(x, w, values, scale):
    """The argmax of x @ w, by XLA in bfloat16."""
    return jnp.argmax(x @ w, axis=-1)


def argmax_by(form: str, fp8: bool, x, w, values, scale):
    """The same by a form, with the matrix in bfloat16 or in FP8."""
    if fp8:
        return vocab.topk(x, values, 1, scale, vocab_first=True, form=form).ids
    return vocab.topk(x, w, 1, form=form).ids


def mixed(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """One layer's experts at the sizes of Qwen3-Coder-30B-A3B and GPT-OSS-20B.

    Routing is spread evenly, or all tokens go to the same experts.
    """
    row = Rows("experts", ceilings)
    rng = np.random.default_rng(0)
    sizes = (
        [("row", 5, 2, 64, 32), ("mxfp4", 4, 2, 64, 32)]
        if tiny
        else [("block", 128, 8, 2048, 768), ("mxfp4", 32, 4, 2880, 2880)]
    )
    for kind, count, k, dim, width in sizes:
        shapes = (dim, 2 * width), (width, dim)

        def random_experts(kind=kind, count=count, shapes=shapes):
            linears = [random_expert_linear(rng, kind, count, *shape) for shape in shapes]
            return nnx.split(nnx.List(linears))

        (graph, state), (_, other_state) = random_experts(), random_experts()
        states, expert_bytes = (state, other_state), bytes_of(state) / count
        for n in (1, 7) if tiny else (1, 8, 64, 512):
            names = ("even", "alike") if n > 1 else ("even",)
            settings = [
                [tokens(rng, i, states[i % 2], n, dim, count, k, name == "alike") for i in range(6)]
                for name in names
            ]
            xla = "gathered" if n * k <= count else "grouped"
            named = [("xla", xla), *((form, form) for form in available("triton"))]
            act = ClampedSwiGLU(7.0, 1.702) if kind == "mxfp4" else GLU(jax.nn.silu)
            forms = {
                name: functools.partial(mixture, form, graph, count, act) for name, form in named
            }
            for name, sets, seconds in zip(
                names, settings, compare(forms, *settings, passes=10), strict=True
            ):
                used = float(np.mean([len(np.unique(topk_ids)) for _, _, topk_ids, _ in sets]))
                shape = f"{kind}, {n} tokens of {k} of {count}, {name}"
                yield row(shape, seconds, used * expert_bytes, 6 * n * k * dim * width) | {
                    "experts_read": used
                }


def small(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """What is bound by its launches: sorting (token, expert) pairs, quantizing activations."""
    row, rng = Rows("small", ceilings), np.random.default_rng(0)
    E, k = 128, 8
    for n in (3,) if tiny else (2, 8, 32, 128):
        sets = [
            (jnp.asarray(np.stack([rng.permutation(E)[:k] for _ in range(n)]), jnp.int32),)
            for _ in range(4)
        ]
        rows = experts.tile_rows(n, k, E, num_shards=1, least=experts.MIN_GPU_TILE, most=128)

        forms = {"xla": functools.partial(sorted_pairs, experts.make_tiles, E, rows)}
        if available("triton"):
            from peagle_jax.kernels import experts_triton

            make_tiles = experts_triton.make_tiles
            forms["triton"] = functools.partial(sorted_pairs, make_tiles, E, rows)
        yield row(f"sorting {n * k} pairs of {E} experts", *compare(forms, sets), 16.0 * n * k)
    for M, K in [(3, 256)] if tiny else [(8, 4096), (64, 4096), (1024, 4096)]:
        forms = {"xla": functools.partial(fp8_matmul.quantize_rows, blocks=False)}
        if available("triton"):
            from peagle_jax.kernels import fp8_matmul_triton

            forms["triton"] = functools.partial(fp8_matmul_triton.quantize_rows, blocks=False)
        sets = rotation(lambda key, M=M, K=K: (normal(key, M, K),), jax.random.key(0))
        yield row(f"quantizing {M} x {K}", *compare(forms, sets), 3.0 * M * K)


def sorted_pairs(make_tiles: Callable, num_experts: int, rows: int, topk_ids):
    """The (token, expert) pairs in the order of their experts, by a form."""
    return dataclasses.astuple(make_tiles(topk_ids, num_experts, rows))[1:]


def tokens(
    rng: np.random.Generator,
    i: int,
    state: nnx.State,
    n: int,
    dim: int,
    count: int,
    k: int,
    alike: bool,
) -> tuple:
    """Operands of the i-th call: experts, rows, which experts each takes, and how much of them.

    All rows take the same experts, or each its own.
    """
    choices = [rng.permutation(count)[:k] for _ in range(1 if alike else n)]
    topk_ids = np.stack(choices * n if alike else choices)
    x = normal(jax.random.key(i), n, dim)
    return state, x, jnp.asarray(topk_ids, jnp.int32), jnp.full((n, k), 1 / k, jnp.float32)


def mixture(form: str, graph, count: int, act: Callable, state, x, topk_ids, routing_weights):
    """A mixture by a form."""
    weights = ExpertWeights(*nnx.merge(graph, state), act, count)
    return experts.FORMS[form](x, topk_ids, routing_weights, weights)


PARTS = {
    "matmul": matmul,
    "fusion": fused,
    "attention": cached,
    "packed attention": trained,
    "vocab": output_matrices,
    "experts": mixed,
    "small": small,
    "mosaic matmul": functools.partial(matmul, kind="mosaic"),
}
