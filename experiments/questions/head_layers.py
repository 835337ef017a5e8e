"""How many layers does a parallel head need?

    python -m experiments.run head_layers --seeds 3

Expects: the first position gains little from layers, late positions much. A placeholder has to
do in one pass what EAGLE-3 does in as many passes as there are depths.
Result: d3c9f7f, 2026-11-21, 3 seeds: 2.40, 2.59 and 2.75 with 1, 2 and 4 layers. The first
position is equal (68, 68, 67 %), the fifth is not (5, 10, 14 %). experiments/README.md has more.
Budget sampled, 09a8f11, 2026-11-28, 3 seeds: 2.21, 2.33 and 2.44, at all positions alike.
docs/late_positions_tables.md has more.
"""

import dataclasses

from experiments.base import Experiment, Variant
from peagle_jax.train.config import PeagleRun


def with_layers(count: int) -> Variant:
    def run(base: PeagleRun) -> PeagleRun:
        return dataclasses.replace(base, head=dataclasses.replace(base.head, layers=count))

    return Variant(run=run, x=count)


EXPERIMENT = Experiment(
    name="head_layers",
    question="How many layers does a parallel head need?",
    expects="The first position gains little from layers, late positions much.",
    axis="layers of the head",
    kind="curve",
    reference="2",
    variants={str(count): with_layers(count) for count in (1, 2, 4)},
    paper="P-EAGLE's heads have 4 layers, EAGLE-3's one (arXiv:2602.01469).",
)
