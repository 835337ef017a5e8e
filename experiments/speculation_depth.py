"""How many tokens should be drafted, and how many depths trained for it?

    python -m experiments.run speculation_depth --seeds 3

`K n` is trained for n depths and drafts n tokens; each head is measured at every K too (the table of other measurements). `trained 5
drafts 8` is the head of K 5, measured deeper than it was trained.
Expects: acceptance length rises with K and levels off; a head trained deeper than it is used loses a little at the first positions; a
head used deeper than trained gains next to nothing behind its last trained depth.
Result: d3c9f7f, 2026-11-21, 3 seeds, K 2 not run: 1.80, 2.45, 2.59, 2.61 for K = 1, 3, 5, 8; the head trained for 5 has 2.63 at 8. More in
experiments/README.md.
"""

from experiments.base import Experiment, Measured, Variant
from experiments.work import with_depths

KS = (1, 2, 3, 5, 8)


def trained(num_depths: int, k: int) -> Variant:
    others = tuple(Measured(k=other) for other in KS if other != k)
    return Variant(
        run=lambda run: with_depths(run, num_depths), measured=(Measured(k=k), *others), x=k
    )


EXPERIMENT = Experiment(
    name="speculation_depth",
    question="How many tokens should be drafted, and how many depths trained for it?",
    expects="Acceptance length rises with K and levels off; used deeper than trained, a head gains next to nothing.",
    axis="tokens drafted a step, K",
    kind="curve",
    reference="K 5",
    variants={**{f"K {k}": trained(k, k) for k in KS}, "trained 5 drafts 8": trained(5, 8)},
    paper="Best K on GPUs: 7 for P-EAGLE, 3 for EAGLE-3 (AWS); its heads are trained for K = 8 and 10.",
)
