"""Does a head draft better if the features it learns from are sometimes missing, or noisy?

    python -m experiments.run regularisation --seeds 3

Expects: dropout of real features into the placeholder trains the placeholder on many more rows, and may help deep positions at the
cost of the first; small noise changes nothing; large noise hurts.
Result: not run yet.
"""

import dataclasses

from experiments.base import Experiment, Variant


def feature_noise(**changes) -> Variant:
    return Variant(
        run=lambda run: dataclasses.replace(
            run, feature_noise=dataclasses.replace(run.feature_noise, **changes)
        )
    )


EXPERIMENT = Experiment(
    name="regularisation",
    question="Does a head draft better if the features it learns from are sometimes missing, or noisy?",
    expects="Dropout of features may help deep positions and cost the first one; small noise changes nothing, large noise hurts.",
    axis="regularisation",
    kind="bars",
    reference="none",
    variants={
        "none": feature_noise(),
        "dropout 0.05": feature_noise(dropout=0.05),
        "dropout 0.15": feature_noise(dropout=0.15),
        "noise 0.05": feature_noise(noise=0.05),
        "noise 0.2": feature_noise(noise=0.2),
        "noise 1": feature_noise(noise=1.0),
    },
    paper="EAGLE and speculators add uniform noise to the features (speculators: noise_std 0.05, here noise 0.05); P-EAGLE names none.",
)
