"""How does acceptance fall with the temperature of decoding?

    python -m experiments.run sampling --seeds 3

The base, measured at temperatures 0, 0.5 and 1. It learned from the budget's answers: greedy ones
of `small`, and at temperature 0.7 of `sampled`. Drafts are argmaxes, as vLLM's are by default,
and then sampled with the target's temperature.
Expects: acceptance falls with temperature, late positions most: they cannot know which tokens
were sampled before them.
Result: d3c9f7f, 2026-11-21, 3 seeds: 2.59 greedy, 1.84 at temperature 0.5, 1.44 at 1; with
sampled drafts 2.08 and 1.89. experiments/README.md has more.
Budget sampled, 09a8f11, 2026-11-28, 3 seeds: 2.31 greedy, 2.09 and 1.63 with argmax drafts at
temperatures 0.5 and 1, 2.39 and 2.25 with sampled ones. docs/late_positions_tables.md has more.
"""

from experiments.base import Experiment, Measurement, Variant


def at_temperature(temperature: float) -> Variant:
    measurements = [Measurement(temperature=temperature, sample_drafts=False)]
    if temperature:
        measurements.append(Measurement(temperature=temperature, sample_drafts=True))
    return Variant(measurements=tuple(measurements), x=temperature)


EXPERIMENT = Experiment(
    name="sampling",
    question="How does acceptance fall with the temperature of decoding?",
    expects="Acceptance falls with temperature, late positions most.",
    axis="temperature of decoding",
    kind="curve",
    reference="0",
    variants={"0": at_temperature(0.0), "0.5": at_temperature(0.5), "1": at_temperature(1.0)},
    paper="The published acceptance lengths are of greedy decoding or do not say.",
)
