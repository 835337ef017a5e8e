"""Questions of benchmarks as prompts, with the target's own answers between the turns."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from peagle_jax import text
from peagle_jax.bench.served_model import ServedModel, ServerRequest
from peagle_jax.bench.sets import Question
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
      content: the prompt's token ids; a chat for a server that encodes it itself.
      category: of the question.
      turn: 0 for the first.
      name: of the question, for errors.
    """

    content: list[int] | Conversation
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
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> BenchPrompts:
    """Makes a prompt of every turn. What stands between turns the target writes, greedily.

    It writes by plain decoding, so that every way of decoding is then measured on the same prompts.

    Args:
      tokenizer: the target's; a set with several turns needs its chat template.
      max_new_tokens: limit of every answer.
      batch_size: questions that are answered together.
      chat_template_kwargs: options of the chat template.

    Raises:
      InputError: there is no chat template, or a conversation becomes too long for the target.
    """

    def encode_to_fit(chat: Conversation, where: str) -> list[int]:
        token_ids = text.encode_prompt(chat, tokenizer, where)
        _check_length(target, token_ids, max_new_tokens, where)
        return token_ids

    def write(prompts: Sequence[BenchPrompt]) -> list[tuple[dict[str, Any], bool]]:
        requests = [
            Request(prompt=cast(list[int], prompt.content), max_new_tokens=max_new_tokens)
            for prompt in prompts
        ]
        answers = dict(make_engine(target, max_batch=batch_size).run(requests))
        check_answered([answers[i] for i in range(len(prompts))], "bench")
        return [_written(tokenizer, answers[i]) for i in range(len(prompts))]

    return _ask_turns(questions, encode_to_fit, write, chat_template_kwargs)


def ask_server(
    model: ServedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    questions: Sequence[Question],
    max_new_tokens: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> BenchPrompts:
    """`ask` where a server has the target, which writes what stands between turns.

    Args:
      tokenizer: the target's, to send token ids; None to send messages, which the server encodes.

    Raises:
      InputError: there is no chat template, or the server refuses or does not answer.
    """

    def encode(chat: Conversation, where: str) -> list[int] | Conversation:
        return chat if tokenizer is None else text.encode_prompt(chat, tokenizer, where)

    def write(prompts: Sequence[BenchPrompt]) -> list[tuple[dict[str, Any], bool]]:
        requests = [ServerRequest(p.content, max_new_tokens, name=p.name) for p in prompts]
        answers = model.run(requests)
        return [({"role": "assistant", "content": a.text}, a.is_cut) for a in answers]

    return _ask_turns(questions, encode, write, chat_template_kwargs)


def _ask_turns(
    questions: Sequence[Question],
    encode: Callable[[Conversation, str], list[int] | Conversation],
    write: Callable[[Sequence[BenchPrompt]], list[tuple[dict[str, Any], bool]]],
    chat_template_kwargs: Mapping[str, Any] | None,
) -> BenchPrompts:
    """The prompts of questions.

    Args:
      encode: what was said, and the question's name, as a prompt.
      write: prompts -> the assistant's messages, and whether each was cut by its limit.
      chat_template_kwargs: options of the chat template.
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
            chat = Conversation(tuple(said[i]), (), chat_template_kwargs or {})
            content = encode(chat, name)
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


def _check_length(target: Model, token_ids: list[int], max_new_tokens: int, where: str) -> None:
    needed = len(token_ids) + max_new_tokens
    if needed > target.config.context:
        rule = f"prompt and answer must fit the target's {target.config.context} tokens"
        next_step = "give --max-new-tokens a lower value, or a set of shorter questions"
        raise InputError(where, rule, f"{len(token_ids)} + {max_new_tokens}", next_step)
