"""One job: a variant, a seed and a budget. What it trains and measures, and its keys, follow."""

import dataclasses
import hashlib
import json
from pathlib import Path

from experiments.base import Experiment, Measurement, Variant
from experiments.base_run import base_run, readable
from experiments.budgets import BUDGETS, AnswerOptions, Budget
from experiments.code_keys import code_key
from experiments.stages import hidden_states
from experiments.stages.answers import answers_stage
from experiments.stages.cache import Stage
from experiments.stages.continuations import continuations_stage
from experiments.stages.hidden_states import hidden_states_stage
from experiments.stages.prompts import prompts_stage
from experiments.stages.target import target_stage
from peagle_jax.train.config import EagleRun, HeadRun
from peagle_jax.types import InputError

# where the code begins that decides what a head learns, and what is measured of it
TRAINING = ("peagle_jax.pipelines.train_head",)
MEASURING = ("experiments.measure",)
CODE_HAS_CHANGED = 3  # exit code of experiments.work


@dataclasses.dataclass(frozen=True)
class Job:
    experiment: Experiment
    name: str  # of the variant
    seed: int
    budget_name: str

    @property
    def variant(self) -> Variant:
        return self.experiment.variants[self.name]

    @property
    def budget(self) -> Budget:
        return BUDGETS[self.budget_name]

    @property
    def answers(self) -> AnswerOptions:
        """The text that its head learns from."""
        usual = self.budget.answers
        return self.variant.answers(usual) if self.variant.answers else usual

    def plain_run(self) -> HeadRun:
        """Its training run, without folders."""
        return self.variant.run(base_run(self.budget, self.seed))

    def measurements(self) -> list[Measurement]:
        """Without None. Two that are the same with this budget's values are one."""
        complete = (m.with_defaults(self.budget) for m in self.variant.measurements)
        return list(dict.fromkeys(complete))

    def stages(self) -> list[Stage]:
        """What must be made before it runs: its hidden states, then its prompts and texts.

        Last come the hidden states of the head that it starts from.
        """
        lengths = {m.prompt_tokens for m in self.measurements()}
        lengths.add(self.budget.answers.prompt_tokens)
        prompts = [prompts_stage(self.budget, n) for n in sorted(lengths)]
        texts = {text.key: text for m in self.measurements() if (text := self.text_of(m))}
        initial = self.initial_job()
        others = [initial._hidden_states()] if initial else []
        return [self._hidden_states(), *prompts, *texts.values(), *others]

    def check(self) -> None:
        """Raises InputError for what could only fail after hours: in training or measuring."""
        run, where = self.plain_run(), f"{self.experiment.name}, {self.name}"
        if run.task != self.variant.method:
            rule = f"a head that a run of task {run.task} trains drafts by that method"
            raise InputError(where, rule, self.variant.method, f'set method="{run.task}"')
        stored = self._hidden_states().config["aux_hidden_state_layers"]
        if not set(run.aux_hidden_state_layers) <= set(stored):
            rule = f"a head reads those of the target's layers that are stored, {list(stored)}"
            next_step = "choose among them, or add layers to the budget"
            raise InputError(where, rule, list(run.aux_hidden_state_layers), next_step)
        for m in self.measurements():
            assert m.max_new_tokens is not None and m.k is not None
            if m.drafts_known and (not m.on_text or run.task != "peagle"):
                rule, next_step = "drafts are known of parallel heads on text", "set on_text=True"
                raise InputError(where, rule, f"task {run.task}, on_text={m.on_text}", next_step)
            least = m.k + 1 if m.on_text else 2
            if m.max_new_tokens < least:
                rule = f"at least {least} new tokens must be measured"
                raise InputError(where, rule, m.max_new_tokens, "measure longer texts")

    def text_of(self, measurement: Measurement) -> Stage | None:
        """The texts along which a measurement without None is computed; None if it decodes."""
        m = measurement
        if not m.on_text:
            return None
        return continuations_stage(self.budget, m.prompt_tokens, m.max_new_tokens, m.temperature)

    def _hidden_states(self) -> Stage:
        run, budget = self.plain_run(), self.budget
        if isinstance(run, EagleRun):  # reads another hidden state of the target
            layers = run.aux_hidden_state_layers
            budget = dataclasses.replace(budget, aux_hidden_state_layers=layers)
        return hidden_states_stage(budget, self.answers, run.data.seq_len)

    def initial_job(self) -> "Job | None":
        """The job whose trained head this one starts from."""
        if self.variant.init_from is None:
            return None
        return dataclasses.replace(self, name=self.variant.init_from)

    @property
    def head_key(self) -> str:
        """Of the trained head: variants of different experiments that are the same run share it."""
        initial = self.initial_job()
        facts = [
            dataclasses.asdict(self.plain_run()),
            self._hidden_states().key,
            code_key(TRAINING),
            initial and initial.head_key,
        ]
        return _hash(facts)

    @property
    def key(self) -> str:
        """Of the finished row."""
        facts = [
            self.head_key,
            self.budget_name,
            [dataclasses.asdict(m) for m in self.measurements()],
            [stage.key for stage in self.stages()[1:]],
            self.variant.method,
            code_key(MEASURING),
        ]
        return _hash(facts)

    @property
    def origin(self) -> dict[str, str]:
        """What rows must have in common to be compared: code, and the run that variants change."""
        base = [dataclasses.asdict(x) for x in (base_run(self.budget, 0), self.budget.answers)]
        return {
            "training_code": code_key(TRAINING),
            "measuring_code": code_key(MEASURING),
            "base": _hash(base),
        }

    def run(self, cache: Path) -> HeadRun:
        """Its training run, with the folders of a cache."""
        plain, initial = self.plain_run(), self.initial_job()
        answers = answers_stage(self.budget, self.answers).folder(cache) / "answers.jsonl"
        return dataclasses.replace(
            plain,
            target=str(target_stage(self.budget).folder(cache) / "model"),
            hidden_states_dir=str(self._hidden_states().folder(cache) / hidden_states.FOLDER),
            out=str(self.head_folder(cache)),
            data=dataclasses.replace(plain.data, source=str(answers)),
            init_from=str(initial.head_folder(cache)) if initial else None,
        )

    def head_folder(self, cache: Path) -> Path:
        return cache / "heads" / self.head_key

    def changes(self) -> list[str]:
        """What it differs in from the base, in words: of its run, its text and its decoding."""
        pairs = [
            ("", self.plain_run(), base_run(self.budget, self.seed)),
            ("answers.", self.answers, self.budget.answers),
            ("decoding.", self.measurements()[0], Measurement().with_defaults(self.budget)),
        ]
        changes = []
        for prefix, config, usual_config in pairs:
            values = _flat(dataclasses.asdict(config))
            usual = _flat(dataclasses.asdict(usual_config))
            changes += [
                f"{prefix}{key}: {readable(usual.get(key))} -> {readable(values.get(key))}"
                for key in sorted(values.keys() | usual.keys())
                if values.get(key) != usual.get(key)
            ]
        if self.variant.init_from:
            changes.append(f"init_from: {self.variant.init_from}")
        return changes


def _hash(facts: list) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _flat(tree: dict, prefix: str = "") -> dict:
    """Nested dictionaries as one, with keys such as "head.layers"."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
