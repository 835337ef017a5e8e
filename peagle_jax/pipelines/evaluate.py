"""Acceptance length of a head on held-out prompts: what training calls now and then, and at its end."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from peagle_jax import text
from peagle_jax.bench.suite import repeated_share
from peagle_jax.corpus import Document
from peagle_jax.decode.generate import acceptance_length, check_prompts, generate
from peagle_jax.train.config import HeadRun
from peagle_jax.types import Model

PROMPT_TOKENS = 48  # tokens of an excerpt that the head is measured on


def make_evaluator(
    run: HeadRun, target: Model, tokenizer, held_out: Sequence[Document]
) -> Callable[[Model], dict] | None:
    """A function that decodes the run's evaluation prompts greedily with a head, or None where there is no prompt.

    Raises:
      InputError: a prompt does not fit the target.
    """
    prompts = measured_prompts(run, tokenizer, held_out)
    if not prompts:
        return None
    check_prompts(prompts, target.config, run.eval.max_new_tokens, run.num_depths, None)

    def evaluate(head: Model) -> dict:
        return acceptance(target, head, prompts, run.num_depths, run.eval.max_new_tokens)

    return evaluate


def held_out_prompts(tokenizer, documents, count: int, length: int) -> list[list[int]]:
    """The first tokens after a quarter of `count` long enough documents, spread over the corpus; there code is under way."""
    texts = [d.text for d in documents if d.text is not None and len(d.text) >= 4 * length]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    encoded = [ids for ids in encoded if len(ids) >= 4 * length]
    picks = (
        [encoded[i * len(encoded) // count] for i in range(count)]
        if len(encoded) >= count
        else encoded
    )
    return [list(ids[len(ids) // 4 :][:length]) for ids in picks]


def measured_prompts(run: HeadRun, tokenizer, held_out) -> list[list[int]]:
    if run.eval.prompts is not None:
        return text.read_prompts(Path(run.eval.prompts), tokenizer)[: run.eval.num_prompts]
    answers = [list(d.prompt_ids) for d in held_out if d.prompt_ids]
    return answers[: run.eval.num_prompts] or held_out_prompts(
        tokenizer, held_out, run.eval.num_prompts, PROMPT_TOKENS
    )


def acceptance(target: Model, head: Model, prompts, k: int, new_tokens: int) -> dict:
    """Acceptance length, share of drafts accepted at each position, and how much the text repeats itself; greedy, one batch."""
    answers = generate(target, head, prompts, k=k, max_new_tokens=new_tokens, stop_ids=())
    accepted = np.sum([a.accepted_per_position for a in answers], axis=0) / max(
        sum(a.num_drafts for a in answers), 1
    )
    return {
        "acceptance_length": acceptance_length(answers),
        "accepted_per_position": np.round(accepted, 4).tolist(),
        "repeated_4grams": repeated_share([a.output_token_ids for a in answers]),
    }
