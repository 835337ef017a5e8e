"""Answers to many prompts, in batches, as the rows that `peagle generate --out` writes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from peagle_jax.decode.generate import Generation, generate
from peagle_jax.progress import ProgressReport
from peagle_jax.types import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How `generate_rows` decodes. Defaults are those of `peagle generate` and of `generate`."""

    k: int | None = None  # tokens drafted per step; None: what the head was trained for, at most 7
    method: str | None = None  # "peagle", "eagle3"; None: what the head was made for
    max_new_tokens: int = 128  # of each answer
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: no such filter
    top_p: float = 1.0  # 1: no such filter
    seed: int = 0  # prompt i samples with seed + i, whatever its batch
    sample_drafts: bool = True  # at a temperature above 0: sample the drafts too
    ignore_eos: bool = False  # decode past the target's end-of-sequence tokens
    batch_size: int = 8  # prompts decoded together
    prefill_chunk: int | None = None  # prompt tokens in one forward; None: all of them
    sliding_cache: bool = False  # ring caches for layers with a sliding window


def generate_rows(
    target: Model,
    head: Model | None,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
) -> list[dict]:
    """Decodes every prompt, `options.batch_size` at a time.

    Args:
      target: from `load_target`.
      head: the draft head, or None for plain decoding.
      tokenizer: the target's. With None the rows have token ids and no text.
      prompts: token ids, at least one per prompt.

    Returns:
      One row per prompt, in order. Its counters are named as vLLM names them.

    Raises:
      InputError: see `generate`.
    """
    rows = []
    with ProgressReport("generate", len(prompts), unit="prompts") as progress:
        for start in range(0, len(prompts), options.batch_size):
            batch = prompts[start : start + options.batch_size]
            answers = generate(
                target,
                head,
                batch,
                k=options.k,
                method=options.method,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=[options.seed + start + i for i in range(len(batch))],
                sample_drafts=options.sample_drafts,
                stop_ids=() if options.ignore_eos else None,
                prefill_chunk=options.prefill_chunk,
                sliding_cache=options.sliding_cache,
            )
            rows += [_row(answer, tokenizer) for answer in answers]
            progress.update(len(rows))
    return rows


def _row(answer: Generation, tokenizer: Any) -> dict:
    """The line of JSON for one answer."""
    row: dict[str, Any] = {
        "prompt_token_ids": answer.prompt_token_ids,
        "output_token_ids": answer.output_token_ids,
    }
    if tokenizer is not None:
        row["text"] = tokenizer.decode(answer.output_token_ids, skip_special_tokens=True)
    return row | {
        "finish_reason": answer.finish_reason,
        "num_drafts": answer.num_drafts,
        "num_draft_tokens": answer.num_draft_tokens,
        "num_accepted_tokens": answer.num_accepted_tokens,
        "num_accepted_per_pos": answer.num_accepted_per_pos,
        "acceptance_length": answer.acceptance_length,
    }
