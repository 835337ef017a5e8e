"""Every loss of a head against torch, written from its definition.

And both trainings use the loss that they are told to use.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.train.attention import PackedCausal
from peagle_jax.train.eagle3_loss import eagle3_loss
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.loss import LOSSES, TeacherProbs
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.types import CodSample

torch = pytest.importorskip("torch")
F = torch.nn.functional


def kl(s, t):
    return F.kl_div(
        F.log_softmax(s, -1), F.log_softmax(t, -1), log_target=True, reduction="none"
    ).sum(-1)


def distance(s, t):
    """Half of what the two distributions differ by, summed: sampling rejects so many."""
    return (F.softmax(s, -1) - F.softmax(t, -1)).abs().sum(-1) / 2


def acceptance(s, t):
    return torch.minimum(F.softmax(s, -1), F.softmax(t, -1)).sum(-1)


def hybrid(s, t):
    share = torch.exp(-3.0 * acceptance(s, t)).detach()
    return share * kl(s, t) + (1 - share) * distance(s, t)


ORACLE = {
    "forward_kl": kl,
    "cross_entropy": lambda s, t: F.cross_entropy(s, t.argmax(-1), reduction="none"),
    "total_variation": distance,
    "kl_and_total_variation": hybrid,
    "negative_log_acceptance": lambda s, t: -torch.log(acceptance(s, t).clamp(min=1e-5)),
}
# spread of the logits of student and teacher, and what is added to both: softmax does not change,
# and a sum of exponentials would overflow
SPREADS = {
    "near": (0.3, 0.3, 0.0),
    "apart": (2.0, 3.0, -7.0),
    "sure student": (25.0, 1.0, 0.0),
    "sure teacher": (1.0, 40.0, 300.0),
    "both": (30.0, 30.0, 500.0),
}


def pair(name, rows=24, width=13):
    student, teacher, shift = SPREADS[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    return [
        (rng.normal(0, scale, (rows, width)) + shift).astype(np.float32)
        for scale in (student, teacher)
    ]


def test_the_names_are_those_of_the_oracle():
    assert LOSSES.keys() == ORACLE.keys()


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(name, spread):
    student, teacher = pair(spread)
    weight = np.linspace(0.5, 2, len(student)).astype(np.float32)
    s, t = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (student, teacher))
    want = ORACLE[name](s, t)
    (want * torch.tensor(weight, dtype=torch.float64)).sum().backward()

    def weighted(x):
        return (LOSSES[name](x, TeacherProbs.of_logits(jnp.asarray(teacher))) * weight).sum()

    got, grads = (
        LOSSES[name](jnp.asarray(student), TeacherProbs.of_logits(jnp.asarray(teacher))),
        jax.grad(weighted)(jnp.asarray(student)),
    )
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads, s.grad.numpy(), rtol=1e-5, atol=1e-5)
    assert np.ptp(want.detach().numpy()) > 1e-3 and got.dtype == jnp.float32


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_logits_are_summed_in_float32(name):
    student, teacher = (jnp.asarray(x, jnp.bfloat16) for x in pair("apart", width=400))
    got = LOSSES[name](student, TeacherProbs.of_logits(teacher))
    want = ORACLE[name](
        *(torch.tensor(np.asarray(x, np.float64)) for x in (student, teacher))
    ).numpy()
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, value, flat",
    [
        ("total_variation", 1.0, True),
        ("negative_log_acceptance", -np.log(1e-5), True),
        ("kl_and_total_variation", 300.0, False),
        ("forward_kl", 300.0, False),
        ("cross_entropy", 300.0, False),
    ],
)
def test_without_overlap(name, value, flat):
    """A student is sure of one token, the teacher of another.

    Nothing is infinite, and two of the losses have no gradient.
    """
    student = jnp.array([[300.0, 0, 0]])
    teacher = TeacherProbs.of_logits(jnp.array([[0.0, 0, 300]]))
    got, grads = jax.value_and_grad(lambda x: LOSSES[name](x, teacher).sum())(student)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    np.testing.assert_allclose(grads, np.zeros((1, 3)) if flat else [[1.0, 0, -1]], atol=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"cross_entropy"}))
def test_a_perfect_student_costs_nothing(name):
    logits = jnp.asarray(pair("apart")[0])
    np.testing.assert_allclose(
        LOSSES[name](logits, TeacherProbs.of_logits(logits + 3)), 0, atol=1e-6
    )


N, E = 9, 7  # rows and the width of their teacher


@pytest.fixture(scope="module")
def given():
    """A head, rows, the logits of a plain forward of it, and the teacher's."""
    head, rng = (
        tiny.head(
            layers=1, windows=(None,), aux_hidden_state_layers=(1, 2), placeholder_hidden="zero"
        ),
        np.random.default_rng(6),
    )

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    segment_ids = jnp.zeros((2, N), jnp.int32)
    rows = TrainingRows(
        jnp.asarray(rng.integers(0, 41, (2, N)), jnp.int32),
        draw(2, N, 48),
        draw(2, N, E),
        segment_ids,
        jnp.asarray(rng.random((2, N)) < 0.7),
    )

    @jax.jit
    def plain(params):
        module = head.bind(params)
        hidden, _ = module(
            module.embed(rows.tokens),
            module.fuse(rows.aux_hidden_states),
            jnp.tile(jnp.arange(N), (2, 1)),
            PackedCausal(segment_ids),
            None,
        )
        return module.compute_logits(hidden)

    output = draw(E, 41)
    return (
        head,
        rows,
        output,
        np.asarray(plain(head.params), np.float64),
        np.asarray(rows.teacher_hidden, np.float64) @ np.asarray(output),
    )


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("name", LOSSES)
def test_both_trainings_use_the_loss_they_are_told(name, method, given):
    """One depth, or one unrolled step: a plain forward, and the mean over the loss mask.

    The teacher's logits are capped, as Gemma's are.
    """
    head, rows, output, student, teacher = given
    nothing = CodSample(*(jnp.zeros((2, 1), t) for t in (jnp.int32, jnp.int32, bool)))
    if method == "peagle":
        got, _ = jax.jit(lambda p: peagle_loss(head.bind(p), rows, nothing, 1, output, 1.5, name))(
            head.params
        )
    else:
        got, _ = jax.jit(lambda p: eagle3_loss(head.bind(p), rows, 1, 0.7, output, 1.5, name))(
            head.params
        )
    loss_mask = np.asarray(rows.loss_mask)
    want = (
        ORACLE[name](*(torch.tensor(x[loss_mask]) for x in (student, 1.5 * np.tanh(teacher / 1.5))))
        .numpy()
        .mean()
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_by_hand():
    """sum(min(p, q)) by hand, of one row among others."""
    s, t = (
        np.log([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).astype(np.float32),
        np.log([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]).astype(np.float32),
    )
    np.testing.assert_allclose(
        LOSSES["total_variation"](jnp.asarray(s), TeacherProbs.of_logits(jnp.asarray(t))),
        [0.3, 0],
        atol=1e-6,
    )
    np.testing.assert_allclose(
        LOSSES["negative_log_acceptance"](jnp.asarray(s), TeacherProbs.of_logits(jnp.asarray(t))),
        [-np.log(0.7), 0],
        atol=1e-6,
    )
