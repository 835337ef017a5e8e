"""Answers to many prompts, in batches, as the rows that `peagle generate --out` writes."""

from collections.abc import Sequence

from peagle_jax.decode.generate import Generation, generate
from peagle_jax.types import Model


def answer_prompts(
    target: Model, head: Model | None, tokenizer, prompts: Sequence[Sequence[int]], how
) -> list[dict]:
    """One row a prompt, in order.

    Args:
      how: the options of `peagle generate`: k, method, max_new_tokens, temperature, top_k, top_p, seed, greedy_drafts,
        ignore_eos, batch_size, prefill_chunk, sliding_cache. Prompt i samples with seed + i, whatever its batch.
    """
    rows = []
    for start in range(0, len(prompts), how.batch_size):
        batch = prompts[start : start + how.batch_size]
        answers = generate(
            target,
            head,
            batch,
            k=how.k,
            method=how.method,
            max_new_tokens=how.max_new_tokens,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            seed=[how.seed + start + i for i in range(len(batch))],
            sample_drafts=not how.greedy_drafts,
            stop_ids=() if how.ignore_eos else None,
            prefill_chunk=how.prefill_chunk,
            sliding_cache=how.sliding_cache,
        )
        rows += [_row(answer, tokenizer) for answer in answers]
    return rows


def _row(answer: Generation, tokenizer) -> dict:
    text = (
        {"text": tokenizer.decode(answer.output_token_ids, skip_special_tokens=True)}
        if tokenizer
        else {}
    )
    return {
        "prompt_token_ids": answer.prompt_token_ids,
        "output_token_ids": answer.output_token_ids,
        **text,
        "finish_reason": answer.finish_reason,
        "num_drafts": answer.num_drafts,
        "num_draft_tokens": answer.num_draft_tokens,
        "num_accepted_tokens": answer.num_accepted_tokens,
        "accepted_per_position": answer.accepted_per_position,
        "acceptance_length": answer.acceptance_length,
    }
