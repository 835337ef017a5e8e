"""Noise on aux hidden states in training, observed in what the head is called with."""

import dataclasses
import functools

import designs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from peagle_jax.draft.head import DraftHead
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.peagle_loss import FeatureNoise, peagle_loss
from peagle_jax.types import CodSample, Model

B, N, DEPTHS = 3, 64, 4
SECOND = 40  # first row of the second document
ANCHOR, DEPTH = [0, 4, 4, 4, 30, 30], [1, 1, 2, 3, 1, 2]
NONE = FeatureNoise(noise=0.0, dropout=0.0)


class Watched(DraftHead):
    """Keeps what it was called with."""

    seen: list = []  # noqa: RUF012

    def __call__(self, embeddings, features, positions, attend, state, **options):
        Watched.seen.append((embeddings, features))
        return super().__call__(embeddings, features, positions, attend, state, **options)


@functools.cache
def head(**changes) -> Model:
    config = tiny.head_config(layers=1, windows=(None,), num_depths=DEPTHS, **changes)
    model = Model.from_module(Watched(config, rngs=nnx.Rngs(0)), config)
    return dataclasses.replace(model, params=tiny.shake(model.params, 3))


@functools.cache
def plain() -> Model:
    """One aux layer that the fusion passes on as it is: fused features are aux hidden states."""
    model = head(aux_hidden_state_layers=(1,), dim=24)
    return dataclasses.replace(
        model, params={**model.params, "fusion": {"fc": {"kernel": jnp.eye(24)}}}
    )


@functools.cache
def rows(width: int) -> TrainingRows:
    rng = np.random.default_rng(2)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    tokens = jnp.asarray(rng.integers(0, 41, (B, N)), jnp.int32)
    segment_ids = jnp.asarray(np.arange(N) >= SECOND, jnp.int32)
    return TrainingRows(
        tokens,
        draw(B, N, width),
        draw(B, N, 7),
        jnp.tile(segment_ids, (B, 1)),
        jnp.ones((B, N), bool),
    )


COD = CodSample(*(jnp.tile(jnp.asarray(x), (B, 1)) for x in (ANCHOR, DEPTH, [True] * len(DEPTH))))
OUTPUT = jnp.asarray(np.random.default_rng(5).normal(size=(7, 41)), jnp.float32)


@functools.cache
def program(model_of, feature_noise, keyed=True):
    model = model_of()
    given = rows(model.config.sizes.aux_dim)

    @jax.jit
    def run(params, key):
        Watched.seen.clear()
        loss, _ = peagle_loss(
            model.bind(params),
            given,
            COD,
            DEPTHS,
            OUTPUT,
            feature_noise=feature_noise,
            keys=jax.random.split(key, B) if keyed else None,
        )
        return loss, *Watched.seen[-1]

    return lambda key: [np.asarray(x) for x in run(model.params, jax.random.key(key))]


def test_without_noise_nothing_changes():
    loss, embeddings, features = program(plain, None, False)(0)
    for other in (program(plain, NONE, False)(0), program(plain, NONE)(1)):
        assert loss == other[0]
        np.testing.assert_array_equal(embeddings, other[1])
        np.testing.assert_array_equal(features, other[2])
    np.testing.assert_array_equal(features[:, :N], rows(24).aux_hidden_states)


@pytest.mark.parametrize("bound", [0.15, 2.5])
def test_noise(bound):
    """Uniform, of either sign and up to that bound, another for every number and key."""
    run, clean = (
        program(plain, FeatureNoise(noise=bound, dropout=0.0)),
        program(plain, None, False)(0),
    )
    first, again, other = run(7), run(7), run(8)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert first[0] != other[0] and first[0] != clean[0]
    noise = first[2][:, :N] - np.asarray(rows(24).aux_hidden_states)
    assert 0.99 * bound < np.abs(noise).max() <= bound * (1 + 1e-5)
    assert abs(noise.mean()) < 5 * bound / np.sqrt(3 * noise.size)  # 4608 draws
    np.testing.assert_allclose(noise.std(), bound / np.sqrt(3), rtol=0.03)
    for axis in range(3):  # every row, position and channel has a draw of its own
        assert np.abs(np.diff(noise, axis=axis)).min(axis=axis).max() > 0
    assert (
        abs(
            np.corrcoef(
                noise.ravel(), (other[2][:, :N] - np.asarray(rows(24).aux_hidden_states)).ravel()
            )[0, 1]
        )
        < 0.08
    )
    np.testing.assert_array_equal(first[1], clean[1])  # tokens
    # placeholders of the paper read no real feature
    np.testing.assert_array_equal(first[2][:, N:], clean[2][:, N:])


