"""Answers to many prompts as the rows that `peagle generate --out` writes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from peagle_jax.checkpoints.pair import check_fit
from peagle_jax.decode.base_engine import BaseEngine
from peagle_jax.decode.engine import PREFILL_CHUNK
from peagle_jax.decode.generate import check_num_answers, make_drafter
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.decode.requests import Generation, Request, check_request, failed_answer, seed_of
from peagle_jax.progress import ProgressReport
from peagle_jax.targets.config import TargetConfig
from peagle_jax.types import InputError, Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How `generate_rows` decodes. Defaults are those of `peagle generate` and of `generate`."""

    # tokens drafted per step; None: what the head was trained for, at most 7; "auto": what pays
    k: int | Literal["auto"] | None = None
    method: str | None = None  # "peagle", "eagle3"; None: what the head was made for
    num_tree_nodes: int | None = None  # drafts of a tree; None: a chain of K
    n: int = 1  # answers to each prompt
    max_new_tokens: int = 128  # of each answer
    min_tokens: int = 0  # of each answer, before which nothing ends it
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: no such filter
    top_p: float = 1.0  # 1: no such filter
    min_p: float = 0.0  # 0: no such filter
    repetition_penalty: float = 1.0  # 1: none; likewise the next two with 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None  # token id -> what is added to its logit
    logprobs: bool = False  # rows have the log-probabilities of their tokens
    seed: int = 0  # answer i, over all prompts, samples with seed + i, whatever its batch
    sample_drafts: bool = True  # at a temperature above 0: sample the drafts too
    ignore_eos: bool = False  # decode past the target's end-of-sequence tokens
    # tokens that end an answer; None: the target's end-of-sequence tokens
    stop_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()  # an answer ends where its text has one of these
    batch_size: int = 8  # prompts decoded together; others wait until one is done
    prefill_chunk: int | None = PREFILL_CHUNK  # of a prompt, in one forward; None: all tokens
    sliding_cache: bool = False  # ring caches for layers with a sliding window
    num_threads: int | None = None  # that decode parts of a batch; None: what pays
    donate_models: bool = False  # as of `make_engine`: nobody uses them afterwards


def generate_rows(
    target: Model,
    head: Model | None,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    on_text: Callable[[str], None] | None = None,
    names: Sequence[str] | None = None,
) -> list[dict]:
    """Decodes every prompt, up to `options.batch_size` at a time.

    Args:
      target: from `load_target`.
      head: the draft head, or None for plain decoding.
      tokenizer: the target's. With None the rows have token ids and no text.
      prompts: token ids, at least one per prompt.
      on_text: is given the text of the answers as it is written, one after the other, each with a
        new line at its end; needs a tokenizer. None: there is a report of progress instead.
      names: where each prompt comes from, for errors; None: "prompt 0" and so on.

    Returns:
      `options.n` rows per prompt, in order, with an `index` where there are several. Their counters
      are named as vLLM names them. A row whose `finish_reason` is "error" says in `error` why; the
      other prompts are answered.

    Raises:
      InputError: see `generate`; of prompts, where none can be answered.
    """
    check_num_answers("-n", options.n, options.temperature)
    drafter = None
    if head is not None:
        check_fit(target, head)
        drafter = make_drafter(head, options.k, options.method)
    k = drafter.k if drafter else 0
    if names is None:
        names = [f"prompt {i}" for i in range(len(prompts))]
    requests = [
        Request(
            prompt=prompt,
            max_new_tokens=options.max_new_tokens,
            min_tokens=options.min_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=options.logit_bias,
            logprobs=options.logprobs,
            seed=seed_of(options.seed, i),
            stop_ids=() if options.ignore_eos else options.stop_ids,
            stop=options.stop,
            stream=on_text is not None,
            name=name,
        )
        for i, (name, prompt) in enumerate(_repeated(names, prompts, options.n))
    ]
    _check_requests(requests, target.config, k)
    engine = make_engine(
        target,
        drafter,
        head.params if head else None,
        num_tree_nodes=options.num_tree_nodes,
        adaptive_k=options.k == "auto",
        max_batch=1 if on_text is not None else min(options.batch_size, len(prompts)),
        num_threads=options.num_threads,
        donate_models=options.donate_models,
        prefill_chunk=options.prefill_chunk,
        sliding_cache=options.sliding_cache,
        sample_drafts=options.sample_drafts,
        tokenizer=tokenizer,
    )
    if on_text is not None:
        answers = [_streamed(engine, request, on_text) for request in requests]
        return [_row(answer, i % options.n, options.n) for i, answer in enumerate(answers)]
    rows = {}
    with ProgressReport("generate", len(requests), unit="answers") as progress:
        for place, answer in engine.run(requests):
            rows[place] = _row(answer, place % options.n, options.n)
            progress.update(len(rows))
    return [rows[place] for place in range(len(requests))]


def _repeated(
    names: Sequence[str], prompts: Sequence[Sequence[int]], n: int
) -> Iterator[tuple[str, Sequence[int]]]:
    """Every name and prompt `n` times."""
    for name, prompt in zip(names, prompts, strict=True):
        for _ in range(n):
            yield name, prompt


def _check_requests(requests: Sequence[Request], config: TargetConfig, k: int) -> None:
    """Raises InputError where no request can be served, as with an option that all have."""
    if not requests:
        raise InputError("prompts", "at least one prompt is needed", "none", "give a prompt")
    errors = []
    for request in requests:
        try:
            check_request(request.name or "prompt", request, config, k, None)
        except InputError as error:
            errors.append(error)
    if len(errors) == len(requests):
        raise errors[0]


def _streamed(engine: BaseEngine, request: Request, on_text: Callable[[str], None]) -> Generation:
    """One answer, whose text is handed on as it is written."""
    try:
        engine.add(request)
    except InputError as error:
        return failed_answer(request, str(error))
    while True:
        for output in engine.step():
            if output.answer is not None:
                on_text(output.new_text + "\n")
                return output.answer
            if output.new_text:
                on_text(output.new_text)


def _row(answer: Generation, index: int, n: int) -> dict:
    """The line of JSON for one of a prompt's `n` answers."""
    row: dict[str, Any] = {"prompt_token_ids": answer.prompt_token_ids}
    if n > 1:
        row["index"] = index
    row["output_token_ids"] = answer.output_token_ids
    if answer.text is not None:
        row["text"] = answer.text
    if answer.logprobs is not None:
        row["logprobs"] = answer.logprobs
    row |= {
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_drafts": answer.num_drafts,
        "num_draft_tokens": answer.num_draft_tokens,
        "num_accepted_tokens": answer.num_accepted_tokens,
        "num_accepted_per_pos": answer.num_accepted_per_pos,
        "acceptance_length": answer.acceptance_length,
    }
    return row if answer.error is None else row | {"error": answer.error}
