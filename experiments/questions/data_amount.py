"""How much text, and whose, does a head need?

    python -m experiments.run data_amount --seeds 3

The same number of steps on fewer different answers, and on other text: greedy answers, answers at
temperature 1, or the corpus itself. "all answers" are the budget's: greedy ones of `small`, and at
temperature 0.7 of `sampled`. Measured as the budget says, greedily and at temperature 1.
Expects: a quarter of the answers is nearly as good in so few steps. The target's own greedy text
is best for greedy decoding and the corpus worst, for placeholders most of all: what was sampled,
or written by others, cannot be foreseen.
Result: d9dd461, 2026-11-29, 3 seeds, budget sampled: a quarter of the answers -0.02 tokens,
within noise. Greedy answers -0.33, and in greedy decoding +0.48: text of the temperature that the
head will draft at is best. The corpus -0.14. "a sixteenth" and answers at temperature 1 were not
run.
"""

import dataclasses

from experiments.base import Experiment, Measurement, Variant
from experiments.budgets import AnswerOptions

MEASUREMENTS = (Measurement(), Measurement(temperature=0.0), Measurement(temperature=1.0))


def with_text(divisor: int = 1, temperatures: tuple[float, ...] | None = None) -> Variant:
    """The base on 1 / divisor of the answers.

    Args:
      divisor: of the number of answers.
      temperatures: at which the target writes them; none at all for the corpus's own text, None for
        the budget's temperatures.
    """

    def answers(usual: AnswerOptions) -> AnswerOptions:
        return dataclasses.replace(
            usual,
            num_samples=usual.num_samples // divisor,
            temperatures=usual.temperatures if temperatures is None else temperatures,
        )

    return Variant(answers=answers, measurements=MEASUREMENTS)


EXPERIMENT = Experiment(
    name="data_amount",
    question="How much text, and whose, does a head need?",
    expects="A quarter of the answers is nearly as good in so few steps; the target's own "
    "greedy text is best for greedy decoding.",
    axis="text",
    kind="bars",
    reference="all answers",
    variants={
        "all answers": with_text(),
        "a quarter of them": with_text(4),
        "a sixteenth": with_text(16),
        "greedy answers": with_text(1, (0.0,)),
        "half greedy, half at temperature 1": with_text(1, (0.0, 1.0)),
        "answers at temperature 1": with_text(1, (1.0,)),
        "the corpus": with_text(1, ()),
    },
    paper="P-EAGLE's published heads learn from regenerated answers (AWS); speculators' head of "
    "5k ShareGPT samples reaches 1.53.",
)
