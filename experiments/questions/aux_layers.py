"""Which hidden states of the target should a head read, and how normalized?

    python -m experiments.run aux_layers --seeds 3

Expects: the last layer's input is worth most; three aux hidden states beat one; norms before the
fusion change little with a small target.
Result: e8fd383, 2026-11-26, 3 seeds, budget sampled, four of the eight variants: a norm per aux
layer gains 0.04 tokens, the last one alone loses nothing. docs/late_positions_tables.md has more.
"""

import dataclasses

from experiments.base import Experiment, Variant
from peagle_jax.train.config import PeagleRun


def with_head(**settings: bool) -> Variant:
    def run(base: PeagleRun) -> PeagleRun:
        return dataclasses.replace(base, head=dataclasses.replace(base.head, **settings))

    return Variant(run=run)


def with_some_layers(*places: int) -> Variant:
    """A head that reads only some of the base's aux hidden states."""

    def run(base: PeagleRun) -> PeagleRun:
        layers = tuple(base.head.aux_hidden_state_layers[place] for place in places)
        head = dataclasses.replace(base.head, aux_hidden_state_layers=layers)
        return dataclasses.replace(base, head=head)

    return Variant(run=run)


EXPERIMENT = Experiment(
    name="aux_layers",
    question="Which hidden states of the target should a head read, and how normalized?",
    expects="The last aux hidden state is worth most; three beat one; norms change little.",
    axis="aux hidden states and norms",
    kind="bars",
    reference="low + high + last",
    variants={
        "low + high + last": Variant(),
        "last": with_some_layers(2),
        "low": with_some_layers(0),
        "low + last": with_some_layers(0, 2),
        "high + last": with_some_layers(1, 2),
        "a norm per aux layer": with_head(fc_norm=True),
        "a norm before fc": with_head(norm_before_fc=True),
        "norm before residual": with_head(norm_before_residual=True),
    },
    paper="EAGLE-3 reads a low, a middle and a high layer (arXiv:2503.01840); EAGLE-3.1 adds a "
    "norm for each.",
)
