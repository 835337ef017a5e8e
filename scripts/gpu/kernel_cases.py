"""Every Triton kernel at the shapes of published models, described without running anything."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from peagle_jax.kernels import (
    attention_triton,
    cache_write_triton,
    experts,
    experts_gemv_triton,
    experts_triton,
    fp8_matmul,
    fp8_matmul_triton,
    fusion_triton,
    gemv_triton,
    norm_rotate_triton,
    packed_attention_triton,
    routing_triton,
    vocab_triton,
)
from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.kernels.launch import Launch, Launcher
from peagle_jax.kernels.packed_attention import AttentionIntervals

F8, BF16, F32, I32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.int32


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """A public function of a kernel, with the shapes of its arrays.

    Attributes:
      call: takes `args` and a launcher `start`.
    """

    call: Callable
    args: tuple

    def trace(self, start: Launcher) -> None:
        """Traces the function, whose launches `start` gets."""
        jax.eval_shape(functools.partial(self.call, start=start), *self.args)

    def lower(self, start: Launcher) -> str:
        """The function lowered for CUDA, as StableHLO text."""
        traced = jax.jit(functools.partial(self.call, start=start)).trace(*self.args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def w8a8(M, N, K, blocks=False):
    """A product of quantized activations; scales by row, or by blocks."""
    k, n = (-(-K // 128), -(-N // 128)) if blocks else (1, None)
    scale = spec(n, k) if blocks else spec(N)
    args = spec(M, K, dtype=F8), spec(M, k), spec(N, K, dtype=F8), scale

    def call(x, x_scale, w, w_scale, start):
        return fp8_matmul_triton.product(x, x_scale, w, w_scale, BF16, start=start)

    return Case(call, args)


def gemv(M, K, *Ns, blocks=True):
    """Products of few rows, which the kernel quantizes, with one matrix or three."""
    ws = [
        Fp8Matrix(spec(N, K, dtype=F8), spec(*(fp8_matmul.grid(N, K) if blocks else (N,))))
        for N in Ns
    ]

    def call(x, ws, start):
        return gemv_triton.product(x, ws, BF16, start=start)

    return Case(call, (spec(M, K, dtype=BF16), ws))


def joint(M, K, *Ns):
    """Products of quantized activations with several matrices, with scales of blocks."""
    ws = [Fp8Matrix(spec(N, K, dtype=F8), spec(*fp8_matmul.grid(N, K))) for N in Ns]

    def call(x, x_scale, ws, start):
        return fp8_matmul_triton.joint_product(x, x_scale, ws, BF16, start=start)

    return Case(call, (spec(M, K, dtype=F8), spec(M, K // 128), ws))


def fusion(M, E, D, norm, fp8):
    """Fusion of three layers."""
    aux_hidden_states = [spec(M, E, dtype=BF16)] * 3
    w = Fp8Matrix(spec(D, 3 * E, dtype=F8), spec(D)) if fp8 else spec(3 * E, D, dtype=BF16)
    gain = None if norm == "none" else spec(3 * E, dtype=BF16)

    def call(aux_hidden_states, w, gain, start):
        return fusion_triton.fuse(aux_hidden_states, w, gain, norm, 1e-5, start=start)

    return Case(call, (aux_hidden_states, w, gain))


def decode(T, heads, kv_heads, head_dim, *, kv=BF16, window=None, ring=False, batch=8, slots=4096):
    """Cached attention of T tokens a row; with float8 keys and values, scales."""
    cache = spec(batch, kv_heads, slots, head_dim, dtype=kv)
    scale = spec(batch, kv_heads, slots) if kv == F8 else None
    args = (
        spec(batch, T, heads, head_dim, dtype=BF16),
        cache,
        cache,
        spec(batch, T, dtype=I32),
        spec(batch, slots, dtype=I32) if ring else None,
        scale,
    )

    def call(q, k, v, positions, kv_positions, scale, start):
        return attention_triton.attend(
            q,
            k,
            v,
            positions,
            kv_positions,
            window=window,
            scale=0.1,
            sinks=None,
            k_scale=scale,
            v_scale=scale,
            start=start,
        )

    return Case(call, args)


def argmax(M, K, V, dtype=BF16):
    """The largest logit of each row."""
    fp8 = dtype == F8
    w, scale = (spec(V, K, dtype=F8), spec(V)) if fp8 else (spec(K, V, dtype=dtype), None)

    def call(x, w, scale, start):
        return vocab_triton.topk(x, w, 1, scale, vocab_first=fp8, start=start)

    return Case(call, (spec(M, K, dtype=BF16), w, scale))


def packed(n, P, heads, kv_heads, head_dim):
    """Training attention of P rows over n depth-0 keys, forward and backward."""
    q = spec(1, P, heads, head_dim, dtype=BF16)
    kv = spec(1, P, kv_heads, head_dim, dtype=BF16)
    number = spec(1, P, dtype=I32)

    def call(q, k, v, *numbers, start):
        def total(q, k, v):
            intervals = AttentionIntervals(*numbers, n, 7)
            y, _ = packed_attention_triton.attend(q, k, v, intervals, 0.1, start=start)
            return y.astype(F32).sum()

        return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

    return Case(call, (q, kv, kv, number, number, number))


def quantizing(M, K, blocks):
    """Activations in float8."""

    def call(x, start):
        return fp8_matmul_triton.quantize_rows(x, blocks=blocks, start=start)

    return Case(call, (spec(M, K, dtype=BF16),))


def writing(B, T, G, H, kv=F8, slots=4096):
    """New keys and values of T tokens a row."""
    new, array = spec(B, T, G, H, dtype=BF16), spec(B, G, slots, H, dtype=kv)
    scale = spec(B, G, slots)
    cache = (array, array, scale, scale) if kv == F8 else (array, array)
    return Case(cache_write_triton.write, (new, new, spec(B, T, dtype=I32), cache))


def mixture(n, k, count, K, N, kind):
    """Gate and up of a layer's experts, N in all; with SiLU in between where that fits."""
    shapes = {
        "plain": (spec(count, K, N, dtype=BF16), None),
        "row": (spec(count, N, K, dtype=F8), spec(count, N)),
        "block": (spec(count, N, K, dtype=F8), spec(count, N // 128, K // 128)),
        "mxfp4": (
            spec(count, N, K // 32, 16, dtype=jnp.uint8),
            spec(count, N, K // 32, dtype=jnp.uint8),
        ),
    }

    def tiles_of(topk_ids, start):
        """As `experts_triton.mixture` makes them."""
        if n == 1:
            return experts.tiles_of_one_token(topk_ids, count)
        rows = experts.tile_rows(n, k, count, num_shards=1, least=experts.MIN_GPU_TILE, most=128)
        few_pairs = n * k <= experts_triton.MAX_SORTED_PAIRS
        if few_pairs and count <= experts_triton.MAX_SORTED_EXPERTS:
            return experts_triton.make_tiles(topk_ids, count, rows, start)
        return experts.make_tiles(topk_ids, count, rows)

    def call(x, topk_ids, values, scale, start):
        matrices = experts.StoredMatrices(kind, values, scale, None)
        if n <= experts_triton.MAX_GEMV_TOKENS and kind in experts_gemv_triton.KINDS:
            rule = dict(choices=k, gated=True)
            return experts_gemv_triton.product(x, topk_ids, matrices, **rule, start=start)
        tiles = tiles_of(topk_ids, start)
        gated = experts_triton.can_gate(kind, tiles.rows)
        rule = dict(gather=True, gated=gated, one_token=n == 1)
        return experts_triton.product(x, tiles, matrices, **rule, start=start)

    return Case(call, (spec(n, K, dtype=BF16), spec(n, k, dtype=I32), *shapes[kind]))


def routing(M, D, E, k, bias):
    """A router's product, softmax and largest."""
    args = spec(M, D, dtype=BF16), spec(D, E, dtype=BF16), spec(E, dtype=BF16) if bias else None

    def call(x, w, bias, start):
        return routing_triton.route(x, w, bias, k, normalized=True, start=start)

    return Case(call, args)


def rotating(n, N, G, H):
    """Norms and rotation of n tokens' queries and keys."""
    q, k, gain = spec(n, N, H, dtype=BF16), spec(n, G, H, dtype=BF16), spec(H, dtype=BF16)
    call = functools.partial(norm_rotate_triton.rotate, eps=1e-6, scale=1.0)
    return Case(call, (q, k, gain, gain, spec(n, dtype=I32), spec(H // 2)))


CASES = {
    "fp8_matmul 8x4096x4096": w8a8(8, 4096, 4096),
    "fp8_matmul 64x4096x4096": w8a8(64, 4096, 4096),
    "fp8_matmul 512x4096x4096": w8a8(512, 4096, 4096),
    "fp8_matmul 8x4096x4096 blocks": w8a8(8, 4096, 4096, blocks=True),
    "fp8_matmul 512x4096x4096 blocks": w8a8(512, 4096, 4096, blocks=True),
    "fp8_matmul 64x4096x4096 blocks": w8a8(64, 4096, 4096, blocks=True),
    "gemv 1x2048x4096 blocks": gemv(1, 4096, 2048),
    "gemv 2x2048x4096 blocks": gemv(2, 4096, 2048),
    "gemv 1x(4096,512,512)x2048 blocks": gemv(1, 2048, 4096, 512, 512),
    "gemv 1x(4096,512,512)x2880": gemv(1, 2880, 4096, 512, 512, blocks=False),
    "gemv 2x2880x4096": gemv(2, 4096, 2880, blocks=False),
    "gemv 2x4096x14336 blocks": gemv(2, 14_336, 4096),
    "gemv 2x5376x21504": gemv(2, 21_504, 5376, blocks=False),
    "joint fp8_matmul 32x(4096,512,512)x2048": joint(32, 2048, 4096, 512, 512),
    "quantizing 64 rows of 4096": quantizing(64, 4096, False),
    "quantizing 64 rows of 21504, in groups of 128": quantizing(64, 21504, True),
    "cache writing, 8 tokens, float8": writing(1, 8, 4, 128),
    "cache writing, 8 tokens, 16 heads of 256": writing(8, 8, 16, 256, BF16),
    "experts, 1 token of 8, float8 rows": mixture(1, 8, 128, 2048, 1536, "row"),
    "experts, 1 token of 8, float8 blocks": mixture(1, 8, 128, 2048, 1536, "block"),
    "experts, 8 tokens of 8, float8 blocks": mixture(8, 8, 128, 2048, 1536, "block"),
    "experts, 64 tokens of 8, float8 blocks": mixture(64, 8, 128, 2048, 1536, "block"),
    "experts, 128 tokens of 8, bfloat16": mixture(128, 8, 128, 2048, 1536, "plain"),
    "experts, 100 tokens of 10 of 256, bfloat16": mixture(100, 10, 256, 2048, 1536, "plain"),
    "experts, 512 tokens of 8, float8 blocks": mixture(512, 8, 128, 2048, 1536, "block"),
    "experts, 4096 tokens of 8, float8 blocks": mixture(4096, 8, 128, 2048, 1536, "block"),
    "experts, 1 token of 4, MXFP4": mixture(1, 4, 32, 2880, 5760, "mxfp4"),
    "experts, 8 tokens of 4, MXFP4": mixture(8, 4, 32, 2880, 5760, "mxfp4"),
    "experts, 64 tokens of 4, MXFP4": mixture(64, 4, 32, 2880, 5760, "mxfp4"),
    "experts, 4096 tokens of 4, MXFP4": mixture(4096, 4, 32, 2880, 5760, "mxfp4"),
    "experts, 8 tokens of 8, bfloat16": mixture(8, 8, 128, 2048, 1536, "plain"),
    "routing 8 tokens to 8 of 128": routing(8, 2048, 128, 8, False),
    "routing 64 tokens to 8 of 256": routing(64, 2048, 256, 8, False),
    "routing 8 tokens to 8 of 256, 7168 inputs": routing(8, 7168, 256, 8, False),
    "routing 1 token to 4 of 32": routing(1, 2880, 32, 4, True),
    "rotating 8 tokens, 32 and 4 heads of 128": rotating(8, 32, 4, 128),
    "fusion 8": fusion(8, 2048, 2048, "none", False),
    "fusion 64, norm": fusion(64, 2048, 2048, "whole", False),
    "fusion 8, norms, float8, bfloat16 in": fusion(8, 2048, 2048, "per_layer", True),
    "fusion 64, norm, float8, bfloat16 in": fusion(64, 2048, 2048, "whole", True),
    "attention 1 token, 8 heads a group": decode(1, 32, 4, 128),
    "attention 1 token of one row, 32768 slots": decode(1, 32, 4, 128, batch=1, slots=32_768),
    "attention 8 tokens of one row, 32768 slots": decode(8, 32, 4, 128, batch=1, slots=32_768),
    "attention 8 tokens": decode(8, 32, 4, 128),
    "attention 17 tokens": decode(17, 32, 4, 128),
    "attention 8 tokens, float8": decode(8, 32, 4, 128, kv=F8),
    "attention 17 tokens, float8": decode(17, 32, 4, 128, kv=F8),
    "attention over a ring of 136, 8 tokens, heads of 64": decode(
        8, 64, 8, 64, window=128, ring=True, slots=136
    ),
    "attention 8 tokens, heads of 256, window": decode(8, 32, 16, 256, window=1024),
    "attention 8 tokens, heads of 512": decode(8, 32, 4, 512),
    "attention 8 tokens, heads of 96": decode(8, 32, 8, 96),
    "attention 512 tokens": decode(512, 32, 4, 128),
    "attention 512 tokens, float8": decode(512, 32, 4, 128, kv=F8),
    "attention 512 tokens, heads of 256, window": decode(512, 32, 16, 256, window=1024),
    "attention 512 tokens, heads of 512": decode(512, 32, 4, 512),
    "argmax 8 of 151936": argmax(8, 2048, 151936),
    "argmax 8 of 151936, float8": argmax(8, 2048, 151936, F8),
    "argmax 64 of 151936": argmax(64, 2048, 151936),
    "packed attention, heads of 128": packed(8192, 20480, 32, 4, 128),
    "packed attention, heads of 64": packed(8192, 20480, 64, 8, 64),
}


def launches(case: Case) -> list[Launch]:
    """What a public function would launch, without running it."""
    started = []

    def start(launch):
        started.append(launch)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.outputs)

    case.trace(start)
    return started
