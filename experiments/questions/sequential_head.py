"""Does a bias from the token before repair the late positions of a parallel head?

    python -m experiments.run sequential_head --seeds 3 --budget sampled

`Markov head` adds a bias of rank 32 to the logits of every draft, which depends on the draft before
it (DSpark, arXiv:2607.05147). `gated` multiplies it by what the hidden state says. Both are
trained with the head, for as many steps. The second measurement is of greedy decoding.
Expects: late positions gain, because their placeholders do not know the drafts before them; the
first gains nothing.
Result: bded1c3, 2026-11-25, 3 seeds, budget sampled: 2.38 without, 2.95 with, 2.96 gated. The first
position loses a point, the second gains 12. docs/late_positions.md has more.
"""

import dataclasses

from experiments.base import Experiment, Measurement, Variant
from peagle_jax.train.config import PeagleRun
from peagle_jax.train.recipe_sections import MarkovConfig

RANK = 32
SAMPLED_AND_GREEDY = (Measurement(), Measurement(temperature=0.0))


def with_markov(*, gated: bool) -> Variant:
    def run(base: PeagleRun) -> PeagleRun:
        return dataclasses.replace(base, markov=MarkovConfig(rank=RANK, gated=gated))

    return Variant(run=run, measurements=SAMPLED_AND_GREEDY)


EXPERIMENT = Experiment(
    name="sequential_head",
    question="Does a bias from the token before repair the late positions of a parallel head?",
    expects="Late positions gain, the first gains nothing.",
    axis="head",
    kind="bars",
    reference="P-EAGLE",
    variants={
        "P-EAGLE": Variant(measurements=SAMPLED_AND_GREEDY),
        "with a Markov head": with_markov(gated=False),
        "with a gated Markov head": with_markov(gated=True),
    },
    paper="DSpark's heads draft a block in parallel and add a bias of rank 256 from the token "
    "before (arXiv:2607.05147). Nobody has published it for P-EAGLE.",
)
