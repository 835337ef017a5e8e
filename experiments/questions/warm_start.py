"""Does a parallel head learn faster from an EAGLE-3 head of the same shape?

    python -m experiments.run warm_start --seeds 3

The EAGLE-3 head of as many layers is trained first, for as many steps. The parallel head then
begins with its embedding, layers, fusion and norms. Both together take 2.5 times the base's
arithmetic at K = 7 (train_flops of a row counts its own head alone), `twice the steps` 2 times.
Expects: the first position is better at once, late ones hardly; at equal total arithmetic, to
begin as the target's last layer is better.
Result: d9dd461, 2026-11-29, 3 seeds, budget sampled: to begin as the EAGLE-3 head +0.11 tokens,
twice the steps +0.17, at random -0.04 (within noise); all depths at once -0.13. Late positions gain
nothing of the EAGLE-3 head.
"""

import dataclasses

from experiments.base import Experiment, Variant
from experiments.base_run import as_eagle3_of_equal_layers, with_steps
from peagle_jax.train.config import HeadRun, PeagleRun


def twice_the_steps(base: PeagleRun) -> HeadRun:
    return with_steps(base, 2 * base.optimizer.steps)


def from_random_layers(base: PeagleRun) -> PeagleRun:
    return dataclasses.replace(base, init="random")


def all_depths_at_once(base: PeagleRun) -> PeagleRun:
    return dataclasses.replace(base, depth_schedule=())


EXPERIMENT = Experiment(
    name="warm_start",
    question="Does a parallel head learn faster from an EAGLE-3 head of the same shape?",
    expects="The first position is better at once, late ones hardly.",
    axis="start",
    kind="bars",
    reference="target's last layer",
    variants={
        "target's last layer": Variant(),
        "twice the steps": Variant(run=twice_the_steps),
        "random": Variant(run=from_random_layers),
        "EAGLE-3 head": Variant(init_from="the EAGLE-3 head itself"),
        "the EAGLE-3 head itself": Variant(run=as_eagle3_of_equal_layers, method="eagle3"),
        "all depths at once": Variant(run=all_depths_at_once),
    },
    paper="arXiv:2602.01469 does not report a warm start; its heads begin at random.",
)
