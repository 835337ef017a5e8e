"""From packed rows to losses: alignment, and rows and documents that do not affect each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.draft import draft_vocab
from peagle_jax.train.cod import CodConfig, cod_sample
from peagle_jax.train.eagle3_loss import eagle3_loss
from peagle_jax.train.hidden_states import compute_hidden_states, shifted, training_rows
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.types import Batch, CodSample

LENGTHS, WIDTH = (11, 14), 27


def batch(layout: str) -> Batch:
    """Two documents: in one packed row, or in a row each."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 41, n) for n in LENGTHS]
    if layout == "packed":
        texts = [np.concatenate(texts)]
        number, real = [np.repeat([0, 1], LENGTHS)], [np.ones(sum(LENGTHS), bool)]
    else:
        number, real = (
            [np.full(n, i) for i, n in enumerate(LENGTHS)],
            [np.ones(n, bool) for n in LENGTHS],
        )

    def stack(rows, fill):
        return np.stack([np.pad(x, (0, WIDTH - len(x)), constant_values=fill) for x in rows])

    return Batch(stack(texts, 3), stack(number, -1), stack(real, False))


def rows(layout: str):
    b = batch(layout)
    segment_ids, loss_mask = shifted(b)
    model = tiny.target()
    on_device = Batch(*(jnp.asarray(x) for x in (b.tokens, b.segment_ids, b.loss_mask)))
    return (
        training_rows(
            model.bind(model.params), on_device, jnp.asarray(segment_ids), jnp.asarray(loss_mask)
        ),
        segment_ids,
        loss_mask,
    )


def test_alignment():
    """Row i: the token x[i+1], the aux hidden states of x[i], the target's state after x[i+1]."""
    b, model = batch("apart"), tiny.target()
    aux_hidden_states, hidden = compute_hidden_states(
        model.bind(model.params),
        Batch(*(jnp.asarray(x) for x in (b.tokens, b.segment_ids, b.loss_mask))),
    )
    got, _, _ = rows("apart")
    np.testing.assert_array_equal(got.tokens, b.tokens[:, 1:])
    np.testing.assert_array_equal(got.aux_hidden_states, aux_hidden_states[:, :-1])
    np.testing.assert_array_equal(got.teacher_hidden, hidden[:, 1:])
    # the state after x[i+1] is what a plain forward of x[0..i+1] ends with
    alone, _ = model.bind(model.params)(
        jnp.asarray(b.tokens[:1, :6]), jnp.arange(6)[None], _causal(6), None
    )
    np.testing.assert_allclose(got.teacher_hidden[0, 4], alone.hidden[0, 5], atol=1e-5)
    np.testing.assert_allclose(
        got.aux_hidden_states[0, 4], alone.aux_hidden_states[0, 4], rtol=1e-5, atol=1e-5
    )  # values of about 10


def _causal(n):
    from peagle_jax.train.attention import PackedCausal

    return PackedCausal(jnp.zeros((1, n), jnp.int32))


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_packed_documents_cost_what_they_cost_apart(method):
    """One row of two documents, or a row each: the same loss and accuracy.

    So rows and documents do not leak into each other.
    """
    head, output = (
        tiny.head(draft_vocab=17),
        tiny.target().bind(tiny.target().params).lm_head_weight(),
    )
    got = {}
    for layout in ("packed", "apart"):
        r, segment_ids, loss_mask = rows(layout)
        if method == "peagle":
            whole = cod_sample(
                *reversed(rows("packed")[1:]),
                CodConfig(
                    num_depths=4, down_sample_ratio=0.9, down_sample_ratio_min=0.2, max_anchors=None
                ),
                1,
            )
            cod = whole if layout == "packed" else _apart(whole)
            cod = CodSample(*(jnp.asarray(x) for x in (cod.anchor, cod.depth, cod.real)))
            got[layout] = jax.jit(
                lambda p, r=r, cod=cod: peagle_loss(head.bind(p), r, cod, 4, output)
            )(head.params)
        else:
            got[layout] = jax.jit(lambda p, r=r: eagle3_loss(head.bind(p), r, 4, 0.8, output))(
                head.params
            )
    (a, x), (b, y) = got["packed"], got["apart"]
    np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_array_equal(x["total"], y["total"])
    np.testing.assert_array_equal(x["correct"], y["correct"])
    assert x["total"][0] == sum(LENGTHS) - 4 and 0 < x["total"][3] < x["total"][0]


def _apart(cod: CodSample) -> CodSample:
    """The same elements, each in its document's own row."""
    parts = []
    for low, high in ((0, LENGTHS[0]), (LENGTHS[0], sum(LENGTHS))):
        mine = cod.real[0] & (cod.anchor[0] >= low) & (cod.anchor[0] < high)

        def fill(x, mine=mine):
            return np.pad(x[mine], (0, mine.size - mine.sum()))

        parts.append((fill(cod.anchor[0] - low), fill(cod.depth[0]), fill(cod.real[0])))
    return CodSample(*(np.stack(x) for x in zip(*parts, strict=True)))


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
    counts = np.array([5, 0, 9, 5, 7])
    assert draft_vocab.choose(counts, 3).tolist() == [0, 2, 4] and draft_vocab.choose(
        counts, 5
    ).tolist() == [0, 1, 2, 3, 4]
    d2t, t2d = draft_vocab.tables(np.array([0, 2, 4]), 5)
    assert d2t.tolist() == [0, 1, 2] and t2d.tolist() == [True, False, True, False, True]
    with pytest.raises(ValueError, match="1..5"):
        draft_vocab.choose(counts, 6)
