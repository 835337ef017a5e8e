"""Questions of benchmarks as prompts, with the target's own answers between the turns."""

import dataclasses
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from peagle_jax.bench.sets import Question
from peagle_jax.chat.encoding import encode_turns
from peagle_jax.chat.pieces import Conversation
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.requests import Request
from peagle_jax.types import InputError, Model


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """One turn of a question: everything that was said before it, and the turn.

    Attributes:
      token_ids: of the prompt.
      category: of the question.
      turn: 0 for the first.
    """

    token_ids: list[int]
    category: str
    turn: int


@dataclasses.dataclass(frozen=True)
class BenchPrompts:
    """The turns of questions.

    Attributes:
      prompts: all first turns, then all second ones, and so on.
      num_cut: answers between turns that were cut by their limit. The turns after them are asked
        all the same, as benchmarks do.
    """

    prompts: list[BenchPrompt]
    num_cut: int


def ask(
    target: Model,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    max_new_tokens: int,
    batch_size: int,
) -> BenchPrompts:
    """Makes a prompt of every turn. What stands between turns the target writes, greedily.

    It writes by plain decoding, so that every way of decoding is then measured on the same prompts.

    Args:
      tokenizer: the target's; a set with several turns needs its chat template.
      max_new_tokens: limit of every answer.
      batch_size: questions that are answered together.

    Raises:
      InputError: there is no chat template, or a conversation becomes too long for the target.
    """
    said: list[list[dict[str, str]]] = [[] for _ in questions]
    prompts: list[BenchPrompt] = []
    num_cut = 0
    last_turn = max(len(question.turns) for question in questions) - 1
    for turn in range(last_turn + 1):
        asked = [i for i, question in enumerate(questions) if turn < len(question.turns)]
        of_turn = []
        for i in asked:
            said[i].append({"role": "user", "content": questions[i].turns[turn]})
            token_ids = _encode(tokenizer, said[i], questions[i].name)
            _check_length(target, token_ids, max_new_tokens, questions[i].name)
            of_turn.append(BenchPrompt(token_ids, questions[i].category, turn))
        prompts += of_turn
        goes_on = [
            (i, prompt)
            for i, prompt in zip(asked, of_turn, strict=True)
            if turn + 1 < len(questions[i].turns)
        ]
        requests = [
            Request(prompt=prompt.token_ids, max_new_tokens=max_new_tokens) for _, prompt in goes_on
        ]
        for place, answer in Engine(target, max_batch=batch_size).run(requests):
            number = goes_on[place][0]
            num_cut += answer.finish_reason == "length"
            text = tokenizer.decode(answer.output_token_ids, skip_special_tokens=True)
            said[number].append({"role": "assistant", "content": str(text)})
    return BenchPrompts(prompts, num_cut)


def _encode(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], where: str
) -> list[int]:
    """Through the chat template; without one a single turn is its text."""
    if tokenizer.chat_template or len(messages) > 1:
        return encode_turns(tokenizer, Conversation(tuple(messages)), where)
    return list(tokenizer(messages[0]["content"], add_special_tokens=True)["input_ids"])


def _check_length(target: Model, token_ids: list[int], max_new_tokens: int, where: str) -> None:
    needed = len(token_ids) + max_new_tokens
    if needed > target.config.context:
        rule = f"prompt and answer must fit the target's {target.config.context} tokens"
        next_step = "give --max-new-tokens a lower value, or a set of shorter questions"
        raise InputError(where, rule, f"{len(token_ids)} + {max_new_tokens}", next_step)
