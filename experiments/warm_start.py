"""Does a parallel head learn faster from an EAGLE-3 head of the same shape?

    python -m experiments.run warm_start --seeds 3

The EAGLE-3 head of as many layers is trained first, for as many steps; its embedding, layers, fusion and norms are then the parallel
head's. `twice the steps` is the base with about as much arithmetic as both together (train_flops of a row counts its own head alone).
Expects: the first position is better at once, late ones hardly; at equal total arithmetic, starting from the target is better.
Result: not run yet.
"""

import dataclasses

from experiments.base import Experiment, Variant
from experiments.work import as_eagle3, growth


def twice(run):
    steps = 2 * run.optimizer.steps
    return dataclasses.replace(
        run,
        optimizer=dataclasses.replace(run.optimizer, steps=steps),
        depth_schedule=growth(steps, run.cod.num_depths),
    )


EXPERIMENT = Experiment(
    name="warm_start",
    question="Does a parallel head learn faster from an EAGLE-3 head of the same shape?",
    expects="The first position is better at once, late ones hardly.",
    axis="start",
    kind="bars",
    reference="target's last layer",
    variants={
        "target's last layer": Variant(),
        "twice the steps": Variant(run=twice),
        "random": Variant(run=lambda run: dataclasses.replace(run, start="random")),
        "EAGLE-3 head": Variant(init_from="the EAGLE-3 head itself"),
        "the EAGLE-3 head itself": Variant(
            run=lambda run: as_eagle3(run, layers=run.head.layers), method="eagle3"
        ),
        "all depths at once": Variant(run=lambda run: dataclasses.replace(run, depth_schedule=())),
    },
    paper="arXiv:2602.01469 does not report a warm start; its heads begin at random.",
)
