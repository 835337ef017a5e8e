"""Should the head's embedding and lm_head be trained, and cover the whole vocabulary?

    python -m experiments.run embeddings --seeds 3

Expects: a frozen embedding costs little beyond the mask token's row. A trained lm_head gains a
little. A draft vocabulary of the most frequent half loses the drafts of the other half.
Result: cb67f9b, 2026-11-28, 3 seeds, budget sampled: frozen 0.05 tokens less, half of the
vocabulary 0.04, a quarter 0.17; training the output matrix too is within noise.
"""

import dataclasses

from experiments.base import Experiment, Variant
from peagle_jax.train.config import PeagleRun


def with_embedding_frozen(base: PeagleRun) -> PeagleRun:
    return dataclasses.replace(base, train_embedding=False)


def with_lm_head_trained(base: PeagleRun) -> PeagleRun:
    return dataclasses.replace(base, train_lm_head=True)


def with_draft_vocab_reduced(divisor: int) -> Variant:
    """A draft vocabulary of the most frequent 1 / divisor of the target's tokens."""

    def run(base: PeagleRun) -> PeagleRun:
        head = dataclasses.replace(base.head, draft_vocab=base.head.draft_vocab // divisor)
        return dataclasses.replace(base, head=head)

    return Variant(run=run)


EXPERIMENT = Experiment(
    name="embeddings",
    question="Should the head's embedding and lm_head be trained, and cover the whole vocabulary?",
    expects="A frozen embedding costs little; a trained lm_head gains a little; half of the "
    "vocabulary loses the drafts of the other half.",
    axis="embedding and vocabulary",
    kind="bars",
    reference="embedding trained",
    variants={
        "embedding trained": Variant(),
        "embedding frozen": Variant(run=with_embedding_frozen),
        "output trained too": Variant(run=with_lm_head_trained),
        "half of the vocabulary": with_draft_vocab_reduced(2),
        "a quarter of it": with_draft_vocab_reduced(4),
    },
    paper="P-EAGLE trains the embedding (arXiv:2602.01469); EAGLE-3 heads draft from 32,000 of "
    "the target's tokens.",
)
