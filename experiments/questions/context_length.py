"""Must a head be trained on sequences as long as those it drafts for?

    python -m experiments.run context_length --seeds 3

Tokens per step are equal: shorter rows, but more of them. Rows are cut for the target too, as a
shorter training length cuts them everywhere; its hidden states then know only the row. Every
head drafts the budget's new tokens (64 of `small`, 96 of `sampled`) after prompts of 32 tokens (the
table) and of 96 (the other measurements).
Expects: rows of 32 tokens lose much, since texts run to 96 tokens and more; rows of 64 lose little.
Result: `sampled`, 41c36ce, 2026-11-29, 3 seeds: whole rows 2.33, halves 2.33, quarters 2.13; after
96 tokens 2.31, 2.23 and 1.99 (docs/late_positions_tables.md).
"""

import dataclasses

from experiments.base import Experiment, Measurement, Variant
from peagle_jax.train.config import PeagleRun


def with_rows_shortened(divisor: int) -> Variant:
    """Rows of 1 / divisor of the budget's length, and so many times as many of them."""

    def run(base: PeagleRun) -> PeagleRun:
        data = dataclasses.replace(
            base.data,
            seq_len=base.data.seq_len // divisor,
            batch_size=base.data.batch_size * divisor,
        )
        return dataclasses.replace(base, data=data)

    measurements = (Measurement(), Measurement(prompt_tokens=96))
    return Variant(run=run, measurements=measurements, x=1 / divisor)


EXPERIMENT = Experiment(
    name="context_length",
    question="Must a head be trained on sequences as long as those it drafts for?",
    expects="A quarter of the length loses much, half of it little.",
    axis="training length, as a share of the answers' length",
    kind="curve",
    reference="whole",
    variants={
        "quarter": with_rows_shortened(4),
        "half": with_rows_shortened(2),
        "whole": with_rows_shortened(1),
    },
    paper="P-EAGLE trains on up to 20,000 tokens because reasoning outputs have a median of "
    "3,891 tokens (AWS, arXiv:2602.01469).",
)
