"""Weights of depths in P-EAGLE's loss: the mean is weighted, the counts are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.train.config import PeagleRun
from peagle_jax.train.head_batches import HeadBatch
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.train.settings import build
from peagle_jax.train.train_head import head_denominators
from peagle_jax.types import Batch, CodSample, InputError

N, K, E = 9, 3, 7
DEEPER = [(0, 1), (1, 1), (1, 2), (3, 1), (4, 1), (4, 2)]  # in two partitions of three
LOSS_MASK = np.array([True, True, True, False, True, True, True, True, True])
NUM_ELEMENTS = (8, 4, 1)  # by depth; (1, 2) is not in the loss
WEIGHTS = (0.7, 1.9, 0.4)


def given():
    head = tiny.head(confidence=True, num_depths=K)
    rng = np.random.default_rng(5)
    rows = TrainingRows(
        jnp.asarray(rng.permutation(41)[:N][None], jnp.int32),
        jnp.asarray(rng.normal(size=(1, N, head.config.sizes.aux_dim)), jnp.float32),
        jnp.asarray(rng.normal(size=(1, N, E)), jnp.float32),
        jnp.zeros((1, N), jnp.int32),
        jnp.asarray(LOSS_MASK[None]),
    )
    anchor, depth = (jnp.asarray([x], jnp.int32) for x in zip(*DEEPER, strict=True))
    cod = CodSample(anchor, depth, jnp.ones_like(anchor, bool))
    return head, rows, cod, jnp.asarray(rng.normal(size=(E, 41)), jnp.float32)


def loss_and_gradients(weights, **options):
    head, rows, cod, lm_head = given()

    @jax.jit
    def of(params):
        return peagle_loss(
            head.bind(params), rows, cod, K, lm_head, depth_weights=weights, **options
        )

    return jax.value_and_grad(of, has_aux=True)(head.params)


def test_the_mean_is_weighted_and_the_counts_are_not():
    one_hot = [tuple(float(d == other) for other in range(K)) for d in range(K)]
    means = [loss_and_gradients(weights)[0][0] for weights in one_hot]
    (loss, counts), grads = loss_and_gradients(WEIGHTS)
    shares = np.array(WEIGHTS) * NUM_ELEMENTS
    np.testing.assert_allclose(loss, np.dot(shares, means) / shares.sum(), rtol=1e-5)
    of_depth = [loss_and_gradients(weights)[1] for weights in one_hot]
    for grad, *parts in zip(*map(jax.tree.leaves, (grads, *of_depth)), strict=True):
        expected = sum(s * part for s, part in zip(shares / shares.sum(), parts, strict=True))
        np.testing.assert_allclose(grad, expected, atol=1e-5)
    (_, plain), _ = loss_and_gradients(None)
    for name, values in plain.items():
        np.testing.assert_allclose(counts[name], values, rtol=1e-5)
    np.testing.assert_array_equal(plain["total"], NUM_ELEMENTS)
    np.testing.assert_array_equal(loss_and_gradients((1.0, 0.0, 2.0))[0][1]["total"], [8, 0, 1])


def test_partitions_and_equal_weights_change_nothing():
    whole = loss_and_gradients(WEIGHTS)
    for other in (
        loss_and_gradients(WEIGHTS, partitions=2),
        loss_and_gradients(tuple(3 * weight for weight in WEIGHTS)),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), whole, other)
    ones, none = loss_and_gradients((1.0,) * K), loss_and_gradients(None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ones, none)


def run_of(**changes) -> PeagleRun:
    raw = {
        "task": "peagle",
        "target": "t",
        "out": "o",
        "data": {"source": "c.jsonl"},
        "cod": {"num_depths": K},
    }
    return build(PeagleRun, raw | changes, "recipe.yaml")


def test_a_part_of_a_batch_is_divided_by_the_weights_of_all():
    _, rows, cod, _ = given()
    packed = Batch(*(np.zeros((1, N + 1), dtype) for dtype in (np.int32, np.int32, bool)))
    noise_ids = np.zeros((1, 2), np.int32)
    batch = HeadBatch(packed, None, rows.segment_ids, rows.loss_mask, cod, noise_ids, K)
    total = np.dot(WEIGHTS, NUM_ELEMENTS)
    weighted = head_denominators(run_of(depth_weights=list(WEIGHTS)), batch)
    np.testing.assert_allclose(weighted, total, rtol=1e-6)
    assert head_denominators(run_of(), batch) == sum(NUM_ELEMENTS)
    assert head_denominators(run_of(depth_weights=[0.01] * K), batch) == pytest.approx(0.13)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            [1.0, 0.5],
            "depth_weights: must be 3 numbers, one for each depth (cod.num_depths); got 2",
        ),
        ([0.0, 1.0, 1.0], "depth_weights: must be finite, 0 or more, the first above 0"),
        ([1.0, -1.0, 1.0], "depth_weights: must be finite, 0 or more"),
        ([1.0, float("inf"), 1.0], "depth_weights[1]: must be a finite number; got inf"),
    ],
)
def test_what_is_refused(weights, words):
    with pytest.raises(InputError) as caught:
        run_of(depth_weights=weights)
    assert words in str(caught.value)
