"""Questions of benchmarks as prompts, with the target's own answers between the turns."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle_jax.bench.served_model import ServedModel, ServerRequest
from peagle_jax.bench.sets import Question
from peagle_jax.chat.encoding import encode_turns
from peagle_jax.chat.pieces import Conversation
from peagle_jax.chat.written_messages import CHANNEL, message_of
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.decode.requests import Generation, Request, check_answered
from peagle_jax.types import InputError, Model

Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """One turn of a question: everything that was said before it, and the turn.

    Attributes:
      content: the prompt's token ids; messages for a server that encodes them itself.
      category: of the question.
      turn: 0 for the first.
      name: of the question, for errors.
    """

    content: list[Any]
    category: str
    turn: int
    name: str


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

    def encode_to_fit(messages: Messages, where: str) -> list[int]:
        token_ids = _encode(tokenizer, messages, where)
        _check_length(target, token_ids, max_new_tokens, where)
        return token_ids

    def write(prompts: Sequence[BenchPrompt]) -> list[tuple[dict[str, Any], bool]]:
        requests = [Request(prompt=p.content, max_new_tokens=max_new_tokens) for p in prompts]
        answers = dict(make_engine(target, max_batch=batch_size).run(requests))
        check_answered([answers[i] for i in range(len(prompts))], "bench")
        return [_written(tokenizer, answers[i]) for i in range(len(prompts))]

    return _ask_turns(questions, encode_to_fit, write)


def ask_server(
    model: ServedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    questions: Sequence[Question],
    max_new_tokens: int,
) -> BenchPrompts:
    """`ask` where a server has the target, which writes what stands between turns.

    Args:
      tokenizer: the target's, to send token ids; None to send messages, which the server encodes.

    Raises:
      InputError: there is no chat template, or the server refuses or does not answer.
    """

    def encode(messages: Messages, where: str) -> list[Any]:
        return list(messages) if tokenizer is None else _encode(tokenizer, messages, where)

    def write(prompts: Sequence[BenchPrompt]) -> list[tuple[dict[str, Any], bool]]:
        requests = [ServerRequest(p.content, max_new_tokens, name=p.name) for p in prompts]
        answers = model.run(requests)
        return [({"role": "assistant", "content": a.text}, a.is_cut) for a in answers]

    return _ask_turns(questions, encode, write)


def _ask_turns(
    questions: Sequence[Question],
    encode: Callable[[Messages, str], list[Any]],
    write: Callable[[Sequence[BenchPrompt]], list[tuple[dict[str, Any], bool]]],
) -> BenchPrompts:
    """The prompts of questions.

    Args:
      encode: what was said, and the question's name, as a prompt.
      write: prompts -> the assistant's messages, and whether each was cut by its limit.
    """
    said: list[Messages] = [[] for _ in questions]
    prompts: list[BenchPrompt] = []
    num_cut = 0
    last_turn = max(len(question.turns) for question in questions) - 1
    for turn in range(last_turn + 1):
        asked = [i for i, question in enumerate(questions) if turn < len(question.turns)]
        of_turn = []
        for i in asked:
            name = questions[i].name
            said[i].append({"role": "user", "content": questions[i].turns[turn]})
            content = encode(said[i], name)
            of_turn.append(BenchPrompt(content, questions[i].category, turn, name))
        prompts += of_turn
        goes_on = [
            (i, prompt)
            for i, prompt in zip(asked, of_turn, strict=True)
            if turn + 1 < len(questions[i].turns)
        ]
        answers = write([prompt for _, prompt in goes_on]) if goes_on else []
        for (i, _), (message, is_cut) in zip(goes_on, answers, strict=True):
            num_cut += is_cut
            said[i].append(message)
    return BenchPrompts(prompts, num_cut)


def _written(tokenizer: PreTrainedTokenizerBase, answer: Generation) -> tuple[dict[str, Any], bool]:
    """The message of an answer, without special tokens but for channels; and whether it was cut.

    An answer that was cut before it said anything to the user is empty.
    """
    is_cut = answer.finish_reason == "length"
    ids = answer.output_token_ids
    spelled = str(tokenizer.decode(ids if is_cut else ids[:-1]))
    if CHANNEL.search(spelled) is None:
        spelled = str(tokenizer.decode(ids, skip_special_tokens=True))
    return message_of(spelled) or {"role": "assistant", "content": ""}, is_cut


def _encode(tokenizer: PreTrainedTokenizerBase, messages: Messages, where: str) -> list[int]:
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
