"""Do more layers and a state that reads the drafts reach an EAGLE-3 head of as many layers?

    python -m experiments.run layers_and_state --seeds 3 --budget sampled

An RNN head of rank 128 behind two layers is the farthest that a head of one forward has come, and
the EAGLE-3 head of as many parameters has four layers (one_forward and sequential_head). Here the
RNN head stands behind two layers and behind four, beside EAGLE-3 heads of both depths.
Expects: layers add to the state what they add to a Markov head, 0.1 tokens, as they foresee tokens
and the state tells which were drawn; an EAGLE-3 head of two layers is not quite reached.
Result: 077838c, 2026-11-30, 3 seeds, budget sampled: 2.36; 3.25 with an RNN head, 3.33 with four
layers and an RNN head; EAGLE-3 3.47, with four layers 3.70. docs/late_positions_tables.md has more.
"""

import dataclasses

from experiments.base import Experiment, Variant
from experiments.base_run import as_eagle3_of_equal_layers
from experiments.questions.one_forward import eagle3_of_more_layers, with_layers
from peagle_jax.train.config import PeagleRun
from peagle_jax.train.recipe_sections import MarkovConfig

RANK = 128


def with_state(base: PeagleRun) -> PeagleRun:
    return dataclasses.replace(base, markov=MarkovConfig(rank=RANK, kind="rnn"))


def with_layers_and_state(base: PeagleRun) -> PeagleRun:
    return with_layers(with_state(base))


EXPERIMENT = Experiment(
    name="layers_and_state",
    question="Do more layers and a state that reads the drafts reach an EAGLE-3 head of as many "
    "layers?",
    expects="Layers and the state add up; EAGLE-3 of two layers is not quite reached.",
    axis="head",
    kind="bars",
    reference="P-EAGLE",
    variants={
        "P-EAGLE": Variant(),
        "with an RNN head": Variant(run=with_state),
        "twice the layers and an RNN head": Variant(run=with_layers_and_state),
        "EAGLE-3": Variant(run=as_eagle3_of_equal_layers, method="eagle3"),
        "EAGLE-3, twice the layers": Variant(run=eagle3_of_more_layers, method="eagle3"),
    },
    paper="P-EAGLE's heads have 4 layers and EAGLE-3's one (arXiv:2602.01469); DSpark's RNN head "
    "gained little over its Markov head (arXiv:2607.05147).",
)
