"""Times of our kernels beside the libraries that JAX can call, and of losses in chunks of any size.

These are cuDNN's attention by `jax.nn.dot_product_attention`, and block-scaled products by
`jax.nn.scaled_matmul`, which are cuDNN's on Blackwell. Where a library cannot run, a row says why.
"""

import functools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from gpu.numerics_attention import chains
from gpu.speed import Rows, attended, available, normal, product_by_blocks, product_in_bf16
from gpu.timing import PASSES, ROUNDS, bytes_of, compare, rotation
from peagle_jax.kernels import fp8_matmul, packed_attention
from peagle_jax.train import loss

MX_BLOCK = 32  # numbers that share a scale in MXFP8


def runnable(forms: dict[str, Callable], operands: tuple) -> tuple[dict[str, Callable], dict]:
    """The forms that run here, and why the others do not.

    Each runs once: cuDNN makes its plans when a program is loaded.
    """
    reasons = {}
    for name, form in forms.items():
        try:
            jax.block_until_ready(jax.jit(form)(*operands))
        except Exception as error:  # whatever a library raises is what the row says
            reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return {name: form for name, form in forms.items() if name not in reasons}, reasons


def timed(
    row: Rows,
    shape: str,
    forms: dict[str, Callable],
    sets: list[tuple],
    num_bytes: float,
    flop: float,
    *,
    fp8_bytes: float | None = None,
    rounds: int = ROUNDS,
    passes: int = PASSES,
) -> dict:
    """A row of the forms that run; `not_run` says why others do not.

    Args:
      sets: of operands; see `timing.rotation`.
      num_bytes, flop, fp8_bytes: what a form has to read and to compute; see `Rows`.
      rounds: medians are of so many.
      passes: over all sets in one round.
    """
    forms, reasons = runnable(forms, sets[0])
    (seconds,) = compare(forms, sets, rounds=rounds, passes=passes)
    return row(shape, seconds, num_bytes, flop, fp8_bytes) | {"not_run": reasons}


