"""Does a head draft better if its hidden states are sometimes missing or noisy in training?

    python -m experiments.run regularization --seeds 3

Expects: dropout, which replaces real hidden states by the placeholder's vector, trains that
vector on many more rows; it may help late positions and cost the first one. Small noise changes
nothing, large noise hurts.
Result: cb67f9b, 2026-11-28, 3 seeds, budget sampled: noise changes nothing, 0.15 of dropout costs
0.03 tokens at the first position, and late ones gain nothing.
"""

import dataclasses

from experiments.base import Experiment, Variant
from peagle_jax.train.config import PeagleRun


def with_noise(**settings: float) -> Variant:
    def run(base: PeagleRun) -> PeagleRun:
        feature_noise = dataclasses.replace(base.feature_noise, **settings)
        return dataclasses.replace(base, feature_noise=feature_noise)

    return Variant(run=run)


EXPERIMENT = Experiment(
    name="regularization",
    question="Does a head draft better if its hidden states are sometimes missing or noisy in "
    "training?",
    expects="Dropout of hidden states may help late positions and cost the first one; small "
    "noise changes nothing, large noise hurts.",
    axis="regularization",
    kind="bars",
    reference="none",
    variants={
        "none": with_noise(),
        "dropout 0.05": with_noise(dropout=0.05),
        "dropout 0.15": with_noise(dropout=0.15),
        "noise 0.05": with_noise(noise=0.05),
        "noise 0.2": with_noise(noise=0.2),
        "noise 1": with_noise(noise=1.0),
    },
    paper="EAGLE and speculators add uniform noise to the hidden states (speculators: noise_std "
    "0.05, here noise 0.05); P-EAGLE names none.",
)
