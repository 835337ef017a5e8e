"""Which depths should weigh most in the loss of a parallel head?

    python -m experiments.run depth_weights --seeds 3 --budget sampled

The weights of depth d are 1, 0.8**d and 1.25**d. COD sampling trains fewer elements of later depths
already, so that equal weights favor the first ones.
Expects: the first position gains from falling weights, late ones from rising weights; the length
hardly changes, since what comes late is reached seldom.
Result: e8fd383, 2026-11-26, 3 seeds, budget sampled: 0.8**d gains 0.02 tokens, 1.25**d loses 0.04.
docs/late_positions_tables.md has more.
"""

import dataclasses

from experiments.base import Experiment, Variant
from peagle_jax.train.config import PeagleRun


def with_ratio(ratio: float) -> Variant:
    def run(base: PeagleRun) -> PeagleRun:
        weights = tuple(round(ratio**depth, 4) for depth in range(base.cod.num_depths))
        return dataclasses.replace(base, depth_weights=weights)

    return Variant(run=run)


EXPERIMENT = Experiment(
    name="depth_weights",
    question="Which depths should weigh most in the loss of a parallel head?",
    expects="The first position gains from falling weights, late ones from rising weights; the "
    "length hardly changes.",
    axis="weight of depth d",
    kind="bars",
    reference="equal",
    variants={
        "equal": Variant(),
        "0.8 to the power of d": with_ratio(0.8),
        "1.25 to the power of d": with_ratio(1.25),
    },
    paper="P-EAGLE weighs all elements alike (arXiv:2602.01469); EAGLE-3's test-time training in "
    "speculators has a decay for each step, 1.0 by default.",
)
