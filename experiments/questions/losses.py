"""Which loss should a parallel head learn from?

    python -m experiments.run losses --seeds 3

Every head is measured at the budget's temperature (the table; 0 of `small`, 0.7 of `sampled`), at
temperature 1, and greedily, which is what cross entropy of the argmax is for.
Expects: for greedy decoding, cross entropy of the argmax is best or equal to KL. Total variation
alone learns late positions slowly, since its gradient vanishes where little is accepted. The
hybrids lie between. At temperature 1, KL and the acceptance losses are better.
Result: bded1c3, 2026-11-25, 3 seeds, budget sampled: forward KL 2.38, KL and total variation 2.34,
negative log acceptance 2.26, cross entropy 2.14, total variation 2.02 (temperature 0.7; the
greedy measurement came later, and has not run).
docs/late_positions_tables.md has more.
"""

import dataclasses

from experiments.base import Experiment, Measurement, Variant
from peagle_jax.train.config import PeagleRun
from peagle_jax.train.loss import LOSSES

MEASUREMENTS = (Measurement(), Measurement(temperature=1.0), Measurement(temperature=0.0))


def with_loss(name: str) -> Variant:
    def run(base: PeagleRun) -> PeagleRun:
        return dataclasses.replace(base, loss=name)

    return Variant(run=run, measurements=MEASUREMENTS)


EXPERIMENT = Experiment(
    name="losses",
    question="Which loss should a parallel head learn from?",
    expects="Cross entropy is best for greedy decoding, or equal to KL; total variation alone "
    "learns late positions slowly.",
    axis="loss",
    kind="bars",
    reference="forward_kl",
    variants={name: with_loss(name) for name in LOSSES},
    paper="speculators trains P-EAGLE with forward KL; arXiv:2602.23881 reports gains of a KL "
    "and TV hybrid for sampled decoding.",
)
