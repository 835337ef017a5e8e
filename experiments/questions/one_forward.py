"""How far do layers and a Markov head carry a head that drafts in one forward, and what is left?

    python -m experiments.run one_forward --seeds 3 --budget sampled

`drafts known` is no way to draft: its placeholders read the text's tokens in training and in
measuring, and so know all drafts before them, as the heads of EAGLE-3 do. It has the base's layers
and one forward. What it lacks of EAGLE-3 is the hidden state of the draft before; what it has
beyond P-EAGLE is what the tokens say, through all layers. A Markov head adds a part of that to the
logits alone. `EAGLE-3` has the base's layers, and so as many parameters.
Expects: knowing the drafts gives most of EAGLE-3's lead. Layers and the Markov head add up, because
layers help to foresee tokens, and the Markov head tells which were drawn. Together they reach an
EAGLE-3 head of the base's layers, and not one of their own.
Result: 9462505, 2026-11-28, 3 seeds, budget sampled: 2.33; 2.89 with a Markov head, 2.44 with twice
the layers, 2.99 with both; 3.69 with the drafts known; EAGLE-3 3.44, with twice the layers 3.63.
docs/late_positions_tables.md has more.
"""

import dataclasses

from experiments.base import Experiment, Measurement, Variant
from experiments.base_run import as_eagle3_of_equal_layers, with_placeholder
from peagle_jax.train.config import Eagle3Run, PeagleRun
from peagle_jax.train.recipe_sections import MarkovConfig

RANK = 32  # as in sequential_head


def with_markov(base: PeagleRun) -> PeagleRun:
    return dataclasses.replace(base, markov=MarkovConfig(rank=RANK))


def with_layers(base: PeagleRun) -> PeagleRun:
    head = dataclasses.replace(base.head, layers=2 * base.head.layers)
    return dataclasses.replace(base, head=head)


def with_both(base: PeagleRun) -> PeagleRun:
    return with_layers(with_markov(base))


def eagle3_of_more_layers(base: PeagleRun) -> Eagle3Run:
    return as_eagle3_of_equal_layers(with_layers(base))


EXPERIMENT = Experiment(
    name="one_forward",
    question="How far do layers and a Markov head carry a head that drafts in one forward, and "
    "what is left?",
    expects="Both add up, and reach an EAGLE-3 head of the base's layers; knowing the drafts gives "
    "most of EAGLE-3's lead.",
    axis="head",
    kind="bars",
    reference="P-EAGLE",
    variants={
        "P-EAGLE": Variant(),
        "with a Markov head": Variant(run=with_markov),
        "twice the layers": Variant(run=with_layers),
        "twice the layers and a Markov head": Variant(run=with_both),
        "drafts known (a bound)": Variant(
            run=with_placeholder(true_tokens=1.0),
            measurements=(Measurement(on_text=True, drafts_known=True),),
        ),
        "EAGLE-3": Variant(run=as_eagle3_of_equal_layers, method="eagle3"),
        "EAGLE-3, twice the layers": Variant(run=eagle3_of_more_layers, method="eagle3"),
    },
    paper="P-EAGLE's heads have 4 layers and EAGLE-3's one; DSpark adds a Markov head to a "
    "parallel drafter (arXiv:2602.01469, arXiv:2607.05147).",
)
