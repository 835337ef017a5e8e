"""Should the head's embedding and output matrix be trained, and need the output cover the whole vocabulary?

    python -m experiments.run embeddings --seeds 3

Expects: a frozen embedding costs little beyond the mask token's row; a trained output gains a little; a vocabulary of the most frequent
half loses what the other half is drafted for.
Result: not run yet.
"""

import dataclasses

from experiments.base import Experiment, Variant


def reduced(share: int) -> Variant:
    def smaller(head):
        return dataclasses.replace(head, draft_vocab=head.draft_vocab // share)

    return Variant(run=lambda run: dataclasses.replace(run, head=smaller(run.head)))


EXPERIMENT = Experiment(
    name="embeddings",
    question="Should the head's embedding and output matrix be trained, and need the output cover the whole vocabulary?",
    expects="A frozen embedding costs little; a trained output gains a little; half of the vocabulary loses what the rest is drafted for.",
    axis="embedding and vocabulary",
    kind="bars",
    reference="embedding trained",
    variants={
        "embedding trained": Variant(),
        "embedding frozen": Variant(
            run=lambda run: dataclasses.replace(run, train_embedding=False)
        ),
        "output trained too": Variant(run=lambda run: dataclasses.replace(run, train_lm_head=True)),
        "half of the vocabulary": reduced(2),
        "a quarter of it": reduced(4),
    },
    paper="P-EAGLE unfreezes the embedding (arXiv:2602.01469); EAGLE-3 heads draft from 32,000 of the target's tokens.",
)
