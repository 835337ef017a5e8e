"""Synthetic acceptance: given rates decide, every step is really taken, and everything says so."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.bench.suite import run_suite
from peagle_jax.decode.drafters import synthetic_rates
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.verify import draw_accepted
from peagle_jax.report.records import cells, one_line
from peagle_jax.report.statements import headline
from peagle_jax.types import InputError
from tests import tiny

RATES = (0.8, 0.5, 0.3)


def test_rates_are_those_of_the_draws():
    rows, steps = 64, 80
    accepted = jnp.zeros(rows, jnp.int32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (rows, 4)), jnp.int32)
    drawn = np.stack(
        [draw_accepted(RATES, accepted, jnp.full(rows, i, jnp.int32), tokens) for i in range(steps)]
    )
    assert drawn.min() == 0 and drawn.max() == 3
    shares = [(drawn > i).mean() for i in range(3)]
    # 5,120 draws: a standard error of at most 0.007
    assert shares == pytest.approx(RATES, abs=0.025)
    # rows and steps draw for themselves
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.4
    assert len({tuple(row) for row in drawn.T}) == rows
    always = draw_accepted((1.0, 1.0), accepted, jnp.zeros(rows, jnp.int32), tokens)
    assert (np.asarray(always) == 2).all()
    never = draw_accepted((0.0,), accepted, jnp.zeros(rows, jnp.int32), tokens)
    assert (np.asarray(never) == 0).all()


def test_more_drafts_than_rates():
    drafter = make_drafter(tiny.head(), 3)
    assert synthetic_rates(drafter) is None and synthetic_rates(None) is None
    few = dataclasses.replace(drafter, synthetic_rates=(0.5,))
    with pytest.raises(ValueError, match="3 drafts need as many rates"):
        synthetic_rates(few)
    more = dataclasses.replace(drafter, synthetic_rates=(0.5, 0.4, 0.3, 0.2))
    assert synthetic_rates(more) == (0.5, 0.4, 0.3)


def test_a_tree_has_no_rates():
    """It would be accepted as verification says, and its rows labelled as synthetic."""
    drafter = dataclasses.replace(make_drafter(tiny.head(), 3), synthetic_rates=RATES)
    words = "num_tree_nodes: drafts at given rates are a chain; got .* synthetic_rates; leave out"
    with pytest.raises(InputError, match=words):
        Engine(tiny.target(), drafter, tiny.head().params, num_tree_nodes=7)


@pytest.fixture(scope="module", params=["peagle", pytest.param("eagle", marks=pytest.mark.slow)])
def records(request):
    target, head = tiny.pair(request.param)
    suite = run_suite(
        target,
        {request.param: head},
        [[3, 9, 4], [7, 1, 2]],
        ks=(3,),
        batch_sizes=(2,),
        max_new_tokens=60,
        repeats=1,
        on_record=lambda record: None,
        ignore_eos=True,
        synthetic={request.param: RATES},
    )
    assert suite.lossless
    return suite.records


def test_decoding_accepts_at_the_rates(records):
    plain, drawn = records
    assert plain["synthetic_acceptance"] is None
    assert drawn["synthetic_acceptance"] == list(RATES)
    # random heads are hardly ever right: verification would accept next to nothing
    assert drawn["num_drafts"] > 30
    assert drawn["accepted_per_position"] == pytest.approx(RATES, abs=0.25)
    assert drawn["num_tokens"] == plain["num_tokens"] == 120
    assert drawn["num_steps"] < plain["num_steps"] / 1.5


def test_everything_says_so(records):
    plain, drawn = records
    assert "SYNTHETIC" in one_line(drawn) and "SYNTHETIC" not in one_line(plain)
    assert cells(drawn)[-1] == "SYNTHETIC" and "lossless" not in drawn
    first = headline(records)[0]
    assert first.startswith("Acceptance is SYNTHETIC") and "80, 50, 30 %" in first
    assert json.loads(json.dumps(drawn))["synthetic_acceptance"] == [0.8, 0.5, 0.3]
