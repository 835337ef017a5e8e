"""How many layers does a parallel head need?

    python -m experiments.run head_layers --seeds 3

Expects: the first position gains little from layers, late positions much: a placeholder has to do in one pass what EAGLE-3 does in as many
passes as there are depths.
Result: d3c9f7f, 2026-11-21, 3 seeds: 2.40, 2.59, 2.75 with 1, 2, 4 layers; the first position is equal (68 68 67 %), the fifth not
(5, 10, 14 %). More in experiments/README.md.
"""

import dataclasses

from experiments.base import Experiment, Variant


def layers(count: int) -> Variant:
    return Variant(
        run=lambda run: dataclasses.replace(run, head=dataclasses.replace(run.head, layers=count)),
        x=count,
    )


EXPERIMENT = Experiment(
    name="head_layers",
    question="How many layers does a parallel head need?",
    expects="The first position gains little from layers, late positions much.",
    axis="layers of the head",
    kind="curve",
    reference="2",
    variants={str(n): layers(n) for n in (1, 2, 4)},
    paper="P-EAGLE's heads have 4 layers, EAGLE-3's one (arXiv:2602.01469).",
)
