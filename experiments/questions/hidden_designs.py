"""What should stand in the place of the hidden state that a placeholder does not have?

    python -m experiments.run hidden_designs --seeds 3

Ten designs of the hidden side, everything else equal. peagle_jax/draft/placeholders.py says what
each is.
Expects: designs that tell depths apart (per_depth, shared_depth, low_rank) gain little over one
shared vector, since position ids and attention tell them apart too. Designs that repeat the last
real hidden state (last_feature, gated) gain more, if anything. zero and frozen_random lose
little, since the layers behind can learn what the vector does not say.
Result: d3c9f7f, 2026-11-21, six designs, 3 seeds: all are within noise of the paper's 2.59, from
2.54 (last_feature, better at the first position and worse at the fourth and fifth) to 2.61
(gated). experiments/README.md has more. 9462505, 2026-11-28, budget sampled, five designs, 3 seeds:
2.33 to 2.35, all within noise (docs/late_positions_tables.md).
"""

from experiments.base import Experiment, Variant
from experiments.base_run import with_placeholder
from peagle_jax.draft.placeholders import HIDDEN_DESIGNS

EXPERIMENT = Experiment(
    name="hidden_designs",
    question="What should stand in the place of the hidden state that a placeholder does not have?",
    expects="Telling depths apart gains little; repeating the last real hidden state gains "
    "more, if anything; constants that are not learned lose little.",
    axis="hidden side of the placeholder",
    kind="bars",
    reference="shared",
    variants={name: Variant(run=with_placeholder(hidden=name)) for name in HIDDEN_DESIGNS},
    paper="One learnable vector, shared by all depths, is what P-EAGLE proposes and what vLLM "
    "serves (arXiv:2602.01469).",
)
