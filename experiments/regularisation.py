"""Does a head draft better if the features it learns from are sometimes missing, or noisy?

    python -m experiments.run regularisation --seeds 3

Expects: dropout of real features into the placeholder trains the placeholder on many more rows, and may help deep positions at the
cost of the first; small noise changes nothing; large noise hurts.
Result: not run yet.
"""

import dataclasses

from experiments.base import Experiment, Variant


def blur(**changes) -> Variant:
    return Variant(run=lambda run: dataclasses.replace(run, blur=dataclasses.replace(run.blur, **changes)))


EXPERIMENT = Experiment(
    name="regularisation",
    question="Does a head draft better if the features it learns from are sometimes missing, or noisy?",
    expects="Dropout of features may help deep positions and cost the first one; small noise changes nothing, large noise hurts.",
    axis="regularisation",
    kind="bars",
    reference="none",
    variants={
        "none": blur(), "dropout 0.05": blur(feature_dropout=0.05), "dropout 0.15": blur(feature_dropout=0.15),
        "noise 0.05": blur(feature_noise=0.05), "noise 0.2": blur(feature_noise=0.2), "noise 1": blur(feature_noise=1.0),
    },
    paper="EAGLE and speculators add uniform noise to the features (speculators: noise_std 0.05, here noise 0.05); P-EAGLE names none.",
)  # fmt: skip
