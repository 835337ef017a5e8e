"""The chunked loss against the plain formula, and the shifted rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.interpreter import interpret
from scipy import special, stats

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
    hit = weight * (p.argmax(-1) == q.argmax(-1))
    np.testing.assert_allclose(by_depth["correct"], np.bincount(depth, hit, K))
    np.testing.assert_allclose(by_depth["total"], np.bincount(depth, weight, K))


def test_shifted_rows():
    """Row i joins x[i] and x[i+1]. No row joins two documents.

    A document's last token is not in the loss.
    """
    segment_ids = np.array([[0, 0, 0, 1, 1, 1, 1, -1]])
    loss_mask = np.array([[True, True, True, True, False, True, True, True]])
    rows, learns = shifted(Batch(np.zeros((1, 8), np.int32), segment_ids, loss_mask))
    assert rows.tolist() == [[0, 0, -1, 1, 1, 1, -1]]
    assert learns.tolist() == [[True, False, False, False, True, False, False]]
