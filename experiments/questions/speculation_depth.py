"""How many tokens should be drafted, and how many depths trained for it?

    python -m experiments.run speculation_depth --seeds 3

`K n` is trained for n depths and drafts n tokens. Each head is measured at every other K too
(the table of other measurements). `trained 5 drafts 8` is the head of K 5, drafting more tokens
than it was trained for.
Expects: acceptance length rises with K and levels off. A head trained for more depths than it
drafts loses a little at the first positions. A head that drafts more than it was trained for
gains next to nothing behind its last trained depth.
Result: greedy (d3c9f7f, 2026-11-21, 3 seeds) 1.80, 2.45, 2.59 and 2.61 for K = 1, 3, 5 and 8; the
head trained for 5 has 2.63 at 8 (experiments/README.md). At temperature 0.7 (41c36ce, 3 seeds)
1.79, 2.11, 2.24, 2.32 and 2.33 for K = 1, 2, 3, 5 and 8 (docs/late_positions_tables.md).
"""

from experiments.base import Experiment, Measurement, Variant
from experiments.base_run import with_depths
from peagle_jax.train.config import PeagleRun

KS = (1, 2, 3, 5, 8)


def trained_for(num_depths: int, k: int) -> Variant:
    """A head trained for so many depths, measured at K = k first and then at every other K."""

    def run(base: PeagleRun) -> PeagleRun:
        return with_depths(base, num_depths)

    others = tuple(Measurement(k=other) for other in KS if other != k)
    return Variant(run=run, measurements=(Measurement(k=k), *others), x=k)


EXPERIMENT = Experiment(
    name="speculation_depth",
    question="How many tokens should be drafted, and how many depths trained for it?",
    expects="Acceptance length rises with K and levels off; a head that drafts more tokens than "
    "it was trained for gains next to nothing.",
    axis="tokens drafted in a step, K",
    kind="curve",
    reference="K 5",
    variants={
        **{f"K {k}": trained_for(k, k) for k in KS},
        "trained 5 drafts 8": trained_for(5, 8),
    },
    paper="Best K on GPUs: 7 for P-EAGLE, 3 for EAGLE-3 (AWS); its heads are trained for K = 8 "
    "and 10.",
)
