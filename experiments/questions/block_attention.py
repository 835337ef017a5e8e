"""What should a placeholder attend to?

    python -m experiments.run block_attention --seeds 3 --budget sampled

A placeholder attends to the committed tokens, and in the paper to the placeholders before it.
`bidirectional` shows it all placeholders of its step, as DFlash's blocks do; `committed` shows it
none. vLLM serves the first only. In training a chain ends where COD sampling ended it, so that a
bidirectional placeholder often sees fewer others than when decoding.
Expects: bidirectional gains nothing, since placeholders know nothing of the tokens that will stand
there. Committed loses little at late positions, if anything: what placeholders tell each other are
guesses, which every one of them can make for itself.
Result: 4722e37, 2026-11-26, 3 seeds, budget sampled: 2.38 causal, 2.38 bidirectional, 2.36
committed, which is worse with every seed. docs/late_positions_tables.md has more.
"""

from experiments.base import Experiment, Variant
from experiments.base_run import with_placeholder
from peagle_jax.draft.placeholder_attention import ATTENTION_DESIGNS

EXPERIMENT = Experiment(
    name="block_attention",
    question="What should a placeholder attend to?",
    expects="Seeing all placeholders of a step gains nothing; seeing none loses little.",
    axis="placeholders attend to",
    kind="bars",
    reference="causal",
    variants={name: Variant(run=with_placeholder(attention=name)) for name in ATTENTION_DESIGNS},
    paper="P-EAGLE's placeholders attend to those before them (arXiv:2602.01469). DFlash's blocks "
    "are bidirectional, JetSpec's causal (arXiv:2606.18394).",
)
