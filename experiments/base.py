"""What an experiment is: one question, a base run, and variants that change a few of its values."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from experiments.budgets import AnswerOptions, Budget
from peagle_jax.train.config import HeadRun, PeagleRun

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement of the trained head on all prompts. None stands for the budget's value.

    Attributes:
      k: tokens drafted in one step.
      temperature: 0 decodes greedily.
      sample_drafts: with a temperature, drafts are sampled too. Otherwise they are argmaxes, which
        is vLLM's default.
      on_text: nothing is decoded with the head; its expected acceptance is computed along what the
        target writes without it (text_acceptance.py).
      drafts_known: each placeholder reads the draft before it, which no decoding in one forward can
        give it: a bound. Measured on text.
      prompt_tokens: length of each prompt.
      max_new_tokens: tokens written after each prompt.
    """

    k: int | None = None
    temperature: float | None = None
    sample_drafts: bool | None = None
    on_text: bool | None = None
    drafts_known: bool = False
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None

    def with_defaults(self, budget: Budget) -> "Measurement":
        """The same measurement without None."""
        return dataclasses.replace(
            self,
            k=_or_default(self.k, budget.k),
            temperature=_or_default(self.temperature, budget.temperature),
            sample_drafts=_or_default(self.sample_drafts, budget.sample_drafts),
            on_text=_or_default(self.on_text, budget.on_text),
            prompt_tokens=_or_default(self.prompt_tokens, budget.answers.prompt_tokens),
            max_new_tokens=_or_default(self.max_new_tokens, budget.max_new_tokens),
        )


def _or_default(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def same_run(base: PeagleRun) -> HeadRun:
    """The `run` of variants that train the base itself."""
    return base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One answer to an experiment's question: how a head is trained, and how it is measured.

    Attributes:
      run: makes the variant's training run from the base run, usually by `dataclasses.replace`.
      measurements: every decoding of the trained head. Tables and comparisons read the first one.
      x: place on the axis of a curve.
      method: how the head drafts.
      answers: changes the text that the head learns from; None keeps the budget's.
      init_from: the variant of the same experiment whose trained head this one starts from.
    """

    run: Callable[[PeagleRun], HeadRun] = same_run
    measurements: tuple[Measurement, ...] = (Measurement(),)
    x: float | None = None
    method: Literal["peagle", "eagle3", "eagle"] = "peagle"
    answers: Callable[[AnswerOptions], AnswerOptions] | None = None
    init_from: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One question with the variants that answer it.

    Attributes:
      name: name of its file in experiments/questions/ and of its rows' file.
      question: one sentence that ends in a question mark.
      expects: what was expected, written before the experiment ran.
      axis: what the variants differ in, with its unit: the head of a table's first column, and the
        x label of a curve.
      kind: how it is drawn.
      reference: the variant that all others are compared with.
      variants: by name.
      paper: what the paper or its peers say about the question, with the source.
    """

    name: str
    question: str
    expects: str
    axis: str
    kind: Literal["bars", "curve"]
    reference: str
    variants: Mapping[str, Variant]
    paper: str

    def __post_init__(self) -> None:
        if self.reference not in self.variants:
            names = ", ".join(self.variants)
            raise ValueError(f"{self.name}: the reference {self.reference} must be one of {names}")
        if self.kind == "curve" and any(v.x is None for v in self.variants.values()):
            raise ValueError(f"{self.name}: every variant of a curve needs x")
        for name, variant in self.variants.items():
            start = self.variants.get(variant.init_from or name)
            if start is None or (variant.init_from and start.init_from):
                rule = "a head starts from a variant of its experiment that starts from none"
                raise ValueError(f"{self.name}, {name}: {rule}; got {variant.init_from}")
