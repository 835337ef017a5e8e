"""How much worse does a parallel head draft than an EAGLE-3 head of equal size or equal training?

    python -m experiments.run against_eagle3 --seeds 3

`EAGLE-3` has one layer and as many steps. `EAGLE-3 of equal parameters` has as many layers as
the parallel head. `EAGLE-3 of equal FLOPs` has one layer, and steps until its training took the
parallel head's arithmetic (train_flops of the rows).
Expects: EAGLE-3 drafts later positions better, since it sees the tokens that it drafted; the
first position is equal at equal layers.
Result: 7149b82, 2026-11-25, 3 seeds, budget sampled: P-EAGLE 2.38, EAGLE-3 3.15, 3.53 of equal
parameters, 3.11 of equal FLOPs. docs/late_positions.md has more.
"""

from experiments.arithmetic import training_flops
from experiments.base import Experiment, Measurement, Variant
from experiments.base_run import as_eagle3, with_steps
from peagle_jax.train.config import Eagle3Run, HeadRun, PeagleRun

GREEDY_AND_SAMPLED = (Measurement(), Measurement(temperature=1.0))


def of_equal_parameters(base: PeagleRun) -> Eagle3Run:
    return as_eagle3(base, layers=base.head.layers)


def of_equal_flops(base: PeagleRun) -> HeadRun:
    eagle3 = as_eagle3(base)
    ratio = training_flops(base) / training_flops(eagle3)
    return with_steps(eagle3, round(base.optimizer.steps * ratio))


EXPERIMENT = Experiment(
    name="against_eagle3",
    question="How much worse does a parallel head draft than an EAGLE-3 head of equal size or "
    "equal training?",
    expects="EAGLE-3 drafts later positions better; the first position is equal at equal layers.",
    axis="head",
    kind="bars",
    reference="P-EAGLE",
    variants={
        "P-EAGLE": Variant(measurements=GREEDY_AND_SAMPLED),
        "EAGLE-3": Variant(run=as_eagle3, method="eagle3", measurements=GREEDY_AND_SAMPLED),
        "EAGLE-3 of equal parameters": Variant(
            run=of_equal_parameters, method="eagle3", measurements=GREEDY_AND_SAMPLED
        ),
        "EAGLE-3 of equal FLOPs": Variant(
            run=of_equal_flops, method="eagle3", measurements=GREEDY_AND_SAMPLED
        ),
    },
    paper="Acceptance per position on HumanEval at K = 8: P-EAGLE 63 38 23 14 9 5 3 2 %, "
    "EAGLE-3 71 49 32 21 14 9 5 3 % (vLLM #32628).",
)
