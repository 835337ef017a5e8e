"""The chunked loss against the plain formula, and the shifted rows."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special, stats

from peagle_jax.draft.markov import MarkovHead
from peagle_jax.train import loss
from peagle_jax.train.hidden_states import shifted
from peagle_jax.types import Batch


@pytest.mark.parametrize("rows", [7, 2048])
def test_distill(rows, monkeypatch):
    """In chunks, and at once."""
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


def test_hits_have_the_weights_of_their_elements():
    """A head that is right everywhere: elements outside of the loss mask are no hits."""
    rng = np.random.default_rng(4)
    P, D, W, K = 20, 6, 11, 3
    hidden, kernel = rng.normal(size=(P, D)), rng.normal(size=(D, W))
    hidden, kernel = jnp.asarray(hidden, jnp.float32), jnp.asarray(kernel, jnp.float32)
    weight, depth = rng.integers(0, 2, P).astype(np.float32), rng.integers(0, K, P)
    rows = jnp.arange(P), jnp.asarray(weight), jnp.asarray(depth)
    _, counts = loss.distill(lambda h: h, kernel, hidden, kernel, hidden, *rows, K)
    for name in ("correct", "total"):
        np.testing.assert_array_equal(counts[name], np.bincount(depth, weight, K))
    assert 0 < weight.sum() < P


def test_distill_with_a_markov_head(monkeypatch):
    """The logits are the sum of two products, of hidden states and of codes."""
    monkeypatch.setattr(loss, "CHUNK", 8)
    rng = np.random.default_rng(1)
    P, D, E, V, W, r = 21, 6, 5, 13, 11, 3
    hidden, kernel, columns, teacher, w1, w2 = (
        rng.normal(size=s).astype(np.float32)
        for s in ((P, D), (D, W), (E, W), (P, E), (V, r), (r, W))
    )
    previous, ones = rng.integers(0, V, P), np.ones(P, np.float32)
    module = MarkovHead(V, W, D, r, kind="vanilla", dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(module)

    def ours(hidden, kernel, w1, w2):
        params = {"w1": {"table": w1}, "w2": {"kernel": w2}}
        bias = loss.MarkovBias(nnx.merge(graph, params), w1[jnp.asarray(previous)])
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


@pytest.mark.parametrize("name", ["forward_kl", "cross_entropy"])
def test_distill_in_16_bits(name, monkeypatch):
    """As on a GPU: operands and gradients are bfloat16, logits and losses float32.

    Logits that were rounded to bfloat16 would change each loss by up to 3 %, and no chunk has the
    logits of all rows.
    """
    monkeypatch.setattr(loss, "CHUNK", 8)
    rng = np.random.default_rng(3)
    P, D, E, W, cap = 20, 32, 24, 50, 6.0
    shapes = (P, D), (D, W), (E, W), (P, E)
    hidden, kernel, columns, teacher = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes
    )
    weight = rng.uniform(0, 2, P)
    rows = jnp.arange(P)

    def ours(hidden, kernel):
        fixed = columns, teacher, rows, jnp.asarray(weight, jnp.float32), 0 * rows
        return loss.distill(lambda h: h, kernel, hidden, *fixed, 1, cap, name)[0]

    total, grads = jax.value_and_grad(ours, argnums=(0, 1))(hidden, kernel)
    x, w, t = (np.asarray(y, np.float64) for y in (hidden, kernel, teacher))
    of_teacher = cap * np.tanh(t @ np.asarray(columns, np.float64) / cap)
    log_q = special.log_softmax(x @ w, axis=-1)
    p = special.softmax(of_teacher, axis=-1)
    if name == "cross_entropy":
        p = np.eye(W)[of_teacher.argmax(-1)]
    each = special.rel_entr(p, 1).sum(-1) - (p * log_q).sum(-1)
    np.testing.assert_allclose(total, (weight * each).sum(), rtol=1e-5)
    of_logits = weight[:, None] * (np.exp(log_q) - p)
    for got, want in zip(grads, (of_logits @ w.T, x.T @ of_logits), strict=True):
        assert got.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(got, np.float64) - want) < 0.005 * np.linalg.norm(want)


def test_products_in_16_bits_have_float32_sums():
    """Forward and backward: tensor cores take 16-bit operands, and nothing is rounded before a sum.

    XLA for CPUs rounds less than it is told to, so numbers do not show it.
    """
    shapes = (20, 32), (32, 50), (24, 50), (20, 24)
    given = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    rows = jnp.arange(20)

    def ours(hidden, kernel, columns, teacher):
        fixed = columns, teacher, rows, jnp.ones(20), 0 * rows
        return loss.distill(lambda h: h, kernel, hidden, *fixed, 1)[0]

    program = jax.jit(jax.grad(ours, argnums=(0, 1))).lower(*given).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert len(products) == 4  # of the student, of the teacher, and two gradients
    for line in products:
        *operands, result = re.findall(r"tensor<[\dx]+x(\w+)>", line)
        assert operands == ["bf16", "bf16"] and result == "f32", line


def test_logits_of_one_chunk_exist_at_one_time():
    """In the program for 64 rows in chunks of 8 no array has more than 8 rows of logits."""
    W, chunks = 1009, 8
    shapes = (8 * chunks, 16), (16, W), (16, W), (8 * chunks, 16)
    given = [jnp.ones(shape) for shape in shapes]
    rows = jnp.arange(8 * chunks)

    def ours(hidden, kernel, columns, teacher):
        fixed = columns, teacher, rows, jnp.ones(8 * chunks), 0 * rows
        return loss.distill(lambda h: h, kernel, hidden, *fixed, 1)[0]

    with mock.patch.object(loss, "CHUNK", 8):
        program = jax.jit(jax.grad(ours, argnums=(0, 1))).lower(*given).as_text()
    of_logits = {int(rows) for rows in re.findall(rf"tensor<(\d+)x{W}xf32>", program)}
    assert of_logits == {8, 16}  # of a chunk; matrices and their gradients


def test_shifted_rows():
    """Row i joins x[i] and x[i+1]. No row joins two documents.

    A document's last token is not in the loss.
    """
    segment_ids = np.array([[0, 0, 0, 1, 1, 1, 1, -1]])
    loss_mask = np.array([[True, True, True, True, False, True, True, True]])
    rows, learns = shifted(Batch(np.zeros((1, 8), np.int32), segment_ids, loss_mask))
    assert rows.tolist() == [[0, 0, -1, 1, 1, 1, -1]]
    assert learns.tolist() == [[True, False, False, False, True, False, False]]
