"""Prefix + chain attention equals dense masked attention, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.kernels import (
    native_code,
    packed_attention,
    packed_attention_blocks,
    packed_attention_chains,
    packed_attention_dense,
    packed_attention_native,
)
from peagle_jax.train.attention import PackedCausal, PrefixChain
from peagle_jax.train.cod import CodConfig, cod_sample
from peagle_jax.types import AttentionRule

B, n, N, G, H, K = 2, 26, 4, 2, 8, 5
TOLERANCE = 1e-6


def inputs():
    segment_ids = np.stack([np.repeat([0, 1, 2], [9, 13, 4]), np.where(np.arange(n) < 23, 0, -1)])
    loss_mask = (np.random.default_rng(0).random((B, n)) < 0.85) & (segment_ids >= 0)
    cod = cod_sample(
        loss_mask,
        segment_ids,
        CodConfig(num_depths=K, down_sample_ratio=0.8, down_sample_ratio_min=0.2, max_anchors=None),
        3,
    )
    P = n + cod.anchor.shape[1]
    keys = jax.random.split(jax.random.key(1), 4)

    def shape(heads):
        return (B, P, heads, H)

    q, k, v, weight = (
        jax.random.normal(key, shape(heads)) for key, heads in zip(keys, (N, G, G, N), strict=True)
    )
    return segment_ids, cod, q, k, v, weight


def dense(segment_ids, cod, q, k, v, window):
    """The mask written out, [P, P]: peagle.md section 4, 'Attention'."""
    here = np.broadcast_to(np.arange(n), (B, n))
    anchor, depth = np.concatenate([here, cod.anchor], 1), np.concatenate([0 * here, cod.depth], 1)
    doc = np.take_along_axis(segment_ids, anchor, 1)
    real = np.concatenate([segment_ids >= 0, cod.real], 1)
    qa, ka, qd, kd = anchor[:, :, None], anchor[:, None], depth[:, :, None], depth[:, None]
    seen = ((kd == 0) & (ka <= qa)) | ((ka == qa) & (kd <= qd))
    seen &= (doc[:, :, None] == doc[:, None]) & real[:, None] & real[:, :, None]
    if window is not None:
        seen &= ka + kd > qa + qd - window
    k, v = (jnp.repeat(x, N // G, axis=2) for x in (k, v))
    scores = jnp.einsum("BPNH,BQNH->BNPQ", q, k) * H**-0.5
    scores = jnp.where(seen[:, None], scores, -1e30)
    return jnp.einsum("BNPQ,BQNH->BPNH", jax.nn.softmax(scores, -1), v), real


# queries and keys in blocks, or all at once; chains in blocks of 2 are longer than a block
@pytest.mark.parametrize(
    "sizes, block, window",
    [
        ((16, 24), 8, None),
        ((16, 16), 2, 7),
        (None, 8, 3),
        pytest.param(None, 64, None, marks=pytest.mark.long),
    ],
)
def test_equals_dense(window, sizes, block, monkeypatch):
    monkeypatch.setattr(packed_attention_native, "can_attend", lambda q, k, v: False)
    monkeypatch.setattr(packed_attention, "block_sizes", lambda *shape: sizes)
    parts = packed_attention_blocks, packed_attention_chains, packed_attention_dense
    for part in (packed_attention, *parts):
        monkeypatch.setattr(part, "BLOCK", block)
    segment_ids, cod, q, k, v, weight = inputs()
    attend = PrefixChain(
        jnp.asarray(cod.anchor), jnp.asarray(cod.depth), jnp.asarray(segment_ids), K
    )
    _, real = dense(segment_ids, cod, q, k, v, window)
    mask = jnp.asarray(real)[:, :, None, None] * weight  # padding gives numbers that nobody reads

    def value(f):
        out, grads = jax.value_and_grad(lambda *x: (f(*x) * mask).sum(), argnums=(0, 1, 2))(q, k, v)
        return (f(q, k, v) * (mask != 0), out, *grads)

    ours = value(lambda q, k, v: attend(0, q, k, v, None, AttentionRule(window, H**-0.5))[0])
    theirs = value(lambda q, k, v: dense(segment_ids, cod, q, k, v, window)[0])
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE * np.abs(b).max(), rtol=0)


def test_the_worked_example():
    """n = 4, kept (1,1) and (1,2): element (1,2) sees (0,0), (1,0), (1,1), (1,2), and not (2,0)."""
    q = k = jnp.zeros((1, 6, 1, 8))  # equal scores: the output is the mean of the values seen
    v = jnp.eye(6, 8)[None, :, None]
    attend = PrefixChain(jnp.array([[1, 1]]), jnp.array([[1, 2]]), jnp.zeros((1, 4), jnp.int32), 3)
    out, _ = attend(0, q, k, v, None, AttentionRule(None, 8**-0.5))
    np.testing.assert_allclose(out[0, 5, 0], [0.25, 0.25, 0, 0, 0.25, 0.25, 0, 0], atol=1e-6)
    np.testing.assert_allclose(out[0, 4, 0], [1 / 3, 1 / 3, 0, 0, 1 / 3, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(out[0, 2, 0], [1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 0, 0], atol=1e-6)


def test_documents_do_not_see_each_other():
    segment_ids, _, q, k, v, _ = inputs()

    def f(v):
        return PackedCausal(jnp.asarray(segment_ids))(
            0, q[:, :n], k[:, :n], v, None, AttentionRule(None, H**-0.5)
        )[0][0, 9:22].sum()

    seen = np.abs(np.asarray(jax.grad(f)(v[:, :n]))).sum((2, 3))[0] > 0
    assert np.array_equal(seen, segment_ids[0] == 1)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_sinks_take_their_share(by_kernel, monkeypatch):
    """GPT-OSS: one more logit for each head is in the softmax, and has no value."""
    if by_kernel and not native_code.fills_vectors(16):
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(packed_attention_native, "can_attend", lambda q, k, v: by_kernel)
    segment_ids, _, q, k, v, _ = inputs()
    if by_kernel:  # with zeros behind, for heads of whole vectors
        q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, 16 - H)]) for x in (q, k, v))
    q, k, v = (np.asarray(x[:, :n], np.float64) for x in (q, k, v))
    sinks = np.array([-1.0, 0.5, 2.0, 6.0])
    rule = AttentionRule(None, H**-0.5, jnp.asarray(sinks, jnp.float32))
    attend = PackedCausal(jnp.asarray(segment_ids))
    got, _ = attend(0, *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), None, rule)
    for row, place in ((0, 0), (0, 20), (1, 22)):
        first = np.flatnonzero(segment_ids[row] == segment_ids[row, place])[0]
        for head in range(N):
            keys, values = (x[row, first : place + 1, head * G // N] for x in (k, v))
            scores = np.exp(keys @ q[row, place, head] * H**-0.5)
            want = scores @ values / (scores.sum() + np.exp(sinks[head]))
            np.testing.assert_allclose(got[row, place, head], want, atol=1e-5)
