"""How much worse does a parallel head draft than an EAGLE-3 head, at equal parameters and at equal training arithmetic?

    python -m experiments.run against_eagle3 --seeds 3

`EAGLE-3` has one layer and as many steps; `of equal parameters` as many layers as the parallel head; `of equal FLOPs` one layer, and steps
until its training took the parallel head's arithmetic (train_flops of the rows).
Expects: EAGLE-3 drafts later positions better, since it sees the tokens it drafted; the first position is equal at equal layers.
Result: not run yet.
"""

import dataclasses

from experiments.arithmetic import training_flops
from experiments.base import Experiment, Measured, Variant
from experiments.work import as_eagle3, growth

BOTH = (Measured(), Measured(temperature=1.0))


def equal_flops(run):
    made = as_eagle3(run)
    steps = round(
        run.optimizer.steps * training_flops(run) / training_flops(made)
    )  # depths grow at the same shares of the steps
    return dataclasses.replace(
        made,
        optimizer=dataclasses.replace(made.optimizer, steps=steps),
        depth_schedule=growth(steps, made.ttt.steps),
    )


EXPERIMENT = Experiment(
    name="against_eagle3",
    question="How much worse does a parallel head draft than an EAGLE-3 head, at equal parameters and at equal training arithmetic?",
    expects="EAGLE-3 drafts later positions better; the first position is equal at equal layers.",
    axis="head",
    kind="bars",
    reference="P-EAGLE",
    variants={
        "P-EAGLE": Variant(measured=BOTH),
        "EAGLE-3": Variant(run=as_eagle3, method="eagle3", measured=BOTH),
        "EAGLE-3 of equal parameters": Variant(
            run=lambda run: as_eagle3(run, layers=run.head.layers), method="eagle3", measured=BOTH
        ),
        "EAGLE-3 of equal FLOPs": Variant(run=equal_flops, method="eagle3", measured=BOTH),
    },
    paper="Acceptance per position on HumanEval at K = 8: P-EAGLE 63 38 23 14 9 5 3 2 %, EAGLE-3 71 49 32 21 14 9 5 3 % (vLLM #32628).",
)
