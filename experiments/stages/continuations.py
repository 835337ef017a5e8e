"""The continuations stage: what the target writes after each prompt, for measurements on text."""

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.budgets import Budget
from experiments.stages.cache import Log, Stage
from experiments.stages.prompts import prompts_stage
from experiments.stages.target import target_stage
from peagle_jax import json_files
from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.decode.generate import generate


def continuations_stage(
    budget: Budget, num_tokens: int, max_new_tokens: int, temperature: float
) -> Stage:
    """continuations.jsonl: the rows of the prompts stage, with output_token_ids.

    Args:
      num_tokens: length of every prompt.
      max_new_tokens: what the target writes after each; it does not stop before.
      temperature: 0 for greedy text.
    """

    def make(folder: Path, parents: Sequence[Path], log: Log) -> None:
        target = load_target(parents[0] / "model", aux_hidden_state_layers=())
        prompts = [row for _, row in json_files.read_jsonl(parents[1] / "prompts.jsonl")]
        answers = generate(
            target,
            None,
            [prompt["prompt_token_ids"] for prompt in prompts],
            max_new_tokens=max_new_tokens,
            stop_ids=(),
            temperature=temperature,
            seed=list(range(len(prompts))),
        )
        rows = [
            {**prompt, "output_token_ids": list(answer.output_token_ids)}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        write_atomically(
            folder / "continuations.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
        )

    config = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    parents = (target_stage(budget), prompts_stage(budget, num_tokens))
    return Stage("continuations", config, (__name__,), parents, 10_000_000, make)
