"""The answers stage: what heads learn from, text that the target wrote itself."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from experiments.budgets import AnswerOptions, Budget
from experiments.stages.cache import Log, Stage
from experiments.stages.target import target_stage
from experiments.stages.text import text_stage
from peagle_jax import corpus, text
from peagle_jax.atomic_write import write_atomically
from peagle_jax.pipelines.regenerate import RegenerationOptions, excerpts_of, regenerate


def answers_stage(budget: Budget, answers: AnswerOptions) -> Stage:
    """answers.jsonl: rows of prompt_token_ids and output_token_ids."""

    def make(folder: Path, parents: Sequence[Path], log: Log) -> None:
        source, target = parents[0] / "train.jsonl", parents[1] / "model"
        out = folder / "answers.jsonl"
        options = _options(answers, source)
        if answers.temperatures:
            regenerate(target, options, out, log)
        else:
            _write_continuations(target, options, out)

    num_bytes = 8 * answers.num_samples * (answers.prompt_tokens + answers.max_new_tokens)
    parents = (text_stage(budget), target_stage(budget))
    config = dataclasses.asdict(answers)
    return Stage("answers", config, (__name__,), parents, num_bytes, make)


def _options(answers: AnswerOptions, source: Path) -> RegenerationOptions:
    return RegenerationOptions(
        source=str(source),
        held_out=0.0,
        num_samples=answers.num_samples,
        prompt_tokens=answers.prompt_tokens,
        max_new_tokens=answers.max_new_tokens,
        temperatures=answers.temperatures,
        batch_size=128,
        seed=0,
    )


def _write_continuations(target: Path, options: RegenerationOptions, out: Path) -> None:
    """Excerpts of the corpus, as long as answers: the corpus's own continuations."""
    prompt_tokens = options.prompt_tokens
    whole = dataclasses.replace(
        options,
        prompt_tokens=prompt_tokens + options.max_new_tokens,
        max_new_tokens=1,
        temperatures=(0.0,),
    )
    documents = corpus.read_corpus(options.source)
    excerpts = excerpts_of(text.load_tokenizer(target), documents, whole)
    rows = [
        {"prompt_token_ids": ids[:prompt_tokens], "output_token_ids": ids[prompt_tokens:]}
        for ids in excerpts
    ]
    write_atomically(out, "".join(json.dumps(row) + "\n" for row in rows))
