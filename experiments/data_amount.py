"""How much text, and whose, does a head need?

    python -m experiments.run data_amount --seeds 3

The same number of steps on fewer different answers; and on other text: sampled answers, or the corpus itself.
Expects: a quarter of the answers is nearly as good in so few steps; the target's own greedy text is best for greedy decoding, the corpus
worst, placeholders most of all: what was drawn, or written by others, cannot be foreseen.
Result: not run yet.
"""

import dataclasses

from experiments.base import Experiment, Measured, Variant


def text(share: int = 1, temperatures: tuple[float, ...] | None = None) -> Variant:
    def answers(usual):
        kept = usual.temperatures if temperatures is None else temperatures
        return dataclasses.replace(usual, count=usual.count // share, temperatures=kept)

    return Variant(answers=answers, measured=(Measured(), Measured(temperature=1.0)))


EXPERIMENT = Experiment(
    name="data_amount",
    question="How much text, and whose, does a head need?",
    expects="A quarter of the answers is nearly as good in so few steps; the target's own greedy text is best for greedy decoding.",
    axis="text",
    kind="bars",
    reference="greedy answers",
    variants={
        "greedy answers": text(),
        "a quarter of them": text(4),
        "a sixteenth": text(16),
        "half greedy half sampled": text(1, (0.0, 1.0)),
        "sampled answers": text(1, (1.0,)),
        "the corpus": text(1, ()),
    },
    paper="P-EAGLE's published heads learn from regenerated answers (AWS); speculators' head of 5k ShareGPT samples reaches 1.53.",
)
