"""Do placeholders learn better if some of them read the text's own tokens in training?

    python -m experiments.run true_tokens --seeds 3 --budget sampled

A share of the anchors has placeholders that read the tokens which stand there in the text, as if
they had been drafted already (teacher forcing within the block, as JetSpec trains its drafter). All
others read the mask token, as all do when decoding.
Expects: a loss that grows with the share: placeholders with tokens learn what is not asked of them
when decoding, and those without see fewer examples.
Result: 4722e37, 2026-11-26, 3 seeds, budget sampled: 2.38, 2.37 with a quarter and 2.35 with a
half; the first position gains, later ones lose more. docs/late_positions_tables.md has more.
"""

from experiments.base import Experiment, Variant
from experiments.base_run import with_placeholder

SHARES = (0.0, 0.25, 0.5)

EXPERIMENT = Experiment(
    name="true_tokens",
    question="Do placeholders learn better if some of them read the text's own tokens in training?",
    expects="Acceptance falls as the share grows.",
    axis="share of anchors whose placeholders read the text",
    kind="bars",
    reference="0",
    variants={f"{share:g}": Variant(run=with_placeholder(true_tokens=share)) for share in SHARES},
    paper="JetSpec trains a drafter whose nodes see their ancestors' tokens (arXiv:2606.18394), "
    "which one forward of P-EAGLE cannot have.",
)
