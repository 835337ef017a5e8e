"""Acceptance length of a head on held-out prompts, while it trains and at the end."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from peagle_jax import text
from peagle_jax.bench.suite import repeated_share
from peagle_jax.chat.encoding import (
    conversation_of,
    encode_turns,
    first_tokens,
    has_first_tokens,
)
from peagle_jax.decode.generate import generate
from peagle_jax.decode.memory import LacksMemoryError
from peagle_jax.decode.requests import (
    Generation,
    acceptance_length,
    check_answered,
    check_prompts,
)
from peagle_jax.documents import Document
from peagle_jax.train.config import HeadRun
from peagle_jax.train.train_head import NOT_EVALUATED, Evaluate
from peagle_jax.types import InputError, Model

PROMPT_TOKENS = 48  # of an excerpt that serves as a prompt
TEXTS_AT_ONCE = 64  # held-out texts that are in memory while excerpts are taken from them


def make_evaluator(
    run: HeadRun,
    target: Model,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[Document],
) -> Evaluate | None:
    """Makes the function that decodes the run's prompts greedily with a head.

    Args:
      run: the training run.
      target: its target.
      tokenizer: the target's.
      held_out: documents that are not trained on.

    Returns:
      A function from a head to its acceptance length and more, which is not measured where not even
      one prompt's caches fit the memory, with a warning; None if there are no prompts.

    Raises:
      InputError: a prompt does not fit the target's context.
    """
    k, max_new_tokens = run.num_depths, run.eval.max_new_tokens
    longest = target.config.context - max_new_tokens
    prompts = eval_prompts(run, tokenizer, held_out, longest)
    if not prompts:
        return None
    check_prompts(prompts, target.config, max_new_tokens, k, None)

    def evaluate(head: Model) -> dict:
        try:
            return acceptance(target, head, prompts, k, max_new_tokens, run.eval.ignore_eos)
        except LacksMemoryError as error:
            warnings.warn(f"acceptance is not measured: {error}", UserWarning, stacklevel=2)
            return NOT_EVALUATED

    return evaluate


def eval_prompts(
    run: HeadRun,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[Document],
    longest: int,
) -> list[list[int]]:
    """The run's prompts: of its file, of what is held out, or excerpts of held-out texts.

    Args:
      longest: tokens of a prompt that is taken from what is held out; longer ones are passed over.

    Raises:
      InputError: there are prompts, but all of them are too long.
    """
    count = run.eval.num_prompts
    if run.eval.prompts is not None:
        path, options = Path(run.eval.prompts), run.data.chat_template_kwargs
        return text.read_prompts(path, tokenizer, options)[:count]
    # no more are read and encoded than are needed
    found, shortest = [], None
    documents = _one_of_each(held_out, count)
    for prompt in filter(None, (_prompt_of(document, tokenizer) for document in documents)):
        shortest = min(len(prompt), shortest or len(prompt))
        if len(prompt) <= longest and len(found) < count:
            found.append(prompt)
        if len(found) == count:
            break
    if found:
        return found
    if shortest is not None:
        rule = f"some held-out prompt must fit beside {run.eval.max_new_tokens} new tokens"
        next_step = "lower eval.max_new_tokens, or set eval.prompts to a file of prompts"
        raise InputError("eval", rule, f"{shortest} tokens in the shortest", next_step)
    return held_out_prompts(tokenizer, held_out, count, PROMPT_TOKENS)


def _one_of_each(documents: Iterable[Document], count: int) -> Iterator[Document]:
    """The documents, of whose conversations in parts the first parts come before `count` others."""
    seen: set[str] = set()
    others: list[Document] = []
    for document in documents:
        if document.only_last and document.from_name in seen:
            others += [document] if len(others) < count else []
            continue
        if document.only_last:
            seen.add(document.from_name)
        yield document
    yield from others


def _prompt_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The tokens that a held-out answer, conversation or completion answers; None of a text."""
    if document.prompt_ids:
        return list(document.prompt_ids)
    if question := _question(document):
        return encode_turns(tokenizer, conversation_of(document, question), document.name)
    if document.prompt and document.completion:
        has_first = has_first_tokens(tokenizer, document)
        return text.encode_prompt(document.prompt, tokenizer, document.name, not has_first)
    return None


def _question(document: Document) -> tuple[Mapping, ...]:
    """What is said in a conversation before the assistant answers for the first time.

    Of a conversation of which only the last answer is trained: before that.
    """
    messages = document.messages
    if document.only_last:
        return messages[:-1]
    roles = [message["role"] for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    return messages[:end] if "user" in roles[:end] else ()


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], count: int, length: int
) -> list[list[int]]:
    """Excerpts of documents that serve as prompts.

    Each begins a quarter into its document, where a source file is past its imports.

    Args:
      tokenizer: the target's.
      documents: of which those of at least 4 * length tokens are used, evenly spread.
      count: prompts at most.
      length: tokens of a prompt.
    """
    first = first_tokens(tokenizer)
    texts = (d.text for d in documents if d.text is not None and len(d.text) >= 4 * length)
    excerpts: list[np.ndarray] = []
    while some := list(itertools.islice(texts, TEXTS_AT_ONCE)):
        for ids in tokenizer(some, add_special_tokens=False)["input_ids"]:
            if len(ids) >= 4 * length:
                ids = [*first, *ids[len(ids) // 4 :][: length - len(first)]]
                excerpts.append(np.array(ids, np.int32))
    if len(excerpts) > count:
        excerpts = [excerpts[i * len(excerpts) // count] for i in range(count)]
    return [ids.tolist() for ids in excerpts]


def acceptance(
    target: Model,
    head: Model,
    prompts: list[list[int]],
    k: int,
    max_new_tokens: int,
    ignore_eos: bool = False,
) -> dict:
    """Decodes greedily, as many prompts together as the memory has room for, and counts drafts.

    Args:
      target: the target.
      head: the draft head.
      prompts: token ids.
      k: tokens drafted in one step.
      max_new_tokens: limit of every answer.
      ignore_eos: decode on through end-of-sequence tokens.

    Returns:
      acceptance_length, None where nothing was drafted; accepted_per_position: the share of drafts
      accepted at each position; and repeated_4grams: how much the text repeats itself.

    Raises:
      InputError: the target computed NaN, or not even one prompt's caches fit the memory.
    """
    answers = _decode(target, head, prompts, k, max_new_tokens, ignore_eos)
    check_answered(answers, "eval")
    num_drafts = max(sum(answer.num_drafts for answer in answers), 1)
    accepted = np.sum([answer.num_accepted_per_pos for answer in answers], axis=0) / num_drafts
    return {
        "acceptance_length": acceptance_length(answers),
        "accepted_per_position": np.round(accepted, 4).tolist(),
        "repeated_4grams": repeated_share([answer.output_token_ids for answer in answers]),
    }


def _decode(
    target: Model,
    head: Model,
    prompts: list[list[int]],
    k: int,
    max_new_tokens: int,
    ignore_eos: bool,
) -> list[Generation]:
    """The answers to prompts. They do not depend on how many are decoded together."""
    options: dict[str, Any] = {"k": k, "max_new_tokens": max_new_tokens}
    at_a_time = len(prompts)
    while True:
        try:
            return generate(
                target,
                head,
                prompts,
                stop_ids=() if ignore_eos else None,
                max_batch=at_a_time,
                **options,
            )
        except LacksMemoryError as error:
            if at_a_time == 1:
                next_step = "use shorter prompts, or lower eval.max_new_tokens in the next run"
                raise LacksMemoryError("eval", error.rule, error.got, next_step) from None
            at_a_time = -(-at_a_time // 2)
