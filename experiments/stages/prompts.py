"""The prompts stage: what every head is measured on."""

import json
from collections.abc import Sequence
from pathlib import Path

from experiments import texts
from experiments.budgets import Budget
from experiments.stages.cache import Log, Stage
from experiments.stages.target import target_stage
from experiments.stages.text import text_stage
from peagle_jax import json_files, text
from peagle_jax.atomic_write import write_atomically
from peagle_jax.types import InputError


def prompts_stage(budget: Budget, num_tokens: int) -> Stage:
    """prompts.jsonl: rows of kind, module and prompt_token_ids, `budget.num_prompts` of every kind.

    Each is an excerpt of a held-out document that begins a quarter into it. One module of the
    library may give several documents, of one kind or of several.

    Args:
      num_tokens: length of every prompt.
    """

    def make(folder: Path, parents: Sequence[Path], log: Log) -> None:
        tokenizer = text.load_tokenizer(parents[1] / "model")
        rows = [row for _, row in json_files.read_jsonl(parents[0] / "held_out.jsonl")]
        prompts = []
        for kind in texts.KINDS:
            documents = [row for row in rows if row["kind"] == kind]
            texts_of_kind = [document["text"] for document in documents]
            encoded = tokenizer(texts_of_kind, add_special_tokens=False)["input_ids"]
            long_enough = [
                (texts.module_of(document["name"]), ids)
                for document, ids in zip(documents, encoded, strict=True)
                if len(ids) > num_tokens
            ]
            if len(long_enough) < budget.num_prompts:
                raise InputError(
                    folder,
                    rule=f"{budget.num_prompts} held-out texts of more than {num_tokens} tokens "
                    f"are needed of kind {kind}",
                    got=len(long_enough),
                    next_step="use a Python with more of its library, or shorter prompts",
                )
            for i in range(budget.num_prompts):
                module, ids = long_enough[i * len(long_enough) // budget.num_prompts]
                start = min(len(ids) // 4, len(ids) - num_tokens)
                excerpt = ids[start : start + num_tokens]
                prompts.append({"kind": kind, "module": module, "prompt_token_ids": excerpt})
        lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
        write_atomically(folder / "prompts.jsonl", lines)

    config = {"num_tokens": num_tokens, "num_prompts": budget.num_prompts}
    parents = (text_stage(budget), target_stage(budget))
    return Stage("prompts", config, (__name__,), parents, 10_000_000, make)
