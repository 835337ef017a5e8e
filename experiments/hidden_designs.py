"""What should stand in the place of the features that a placeholder does not have?

    python -m experiments.run hidden_designs --seeds 3

Ten designs of the hidden side (peagle_jax/draft/placeholders.py says what each is), everything else equal.
Expects: designs that tell depths apart (per_depth, shared_depth, low_rank) gain little over one shared vector, since position ids and
attention tell them apart too; designs that hand on the last real feature (last_feature, gated) gain more, if anything; zero and
frozen_random lose little, since layers behind can learn what the vector does not say.
Result: d3c9f7f, 2026-11-21, six designs, 3 seeds: all within noise of the paper's 2.59, from 2.54 (last_feature: better at the first
position, worse at the fourth and fifth) to 2.61 (gated). More in experiments/README.md.
"""

import dataclasses

from experiments.base import Experiment, Variant
from peagle_jax.draft.placeholders import HIDDEN_DESIGNS


def design(name: str) -> Variant:
    return Variant(
        run=lambda run: dataclasses.replace(
            run, placeholder=dataclasses.replace(run.placeholder, hidden=name)
        )
    )


EXPERIMENT = Experiment(
    name="hidden_designs",
    question="What should stand in the place of the features that a placeholder does not have?",
    expects="Telling depths apart gains little; handing on the last real feature gains more, if anything; constants that are not learned "
    "lose little.",
    axis="hidden side of the placeholder",
    kind="bars",
    reference="shared",
    variants={name: design(name) for name in HIDDEN_DESIGNS},
    paper="One learnable vector, shared by all depths, is what P-EAGLE proposes and what vLLM serves (arXiv:2602.01469).",
)