def cached(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """Attention of a verification, over `context` tokens in twice as many slots, and of a prompt.

    The libraries get caches whose heads stand beside each other, as they want them.
    """
    row = Rows("library attention", ceilings)
    N, G, H = (4, 2, 16) if tiny else (32, 4, 128)
    real = [(1, 1, 4096), (1, 8, 4096), (8, 1, 4096), (8, 8, 4096), (1, 512, 1024)]
    for B, T, context in [(2, 3, 40)] if tiny else real:
        S = 2 * context
        lengths = jnp.linspace(context, context + context // 2, B).astype(jnp.int32)
        positions = lengths[:, None] + jnp.arange(T)[None]

        def operands(key, B=B, T=T, S=S, positions=positions):
            a, b, c = jax.random.split(key, 3)
            k, v = normal(b, B, G, S, H), normal(c, B, G, S, H)
            return normal(a, B, T, N, H), positions, k, v, k.swapaxes(1, 2), v.swapaxes(1, 2)

        forms: dict[str, Callable] = {
            "xla": functools.partial(library_attention, "xla"),
            "cudnn": functools.partial(library_attention, "cudnn"),
            "reference": functools.partial(cached_by, "reference"),
        }
        forms |= {name: functools.partial(cached_by, name) for name in available("triton")}
        visible = float(lengths.sum() + B * T)  # slots
        yield timed(
            row,
            f"{B} x {T} queries over {context}",
            forms,
            rotation(operands, jax.random.key(0)),
            4 * visible * G * H,
            4 * visible * T * N * H,
        )


def library_attention(implementation: str, q, positions, k, v, keys, values):
    """Cached attention by `jax.nn.dot_product_attention`; `keys` and `values` are [B S G H].

    A single query a row needs no mask: it sees all slots up to its own.
    """
    rule: dict = {"scale": q.shape[-1] ** -0.5, "implementation": implementation}
    if q.shape[1] == 1:
        rule["key_value_seq_lengths"] = positions[:, 0] + 1
    else:
        slots = jnp.arange(keys.shape[1])[None, None]
        rule["mask"] = (slots <= positions[..., None])[:, None]
    return jax.nn.dot_product_attention(q, keys, values, **rule)


def cached_by(form: str, q, positions, k, v, keys, values):
    """The same by a form of ours, whose caches are [B G S H]."""
    return attended(form, False, q, positions, k, v, None, None, None, None)


def trained(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """COD attention with gradients; for the libraries its rule is a mask over all pairs."""
    row = Rows("library packed attention", ceilings)
    N, G, H = (4, 2, 16) if tiny else (32, 4, 128)
    n, P = (40, 60) if tiny else (2048, 5120)
    intervals = chains(np.random.default_rng(0), n, P)
    keys_seen = jnp.maximum(intervals.last - intervals.first + 1, 0) + intervals.chain_len

    def operands(key):
        a, b, c = jax.random.split(key, 3)
        return normal(a, 1, P, N, H), normal(b, 1, P, G, H), normal(c, 1, P, G, H)

    def grads(attend):
        def total(q, k, v):
            return (attend(q, k, v).astype(jnp.float32) ** 2).sum()

        return jax.grad(total, (0, 1, 2))

    def ours(form, q, k, v):
        return packed_attention.attend(q, k, v, intervals, H**-0.5, form=form)[0]

    def library(implementation, q, k, v):
        return masked_attention(implementation, intervals, n, q, k, v)

    forms = {name: grads(functools.partial(library, name)) for name in ("xla", "cudnn")}
    forms |= {
        name: grads(functools.partial(ours, name)) for name in ("reference", *available("triton"))
    }
    sets = [operands(jax.random.key(i)) for i in range(2)]
    flop = 3.5 * 4 * float(keys_seen.sum()) * N * H
    text = f"{P} rows over {n}, with gradients"
    yield timed(row, text, forms, sets, bytes_of(sets[0]) * 4, flop, rounds=3, passes=1)


def masked_attention(implementation: str, intervals, n: int, q, k, v):
    """COD attention by `jax.nn.dot_product_attention`: P rows over P keys, the first n at depth 0.

    Rows without a key, which pad, see themselves.
    """
    P = q.shape[1]
    key, query = jnp.arange(P)[None], jnp.arange(P)[:, None]
    first, last, chain_len = (
        x[0][:, None] for x in (intervals.first, intervals.last, intervals.chain_len)
    )
    mask = (key < n) & (key >= first) & (key <= last)
    mask |= (key >= n) & (key <= query) & (key > query - chain_len)
    mask |= (key == query) & ~mask.any(axis=1, keepdims=True)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask[None, None], scale=q.shape[-1] ** -0.5, implementation=implementation
    )


def products(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """FP8 products: MXFP8 by `jax.nn.scaled_matmul`, XLA's own, and ours with scales of blocks.

    Every form quantizes activations itself.
    """
    row = Rows("library products", ceilings)
    for N, K in [(96, 256)] if tiny else [(4096, 4096), (24576, 4096)]:
        for M in (3,) if tiny else (8, 64, 512):

            def operands(key, M=M, N=N, K=K):
                a, b = jax.random.split(key)
                w = normal(b, N, K, scale=K**-0.5)
                blocks = fp8_matmul.quantize(w, blocks=True)
                return normal(a, M, K), w.T, blocks.values, blocks.scale, *mx_quantized(w)

            forms: dict[str, Callable] = {
                "xla bf16": in_bf16,
                "xla fp8": functools.partial(by_blocks, "reference"),
                "scaled_matmul fp8": by_scaled_matmul,
            }
            for name in available("triton"):
                forms[f"{name} blocks"] = functools.partial(by_blocks, name)
            activations = 2 * M * (N + K)
            yield timed(
                row,
                f"{M} x {N} x {K}",
                forms,
                rotation(operands, jax.random.key(M)),
                2 * N * K + activations,
                2 * M * N * K,
                fp8_bytes=N * K + activations,
            )


def mx_quantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(values, scales) of MXFP8: e4m3, and a power of two for each 32 numbers of a row.

    The scale's exponent is that of the largest number less that of 448, as the OCP specification of
    microscaling formats has it.
    """
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, MX_BLOCK)
    largest = jnp.maximum(jnp.abs(parts).max(axis=-1, keepdims=True), 2.0**-100)
    scale = jnp.exp2(jnp.floor(jnp.log2(largest)) - 8)
    values = jnp.clip(parts / scale, -448, 448).astype(jnp.float8_e4m3fn)
    return values.reshape(x.shape), scale[..., 0].astype(jnp.float8_e8m0fnu)


def in_bf16(x, w, values, scale, mx_values, mx_scale):
    """x @ w, w in bfloat16."""
    return product_in_bf16(x, w, values, scale, scale)


def by_blocks(form: str, x, w, values, scale, mx_values, mx_scale):
    """x @ w by a form of ours, w in FP8 with a scale a block."""
    return product_by_blocks(form, x, w, values, scale, scale)


def by_scaled_matmul(x, w, values, scale, mx_values, mx_scale):
    """x @ w by `jax.nn.scaled_matmul`, both in MXFP8."""
    x_values, x_scale = mx_quantized(x)
    y = jax.nn.scaled_matmul(x_values[None], mx_values[None], x_scale[None], mx_scale[None])
    return y[0].astype(x.dtype)


def losses(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """KL with its gradients, in chunks of so many rows, and with the logits of all rows at once."""
    row = Rows("losses", ceilings)
    D, W = (64, 300) if tiny else (2048, 151936)
    for P in (20,) if tiny else (4096, 67_452):
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = (P, D), (D, W), (P, D), (D, W)
        operands = tuple(
            normal(key, *shape, scale=D**-0.5) for key, shape in zip(keys, shapes, strict=True)
        )
        sizes = (8,) if tiny else (512, 2048, 8192)
        forms = {f"chunks of {size}": functools.partial(grads_in_chunks, size) for size in sizes}
        if tiny or P == 4096:
            forms = {"xla, all logits": functools.partial(grads_in_chunks, P)} | forms
        yield timed(
            row,
            f"KL with gradients, {P} x {D} x {W}",
            forms,
            [operands],
            bytes_of(operands),
            8 * P * D * W,
            rounds=3,
            passes=1,
        )


def grads_in_chunks(size: int, x, w, teacher_x, teacher_w):
    """The gradients of the sum of KL in hidden states and output matrix, `size` rows at a time."""
    P = len(x)
    rows = jnp.arange(P)

    def total(x, w):
        fixed = teacher_w, teacher_x, rows, jnp.ones(P), 0 * rows
        return loss.distill(lambda h: h, w, x, *fixed, 1)[0]

    with mock.patch.object(loss, "CHUNK", size):
        return jax.grad(total, argnums=(0, 1))(x, w)


PARTS = {
    "losses": losses,
    "library attention": cached,
    "library products": products,
    "library packed attention": trained,
}
