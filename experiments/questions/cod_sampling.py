"""How many chains, and how deep, should a sequence be trained on?

    python -m experiments.run cod_sampling --seeds 3

COD sampling with ratio r keeps about r**d of the positions at depth d, and never a smaller share
than its minimum; `max_anchors` bounds the chains of a row. Steps are equal, so that fewer
elements mean less arithmetic (train_flops of the rows) as well as less to learn from.
Expects: at equal steps, more elements are better, with diminishing returns; a low ratio costs
late positions first.
Result: cb67f9b, 2026-11-28, 3 seeds, budget sampled: 0.02 tokens between a ratio of 0.5 and all
elements, which are worse; 16 anchors lose 0.06. A low ratio gains at the first position what it
loses at late ones.
"""

import dataclasses

from experiments.base import Experiment, Variant
from peagle_jax.train.config import PeagleRun


def with_cod(**settings: float | int) -> Variant:
    def run(base: PeagleRun) -> PeagleRun:
        return dataclasses.replace(base, cod=dataclasses.replace(base.cod, **settings))

    return Variant(run=run)


EXPERIMENT = Experiment(
    name="cod_sampling",
    question="How many chains, and how deep, should a sequence be trained on?",
    expects="At equal steps more elements are better, with diminishing returns; a low ratio "
    "costs late positions first.",
    axis="COD sampling",
    kind="bars",
    reference="ratio 0.8 min 0.1",
    variants={
        "ratio 0.8 min 0.1": with_cod(),
        "ratio 0.5 min 0.1": with_cod(down_sample_ratio=0.5),
        "ratio 0.5 min 0": with_cod(down_sample_ratio=0.5, down_sample_ratio_min=0.0),
        "ratio 0.8 min 0.5": with_cod(down_sample_ratio_min=0.5),
        "ratio 1": with_cod(down_sample_ratio=1.0),
        "16 anchors": with_cod(max_anchors=16),
        "48 anchors": with_cod(max_anchors=48),
    },
    paper="PARD (arXiv:2504.18583) and P-EAGLE drop elements to save memory; defaults are a "
    "ratio of 0.7 or 0.8 and a minimum of 0.2 (speculators 0.9).",
)
