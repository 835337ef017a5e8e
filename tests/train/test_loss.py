"""The chunked loss against the plain formula, and the shifted rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu.interpreter import interpret
from scipy import special, stats

from peagle_jax.draft.markov import MarkovHead
from peagle_jax.kernels import vocab, vocab_triton
from peagle_jax.train import loss
from peagle_jax.train.hidden_states import shifted
from peagle_jax.types import Batch


@pytest.mark.parametrize("rows", [7, 2048, "streamed"])
def test_distill(rows, monkeypatch):
    """In chunks, at once, and without logits by the kernels that a GPU takes."""
    if rows == "streamed":
        monkeypatch.setattr(vocab, "is_supported", lambda *_: True)
        kernels = [
            functools.partial(f, start=interpret)
            for f in (vocab_triton.distill_losses, vocab_triton.logit_grads)
        ]
        monkeypatch.setitem(vocab.DISTILL_LOSSES, "triton", kernels)
        monkeypatch.setattr(vocab, "choose", lambda kernel, form, *_: form)
    else:
        monkeypatch.setattr(loss, "CHUNK", rows)
    rng = np.random.default_rng(0)
    P, D, E, W, n, K = 30, 6, 5, 11, 12, 4
    hidden, kernel, columns, teacher = (
        rng.normal(size=s).astype(np.float32) for s in ((P, D), (D, W), (E, W), (n, E))
    )
    where, weight, depth = (
        rng.integers(0, n, P),
        rng.integers(0, 2, P).astype(np.float32),
        rng.integers(0, K, P),
    )

    def ours(hidden, kernel):
        return loss.distill(
            lambda h: h,
            kernel,
            hidden,
            jnp.asarray(columns),
            jnp.asarray(teacher),
            jnp.asarray(where),
            jnp.asarray(weight),
            jnp.asarray(depth),
            K,
        )

    (total, by_depth), grads = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)(
        jnp.asarray(hidden), jnp.asarray(kernel)
    )
    p, student = (
        special.softmax((teacher @ columns)[where].astype(np.float64), -1),
        (hidden @ kernel).astype(np.float64),
    )
    q = special.softmax(student, -1)
    want = (weight * stats.entropy(p, q, axis=-1)).sum()
    np.testing.assert_allclose(total, want, rtol=1e-5)
    by_hand = (weight[:, None] * (q - p)) @ kernel.T  # d KL / d logits = q - p
    np.testing.assert_allclose(grads[0], by_hand, atol=1e-5)
    np.testing.assert_allclose(grads[1], hidden.T @ (weight[:, None] * (q - p)), atol=1e-5)
    # of one of the two alone, as where the output matrix is frozen
    for i, full in enumerate(grads):
        alone = jax.grad(lambda *x: ours(*x)[0], argnums=i)(
            jnp.asarray(hidden), jnp.asarray(kernel)
        )
        np.testing.assert_allclose(alone, full, atol=1e-6)
    hit = weight * (p.argmax(-1) == q.argmax(-1))
    np.testing.assert_allclose(by_depth["correct"], np.bincount(depth, hit, K))
    np.testing.assert_allclose(by_depth["total"], np.bincount(depth, weight, K))


@pytest.mark.parametrize("form", ["chunks", "streamed"])
def test_distill_with_a_markov_head(form, monkeypatch):
    """The kernels take one matrix: hidden state and code in one row, both matrices below it."""
    if form == "streamed":
        monkeypatch.setattr(vocab, "is_supported", lambda *_: True)
        kernels = [
            functools.partial(f, start=interpret)
            for f in (vocab_triton.distill_losses, vocab_triton.logit_grads)
        ]
        monkeypatch.setitem(vocab.DISTILL_LOSSES, "triton", kernels)
        monkeypatch.setattr(vocab, "choose", lambda kernel, form, *_: form)
    else:
        monkeypatch.setattr(loss, "CHUNK", 8)
    rng = np.random.default_rng(1)
    P, D, E, V, W, r = 21, 6, 5, 13, 11, 3
    hidden, kernel, columns, teacher, w1, w2 = (
        rng.normal(size=s).astype(np.float32)
        for s in ((P, D), (D, W), (E, W), (P, E), (V, r), (r, W))
    )
    previous, ones = rng.integers(0, V, P), np.ones(P, np.float32)
    module = MarkovHead(V, W, D, r, gated=False, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(module)

    def ours(hidden, kernel, w1, w2):
        params = {"w1": {"table": w1}, "w2": {"kernel": w2}}
        bias = loss.MarkovBias(nnx.merge(graph, params), jnp.asarray(previous))
        rows = jnp.arange(P)
        fixed = jnp.asarray(columns), jnp.asarray(teacher), rows, jnp.asarray(ones), 0 * rows
        return loss.distill(lambda h: h, kernel, hidden, *fixed, 1, bias=bias)[0]

    given = tuple(map(jnp.asarray, (hidden, kernel, w1, w2)))
    total, grads = jax.value_and_grad(ours, argnums=(0, 1, 2, 3))(*given)
    p = special.softmax((teacher @ columns).astype(np.float64), -1)
    code = w1[previous]
    q = special.softmax((hidden @ kernel + code @ w2).astype(np.float64), -1)
    np.testing.assert_allclose(total, stats.entropy(p, q, axis=-1).sum(), rtol=1e-5)
    of_w1 = np.zeros((V, r))
    np.add.at(of_w1, previous, (q - p) @ w2.T)
    by_hand = (q - p) @ kernel.T, hidden.T @ (q - p), of_w1, code.T @ (q - p)
    for got, want in zip(grads, by_hand, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_shifted_rows():
    """Row i joins x[i] and x[i+1]. No row joins two documents.

    A document's last token is not in the loss.
    """
    segment_ids = np.array([[0, 0, 0, 1, 1, 1, 1, -1]])
    loss_mask = np.array([[True, True, True, True, False, True, True, True]])
    rows, learns = shifted(Batch(np.zeros((1, 8), np.int32), segment_ids, loss_mask))
    assert rows.tolist() == [[0, 0, -1, 1, 1, 1, -1]]
    assert learns.tolist() == [[True, False, False, False, True, False, False]]
