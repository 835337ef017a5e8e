"""Must a head be trained on sequences as long as those it drafts for?

    python -m experiments.run context_length --seeds 3

Tokens a step are equal: shorter rows, more of them. Rows are cut for the target too, as a shorter training length cuts them everywhere:
its hidden states then know only the row. Every head drafts behind prompts of 32 tokens (the table) and of 96 (other
measurements), 64 tokens each.
Expects: rows of 32 tokens lose much, since answers run to 96 and 160; rows of 64 lose little.
Result: not run yet.
"""

import dataclasses

from experiments.base import Experiment, Measured, Variant


def length(share: int) -> Variant:
    """Rows of a 1 / share of the budget's length."""

    def run(base):
        data = dataclasses.replace(
            base.data, seq_len=base.data.seq_len // share, batch_size=base.data.batch_size * share
        )
        return dataclasses.replace(base, data=data)

    return Variant(run=run, measured=(Measured(), Measured(prompt_tokens=96)), x=1 / share)


EXPERIMENT = Experiment(
    name="context_length",
    question="Must a head be trained on sequences as long as those it drafts for?",
    expects="A quarter of the length loses much, half of it little.",
    axis="training length, as a share of the answers' length",
    kind="curve",
    reference="whole",
    variants={"quarter": length(4), "half": length(2), "whole": length(1)},
    paper="P-EAGLE trains on up to 20,000 tokens because reasoning outputs have a median of 3,891 tokens (AWS, arXiv:2602.01469).",
)
