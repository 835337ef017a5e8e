"""What should stand in the place of the token that a placeholder does not have?

    python -m experiments.run token_designs --seeds 3

Five designs of the token side (peagle_jax/draft/placeholders.py); the hidden side is the
paper's.
Expects: hardly any difference between vectors that are the same for all placeholders, learned or
not, since `mask_hidden` beside them is learned. Repeating the last real token may help, because
a placeholder then knows it without attention.
Result: d3c9f7f, 2026-11-21, four designs, 3 seeds: all are within noise of the paper's 2.59,
from 2.56 (last_token) to 2.62 (frozen). experiments/README.md has more.
Budget sampled, 09a8f11, 2026-11-28, five designs, 3 seeds: 2.31 (last_token) to 2.33.
docs/late_positions_tables.md has more.
"""

from experiments.base import Experiment, Variant
from experiments.base_run import with_placeholder
from peagle_jax.draft.placeholders import TOKEN_DESIGNS

EXPERIMENT = Experiment(
    name="token_designs",
    question="What should stand in the place of the token that a placeholder does not have?",
    expects="Constant vectors, learned or not, are equal within noise; repeating the last real "
    "token may help.",
    axis="token side of the placeholder",
    kind="bars",
    reference="mask",
    variants={name: Variant(run=with_placeholder(token=name)) for name in TOKEN_DESIGNS},
    paper="P-EAGLE learns the mask token's embedding, and trains the whole embedding for it "
    "(arXiv:2602.01469).",
)
