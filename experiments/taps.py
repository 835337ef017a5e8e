"""Which hidden states of the target should a head read, and how normalised?

    python -m experiments.run taps --seeds 3

Expects: the last layer's input is worth most; three taps beat one; norms before the fusion change little in a small target.
Result: not run yet.
"""

import dataclasses

from experiments.base import Experiment, Variant


def head(**changes) -> Variant:
    return Variant(
        run=lambda run: dataclasses.replace(run, head=dataclasses.replace(run.head, **changes))
    )


def only(*places: int) -> Variant:
    """Some of the base's taps."""

    def pick(aux_hidden_state_layers):
        return tuple(aux_hidden_state_layers[i] for i in places)

    return Variant(
        run=lambda run: dataclasses.replace(
            run,
            head=dataclasses.replace(
                run.head, aux_hidden_state_layers=pick(run.head.aux_hidden_state_layers)
            ),
        )
    )


EXPERIMENT = Experiment(
    name="taps",
    question="Which hidden states of the target should a head read, and how normalised?",
    expects="The last tap is worth most; three beat one; norms change little.",
    axis="taps and norms",
    kind="bars",
    reference="low + high + last",
    variants={
        "low + high + last": Variant(),
        "last": only(2),
        "low": only(0),
        "low + last": only(0, 2),
        "high + last": only(1, 2),
        "a norm per tap": head(fc_norm=True),
        "a norm before fc": head(norm_before_fc=True),
        "norm before residual": head(norm_before_residual=True),
    },
    paper="EAGLE-3 reads a low, a middle and a high layer (arXiv:2503.01840); EAGLE-3.1 adds a norm per tap.",
)
