"""Routers, norms with rotation, joint products and losses against float64."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gpu import checking, exact
from gpu.checking import error
from gpu.exact import to_float64
from peagle_jax.kernels import fp8_matmul, norm_rotate, routing
from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.train import loss


def routers(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """The logits of the experts that were found beside the largest, and the routing weights.

    Logits are rounded to 16 bits, so that of two that are nearly equal either may be found.
    """
    shapes = [(1, 2048, 128, 8), (8, 2048, 128, 8), (64, 4096, 256, 8), (8, 2880, 32, 4)]
    for n, D, E, k in [(3, 64, 20, 3), (17, 200, 20, 3)] if tiny else shapes:
        for has_bias in (False, True):
            x, w = checking.random(rng, n, D), checking.random(rng, D, E, scale=D**-0.5)
            bias = checking.random(rng, E) if has_bias else None
            logits = to_float64(x) @ to_float64(w)
            if bias is not None:
                logits = logits + to_float64(bias)
            largest = np.sort(logits, axis=1)[:, : -k - 1 : -1]
            for form in checking.forms("triton"):

                def route(x, w, bias, form=form, k=k):
                    return routing.FORMS[form](x, w, bias, k, normalized=True)

                weights, ids = checking.run(route, *checking.operands(form, x, w, bias))
                of_ids = np.take_along_axis(logits, np.asarray(ids), 1)
                want = np.exp(of_ids) / np.exp(of_ids).sum(axis=1, keepdims=True)
                text = f"{n} x {D} to {k} of {E}{', bias' * has_bias}"
                yield checking.row(
                    "routing", form, text, error(of_ids, largest), error(weights, want)
                )


def rotations(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """Norms and rotation of queries and of keys, far into a context."""
    shapes = [(1, 32, 4, 128), (8, 32, 4, 128), (64, 16, 8, 64), (8, 8, 4, 256)]
    for n, N, G, H in [(3, 6, 1, 16)] if tiny else shapes:
        q, k = (checking.random(rng, n, heads, H, scale=3.0) for heads in (N, G))
        gains = [jnp.asarray(rng.uniform(0.5, 2, H), checking.DTYPE) for _ in range(2)]
        positions = jnp.asarray(rng.integers(0, 40_000, n), jnp.int32)
        frequencies = jnp.asarray(1e6 ** -np.linspace(0, 1, H // 2), jnp.float32)
        rule = dict(eps=1e-6, scale=1.2)
        want = [
            exact.normed_and_rotated(
                to_float64(x), to_float64(gain), positions, frequencies, **rule
            )
            for x, gain in zip((q, k), gains, strict=True)
        ]
        for form in checking.forms("triton"):

            def rotate(*args, form=form, rule=rule):
                return norm_rotate.FORMS[form](*args, **rule)

            arrays = checking.operands(form, q, k, *gains)
            got = checking.run(rotate, *arrays, positions, frequencies)
            yield checking.row(
                "norm_rotate", form, f"{n} tokens, {N}/{G} heads of {H}", *map(error, got, want)
            )


def joint_products(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """Queries, keys and values of a layer from one launch; by the reference one after the other."""
    shapes = [(1, 2048, (4096, 512, 512)), (8, 2048, (4096, 512, 512)), (64, 4096, (8192, 1024))]
    for M, K, Ns in [(3, 256, (96, 32, 32)), (1, 384, (70, 40, 20))] if tiny else shapes:
        Ns = (*Ns, Ns[-1])[:3]
        for blocks in (False, True):
            x = checking.random(rng, M, K)
            ws = [
                fp8_matmul.quantize(checking.random(rng, N, K, dtype=jnp.float32), blocks=blocks)
                for N in Ns
            ]
            values, scale = fp8_matmul.quantize_rows(x, blocks=blocks)
            exact_x = to_float64(values) * np.repeat(to_float64(scale), 128 if blocks else K, 1)
            want = [exact_x @ to_float64(w.dequantized()).T for w in ws]
            for form in checking.forms("triton"):

                def multiply(x, values, scales, form=form):
                    ws = [Fp8Matrix(*w) for w in zip(values, scales, strict=True)]
                    if form == "reference":
                        return tuple(fp8_matmul.matmul(x, w, form) for w in ws)
                    ys = fp8_matmul.joint_matmul(x, ws)
                    assert ys is not None, "the kernel does not run"
                    return ys

                got = checking.run(multiply, x, [w.values for w in ws], [w.scale for w in ws])
                text = f"{M} x {Ns} x {K}{', blocks' * blocks}"
                yield checking.row("joint fp8_matmul", form, text, *map(error, got, want))


def losses(rng: np.random.Generator, tiny: bool) -> Iterator[dict]:
    """The losses of training, which XLA computes in chunks, with their gradients.

    KL with capped logits of the teacher; and cross entropy.
    """
    P, D, W = (20, 32, 200) if tiny else (3000, 1024, 20000)
    x, tx = checking.random(rng, P, D), checking.random(rng, P, D)
    w, tw = (checking.random(rng, D, W, scale=D**-0.5) for _ in range(2))
    weight, depth = rng.uniform(0.5, 2, P), jnp.zeros(P, jnp.int32)
    for name, cap in (("forward_kl", 3.0), ("cross_entropy", None)):
        kl_weight, hard_weight = (
            (weight, 0 * weight) if name == "forward_kl" else (0 * weight, weight)
        )
        arrays = (to_float64(y) for y in (x, w, tx, tw))
        kl, hard, *grads = exact.distill_losses(*arrays, cap, kl_weight, hard_weight)
        want = (kl_weight * kl + hard_weight * hard).sum(), *grads

        def loss_and_grads(x, w, tx, tw, name=name, cap=cap):
            def of_head(x, w):
                fixed = tw, tx, jnp.arange(P), jnp.asarray(weight, jnp.float32), depth
                return loss.distill(lambda h: h, w, x, *fixed, 1, cap, name)[0]

            value, grads = jax.value_and_grad(of_head, argnums=(0, 1))(x, w)
            return value, *grads

        got = checking.run(loss_and_grads, *checking.operands("reference", x, w, tx, tw))
        text = f"{name}, {P} x {D} x {W}, with gradients"
        yield checking.row("losses", "xla", text, *map(error, got, want))
