"""What an experiment is: one question, a base run, and variants that are the base with a few values replaced."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from experiments.budgets import Answers, Budget
from peagle_jax.train.config import HeadRun, PeagleRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One greedy or sampled decoding of all prompts with the trained head. None takes the budget's."""

    k: int | None = None
    temperature: float = 0.0
    sample_drafts: bool = (
        False  # with a temperature: sample the drafts too; False: argmax drafts, vLLM's default
    )
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    def filled(self, budget: Budget) -> "Measured":
        def pick(mine, usual):
            return usual if mine is None else mine

        return dataclasses.replace(
            self,
            k=pick(self.k, budget.k),
            prompt_tokens=pick(self.prompt_tokens, budget.answers.prompt_tokens),
            new_tokens=pick(self.new_tokens, budget.new_tokens),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One run of an experiment: how it is trained, and every decoding that it is measured by."""

    run: Callable[[PeagleRun], HeadRun] = lambda run: run  # of the base; a `dataclasses.replace`
    measured: tuple[Measured, ...] = (
        Measured(),
    )  # the first one is what tables and comparisons read
    x: float | None = None  # place on the axis of a curve
    method: Literal["peagle", "eagle3"] = "peagle"
    answers: Callable[[Answers], Answers] | None = None  # another text to learn from
    init_from: str | None = None  # the variant whose head this one starts from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    question: str  # one sentence that ends in a question mark
    expects: str  # written before it ran
    axis: (
        str  # what the variants differ in, with its unit: a table's first column, a curve's x label
    )
    kind: Literal["bars", "curve"]
    reference: str  # the variant that all others are compared with
    variants: Mapping[str, Variant]
    paper: (
        str  # what the paper or its peers say about it, with the source; "" where they say nothing
    )

    def __post_init__(self):
        if self.reference not in self.variants:
            raise ValueError(
                f"{self.name}: the reference {self.reference} must be one of {', '.join(self.variants)}"
            )
        if self.kind == "curve" and any(v.x is None for v in self.variants.values()):
            raise ValueError(f"{self.name}: every variant of a curve needs x")
