"""Operations of a training, counted by hand for a tiny run."""

import dataclasses

import pytest

from experiments import arithmetic
from experiments.base_run import as_eagle, as_eagle3, base_run
from experiments.budgets import BUDGETS
from experiments.jobs import Job
from experiments.registry import EXPERIMENTS
from peagle_jax.train.cod import CodConfig
from peagle_jax.train.config import DepthStage, PeagleRun
from peagle_jax.train.recipe_sections import MarkovConfig

TARGET = BUDGETS["smoke"].model


def flops(run) -> float:
    return arithmetic.training_flops(run, TARGET)


def tiny_run(num_depths: int = 2, layers: int = 2, **changes) -> PeagleRun:
    """10 shifted rows of 3 sequences, 10 steps, 4 of them with one depth.

    Depth 1 keeps int(9 * 0.5) = 4 elements.
    """
    run = base_run(BUDGETS["smoke"], 0)
    head = dataclasses.replace(
        run.head,
        layers=layers,
        dim=8,
        mlp_dim=12,
        heads=4,
        kv_heads=2,
        head_dim=6,
        draft_vocab=32,
        aux_hidden_state_layers=(1, 2, 3),
    )
    data = dataclasses.replace(run.data, seq_len=11, batch_size=3)
    optimizer = dataclasses.replace(run.optimizer, steps=10)
    cod = CodConfig(
        num_depths=num_depths, down_sample_ratio=0.5, down_sample_ratio_min=0.0, max_anchors=None
    )
    settings = {
        "head": head,
        "data": data,
        "optimizer": optimizer,
        "cod": cod,
        "depth_schedule": (DepthStage(until=4, num_depths=1),) if num_depths > 1 else (),
    }
    return dataclasses.replace(run, **settings | changes)


def products(rows: int, fused: int) -> int:
    """Multiplications of a step of the tiny run for a sequence, matrix by matrix."""
    first = 16 * 24 + 2 * (16 * 12) + 24 * 8  # q, k and v read embedding and hidden state; o
    second = 8 * 24 + 2 * (8 * 12) + 24 * 8
    gated = 8 * 12 * 2 + 12 * 8
    attention = 2 * 2 * rows * 5 * 24  # q.k and weights.v, both layers, half of the ten keys
    layers = rows * (first + second + 2 * gated) + attention
    fusion, logits = fused * 3 * 8 * 8, rows * 8 * 32
    # fc's input needs no gradient. The head's logits: forward, again, and backward, but not to a
    # frozen matrix. The target's: forward, and again.
    return 3 * layers + 2 * fusion + 3 * logits + 2 * logits


def test_flops_by_hand():
    peagle = tiny_run()
    assert flops(peagle) == 3 * 2 * (4 * products(10, 10) + 6 * products(14, 10))
    eagle3 = as_eagle3(peagle, layers=2)
    assert flops(eagle3) == 3 * 2 * (
        4 * products(10, 10) + 6 * products(20, 10)
    )  # every row again at every depth


def test_an_eagle_1_head_by_hand():
    """Two layers of single width behind fc of 2 x D, one depth in every step."""
    run = as_eagle(tiny_run(), layers=2)
    dim, vocab = TARGET.dim, TARGET.vocab
    layer = dim * 24 + 2 * (dim * 12) + 24 * dim + 3 * dim * 12
    attention = 2 * 2 * 10 * 5 * 24
    layers = 10 * 2 * layer + attention
    step = 3 * layers + 2 * 10 * 2 * dim * dim + 5 * 10 * dim * vocab
    assert flops(run) == 3 * 2 * 10 * step


def test_a_markov_head_by_hand():
    """Its bias, 5 x 32, twice forward and twice backward; a gate, 13 x 5, once and twice.

    What reads a state, 5 x 15, does so for 10 anchors at depth 1.
    """
    of_bias, of_gate, of_inputs = 4 * 5 * 32, 3 * (8 + 5) * 5, 3 * (8 + 5) * 15
    num_rows = 3 * (4 * 10 + 6 * 14)
    for kind, size in (
        ("vanilla", num_rows * of_bias),
        ("gated", num_rows * (of_bias + of_gate)),
        ("rnn", num_rows * (of_bias + of_inputs) + 3 * 6 * 10 * 4 * 5 * 15),
    ):
        more = flops(tiny_run(markov=MarkovConfig(rank=5, kind=kind)))
        assert more - flops(tiny_run()) == 2 * size


def test_what_costs_more():
    assert (
        flops(tiny_run(num_depths=1))
        < flops(tiny_run())
        < flops(tiny_run(num_depths=3))
        < flops(tiny_run(num_depths=3, depth_schedule=()))
    )
    assert flops(tiny_run(layers=1)) < flops(tiny_run()) < flops(as_eagle3(tiny_run(), layers=2))
    few = dataclasses.replace(tiny_run(), cod=dataclasses.replace(tiny_run().cod, max_anchors=4))
    assert flops(tiny_run(num_depths=1)) < flops(few) < flops(tiny_run())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("other", ["EAGLE-3 of equal FLOPs", "EAGLE-1 of equal FLOPs"])
def test_equal_arithmetic_is_equal(other, budget):
    """To a thirtieth: steps, and the steps at which depths grow, are whole."""
    ours, theirs = (
        arithmetic.training_flops(
            Job(EXPERIMENTS["against_eagle3"], name, 0, budget).plain_run(), BUDGETS[budget].model
        )
        for name in ("P-EAGLE", other)
    )
    assert theirs == pytest.approx(ours, rel=1 / 30)
