"""Does a bias from the drafts before repair the late positions of a parallel head?

    python -m experiments.run sequential_head --seeds 3 --budget sampled

A Markov head adds a bias of rank 32 to the logits of every draft, which depends on the draft before
it (DSpark, arXiv:2607.05147). `gated` multiplies it by what the hidden state says; the RNN head has
a state besides, and so knows all drafts of the step. All are trained with the head, for as many
steps. EAGLE-3 has as many layers; it reads its drafts, and drafts them one after another. The
second measurement is of greedy decoding.
Expects: late positions gain, because their placeholders do not know the drafts before them; the
first gains nothing. The RNN head gains more than the Markov head from the third position on, where
there is more than one draft to know, and a higher rank gives the second position more.
Result: 43d8a48, 2026-11-29, 3 seeds, budget sampled: 2.33 without, 2.89 and 3.03 with a Markov head
of rank 32 and 128, 2.74 and 3.21 with an RNN head, EAGLE-3 3.44. Before (bded1c3, another training
of the target): 2.38, 2.95 with a Markov head and 2.96 with a gated one.
docs/late_positions_tables.md has more.
"""

import dataclasses

from experiments.base import Experiment, Measurement, Variant
from experiments.base_run import as_eagle3_of_equal_layers
from peagle_jax.train.config import PeagleRun
from peagle_jax.train.recipe_sections import MarkovConfig

RANK, HIGH_RANK = 32, 128
SAMPLED_AND_GREEDY = (Measurement(), Measurement(temperature=0.0))


def with_markov(kind: str, rank: int = RANK) -> Variant:
    def run(base: PeagleRun) -> PeagleRun:
        return dataclasses.replace(base, markov=MarkovConfig(rank=rank, kind=kind))

    return Variant(run=run, measurements=SAMPLED_AND_GREEDY)


EXPERIMENT = Experiment(
    name="sequential_head",
    question="Does a bias from the drafts before repair the late positions of a parallel head?",
    expects="Late positions gain, the first gains nothing; a state gains beside one token.",
    axis="head",
    kind="bars",
    reference="P-EAGLE",
    variants={
        "P-EAGLE": Variant(measurements=SAMPLED_AND_GREEDY),
        "with a Markov head": with_markov("vanilla"),
        "with a gated Markov head": with_markov("gated"),
        "with an RNN head": with_markov("rnn"),
        "with a Markov head of rank 128": with_markov("vanilla", HIGH_RANK),
        "with an RNN head of rank 128": with_markov("rnn", HIGH_RANK),
        "EAGLE-3": Variant(
            run=as_eagle3_of_equal_layers, method="eagle3", measurements=SAMPLED_AND_GREEDY
        ),
    },
    paper="DSpark's heads draft a block in parallel and add a bias of rank 256 from the token "
    "before; a state gained them little (arXiv:2607.05147). Nobody has published it for P-EAGLE.",
)
