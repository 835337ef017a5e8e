"""Which loss should a parallel head learn from?

    python -m experiments.run losses --seeds 3

Every head is measured greedily (the table) and at temperature 1 (other measurements).
Expects: cross entropy of the argmax is best for greedy decoding or equal to KL; total variation alone learns late positions slowly,
since its gradient vanishes where little is accepted; the hybrids lie between; at temperature 1 KL and the acceptance losses are better.
Result: not run yet.
"""

import dataclasses

from experiments.base import Experiment, Measured, Variant
from peagle_jax.train.loss import LOSSES


def loss(name: str) -> Variant:
    return Variant(
        run=lambda run: dataclasses.replace(run, loss=name),
        measured=(Measured(), Measured(temperature=1.0)),
    )


EXPERIMENT = Experiment(
    name="losses",
    question="Which loss should a parallel head learn from?",
    expects="Cross entropy is best for greedy decoding, or equal to KL; total variation alone learns late positions slowly.",
    axis="loss",
    kind="bars",
    reference="forward_kl",
    variants={name: loss(name) for name in LOSSES},
    paper="speculators trains P-EAGLE with forward KL; arXiv:2602.23881 reports gains of a KL + TV hybrid for sampled decoding.",
)
