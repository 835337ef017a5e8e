"""The loss of a confidence head against torch, and that nothing else learns from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from train.test_markov_loss import K, given, normed_of_elements, trained_part

from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.train.train_head import head_metrics
from peagle_jax.weights import flatten_params

torch = pytest.importorskip("torch")
F = torch.nn.functional


def with_confidence(head):
    """The head with a confidence head of random parameters, and all else as it was."""
    config = {"draft_vocab": head.config.draft_vocab, "num_depths": K, "confidence": True}
    markov = {name: getattr(head.config, name) for name in ("markov_rank", "markov_kind")}
    new = tiny.head(**config, **markov)
    new.params.update({name: x for name, x in head.params.items() if name != "confidence"})
    return new


def loss_and_grads(head, rows, cod, output, partitions=1):
    d2t = {"d2t": head.params["d2t"]}

    def loss(params):
        bound = head.bind({**params, **d2t})
        return peagle_loss(bound, rows, cod, K, output, partitions=partitions)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(trained_part(head.params))


@functools.cache
def computed(has_markov: bool, confident: bool):
    head, rows, cod, output = given("gated")
    if not has_markov:
        head = tiny.head(draft_vocab=head.config.draft_vocab, num_depths=K)
    head = with_confidence(head) if confident else head
    return head, rows, cod, output, *loss_and_grads(head, rows, cod, output)


@pytest.mark.parametrize("has_markov", [False, True])
def test_loss_and_gradients(has_markov):
    """Binary cross-entropy with 1 - total variation, of every element in the loss."""
    head, rows, _, output, (loss, by_depth), grads = computed(has_markov, True)
    *_, (plain_loss, plain_counts), plain_grads = computed(has_markov, False)
    elements, run = normed_of_elements(head, rows)
    named = {
        name: torch.tensor(np.asarray(x), dtype=torch.float64)
        for name, x in flatten_params(head.params)
    }
    normed = torch.tensor(np.asarray(jax.jit(run)(head.params)), dtype=torch.float64)
    positions = [a + d for a, d in elements]
    logits, read = normed @ named["lm_head.kernel"], normed
    if has_markov:
        previous = torch.tensor(np.asarray(rows.tokens)[0, positions])
        embedded = F.embedding(previous, named["markov.w1.table"])
        joint = torch.cat([normed, embedded], -1)
        gate = torch.sigmoid(joint @ named["markov.gate.kernel"] + named["markov.gate.bias"])
        logits = logits + (embedded * gate) @ named["markov.w2.kernel"]
        read = joint
    ids = np.asarray(head.bind(head.params).target_ids())
    columns = np.asarray(output, np.float64)[:, ids]
    teacher = torch.tensor(np.asarray(rows.teacher_hidden, np.float64)[0, positions] @ columns)
    p, q = F.softmax(teacher, -1), F.softmax(logits, -1)
    target = 1 - 0.5 * (p - q).abs().sum(-1)
    assert 0.01 < target.min() and target.max() < 0.99 and target.max() - target.min() > 0.1
    kernel = named["confidence.kernel"].requires_grad_()
    bias = named["confidence.bias"].requires_grad_()
    confidence = (read @ kernel)[:, 0] + bias
    losses = F.binary_cross_entropy_with_logits(confidence, target, reduction="none")
    want = losses.sum() / len(elements)
    want.backward()

    np.testing.assert_allclose(loss - plain_loss, want.item(), rtol=2e-5)
    of_depth = np.zeros(K)
    for (_, d), x in zip(elements, losses, strict=True):
        of_depth[d] += x.item()
    np.testing.assert_allclose(by_depth["confidence_loss"], of_depth, rtol=2e-5)
    found = dict(flatten_params(grads))
    for name, theirs in (("confidence.kernel", kernel.grad), ("confidence.bias", bias.grad)):
        wanted = theirs.numpy()
        assert np.abs(found[name] - wanted).max() <= 2e-5 * np.abs(wanted).max(), name

    # nothing else has a gradient of it, and nothing else is counted otherwise
    for name, x in flatten_params(plain_grads):
        np.testing.assert_allclose(found[name], x, rtol=1e-6, atol=1e-9, err_msg=name)
    assert found.keys() - dict(flatten_params(plain_grads)).keys() == {
        "confidence.kernel",
        "confidence.bias",
    }
    for name in ("correct", "total"):
        np.testing.assert_array_equal(by_depth[name], plain_counts[name])
    metrics = head_metrics(by_depth)
    np.testing.assert_allclose(
        metrics["confidence_loss"], of_depth / np.asarray(by_depth["total"]), rtol=2e-5
    )
    assert head_metrics(plain_counts).keys() == {"accuracy"}


def test_partitions_change_nothing():
    head, rows, cod, output, whole, grads = computed(True, True)
    parts, parts_grads = loss_and_grads(head, rows, cod, output, partitions=2)
    for x, y in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(parts_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * float(np.abs(y).max()) + 1e-9)


def test_chunks_change_nothing(monkeypatch):
    """The share that sampling accepts is of the right element, also where chunks are padded."""
    head, rows, cod, output, (_, whole), _ = computed(False, True)
    monkeypatch.setattr("peagle_jax.train.loss.CHUNK", 4)
    (_, parts), _ = loss_and_grads(head, rows, cod, output)
    np.testing.assert_allclose(parts["confidence_loss"], whole["confidence_loss"], rtol=1e-5)
    assert jnp.unique(parts["confidence_loss"]).size == K
