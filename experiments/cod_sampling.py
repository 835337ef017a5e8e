"""How many chains, and how deep, should a sequence be trained on?

    python -m experiments.run cod_sampling --seeds 3

COD's ratio r keeps about r**d of the positions at depth d, never less than the floor; `anchors` bounds the chains of a row. Steps are
equal, so that fewer elements mean less arithmetic (the rows' train_flops) as well as less to learn from.
Expects: at equal steps, more elements are better, with diminishing returns; a low ratio costs late positions first.
Result: not run yet.
"""

import dataclasses

from experiments.base import Experiment, Variant


def cod(**changes) -> Variant:
    return Variant(
        run=lambda run: dataclasses.replace(run, cod=dataclasses.replace(run.cod, **changes))
    )


EXPERIMENT = Experiment(
    name="cod_sampling",
    question="How many chains, and how deep, should a sequence be trained on?",
    expects="At equal steps more elements are better, with diminishing returns; a low ratio costs late positions first.",
    axis="COD sampling",
    kind="bars",
    reference="r 0.8 floor 0.1",
    variants={
        "r 0.8 floor 0.1": cod(),
        "r 0.5 floor 0.1": cod(down_sample_ratio=0.5),
        "r 0.5 floor 0": cod(down_sample_ratio=0.5, down_sample_ratio_min=0.0),
        "r 0.8 floor 0.5": cod(down_sample_ratio_min=0.5),
        "r 1": cod(down_sample_ratio=1.0),
        "16 anchors": cod(max_anchors=16),
        "48 anchors": cod(max_anchors=48),
    },
    paper="PARD (arXiv:2504.18583) and P-EAGLE drop elements to save memory; defaults r = 0.7 or 0.8, floor 0.2 (speculators 0.9).",
)
