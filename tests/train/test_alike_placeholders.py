"""Gradients with placeholders that are the same multiplied once are those with each row its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_partitions import check_equal, gradients

from peagle_jax.train import peagle_loss
from peagle_jax.train.recipe_sections import ComputeConfig
from peagle_jax.types import CodSample


@pytest.mark.parametrize(
    ("partitions", "design", "compute"),
    [
        (1, "shared", None),
        (3, "per_depth", None),
        (1, "low_rank", ComputeConfig(recompute="layers")),
    ],
)
def test_gradients(partitions, design, compute, monkeypatch):
    got = gradients.__wrapped__(partitions, compute, design=design)
    calls = []

    def never(cfg):
        calls.append(cfg)
        return False

    monkeypatch.setattr(peagle_loss, "are_alike_by_depth", never)
    check_equal(got, gradients.__wrapped__(partitions, compute, design=design))
    assert calls


def test_gradients_in_bfloat16(monkeypatch):
    """As near to each other as rounding lets them be, and to the float32 gradients."""
    compute = ComputeConfig(dtype="bfloat16")
    wanted = gradients(1)[2]
    alike = gradients.__wrapped__(1, compute)[2]
    monkeypatch.setattr(peagle_loss, "are_alike_by_depth", lambda cfg: False)
    apart = gradients.__wrapped__(1, compute)[2]
    for name in ("mask_hidden", "layers", "embed"):
        of_alike, of_apart, exact = (
            np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(grads[name])])
            for grads in (alike, apart, wanted)
        )
        size = np.linalg.norm(exact)
        assert np.linalg.norm(of_alike - of_apart) < 0.02 * size, name
        assert np.linalg.norm(of_alike - exact) < 0.05 * size, name


def test_a_sample_deeper_than_the_loss_has_depths():
    """Such rows have the last depth's placeholder, as rows of their own have."""
    head = tiny.head(placeholder_hidden="per_depth")
    cod = CodSample(jnp.asarray([[1, 1, 1]]), jnp.asarray([[1, 2, 5]]), jnp.ones((1, 3), bool))
    given = jnp.zeros((1, 4, head.config.dim))
    *rows, which = peagle_loss._placeholder_rows(head.bind(head.params), cod, 4, given, given)
    assert which.tolist() == [[0, 1, 2]] and rows[1].shape[1] == 3