DROPS = {
    name: designs.ALL[f"{name}-mask"]
    for name in ("shared", "gated", "last_feature", "shared_depth")
}


@pytest.mark.parametrize("name", DROPS)
def test_dropout(name):
    """That share of rows gets the feature of a placeholder of depth 1 behind the row before.

    The other rows and all tokens stay.
    """
    share, model_of = 0.3, functools.partial(head, **DROPS[name])
    model_of = _cached(name)
    model = model_of()
    fuse = jax.jit(lambda aux_hidden_states: model.bind(model.params).fuse(aux_hidden_states))
    clean = program(model_of, None, False)(0)
    run, dropped = program(model_of, FeatureNoise(noise=0.0, dropout=share)), []
    table = np.asarray(model.params["embed"]["table"])
    for key in (1, 2, 2):
        loss, embeddings, features = run(key)
        np.testing.assert_array_equal(embeddings, clean[1])
        np.testing.assert_array_equal(embeddings[:, :N], table[np.asarray(rows(72).tokens)])
        changed = (features[:, :N] != clean[2][:, :N]).any(axis=-1)
        for b, i in zip(*np.nonzero(changed), strict=True):
            before = i if i in (0, SECOND) else i - 1  # no document reads another
            want = designs.fused(model, 1, clean[2][b, before], fuse)
            np.testing.assert_allclose(features[b, i], want, rtol=1e-5, atol=1e-5)
        # placeholders read the feature that is there
        for place, (a, d) in enumerate(zip(ANCHOR, DEPTH, strict=True)):
            want = [designs.fused(model, d, features[b, a], fuse) for b in range(B)]
            np.testing.assert_allclose(features[:, N + place], want, rtol=1e-5, atol=1e-5)
        assert loss != clean[0]
        dropped.append(changed)
    np.testing.assert_array_equal(dropped[1], dropped[2])
    assert 0.05 < (dropped[0] != dropped[1]).mean()  # other keys, other rows
    both = np.stack(dropped[:2])
    assert abs(both.mean() - share) < 4 * np.sqrt(share * (1 - share) / both.size)  # 384 draws
    # every row of the batch has its own
    assert len({tuple(row) for row in both.reshape(-1, N).tolist()}) == 2 * B


@functools.cache
def _cached(name):
    return lambda: head(**DROPS[name])


def test_both_at_once():
    """A row that is not dropped has noisy features, a dropped one the placeholder's.

    Neither draw changes the other.
    """
    bound, share = 0.5, 0.4
    noisy, drop = FeatureNoise(noise=bound, dropout=0.0), FeatureNoise(noise=0.0, dropout=share)
    both = program(plain, FeatureNoise(noise=bound, dropout=share))(3)[2][:, :N]
    noise, aux_hidden_states = (
        program(plain, noisy)(3)[2][:, :N],
        np.asarray(rows(24).aux_hidden_states),
    )
    dropped = (program(plain, drop)(3)[2][:, :N] != aux_hidden_states).any(axis=-1)
    assert 0.3 < dropped.mean() < 0.5
    np.testing.assert_array_equal(both[~dropped], noise[~dropped])
    np.testing.assert_allclose(
        both[dropped], np.tile(plain().params["mask_hidden"], (dropped.sum(), 1)), rtol=1e-6
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"noise": -0.1},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"dropout": 1.5},
    ],
)
def test_bad_values(bad):
    (key,) = bad
    with pytest.raises(ValueError, match=f"{key}: must "):
        FeatureNoise(**{"noise": 0.0, "dropout": 0.0, **bad})
