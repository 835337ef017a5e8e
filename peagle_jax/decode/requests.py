"""What decoding is asked for, and what it answers: requests, answers, and checks of the former."""

import dataclasses
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from peagle_jax.decode.sampling import as_float32, check_sampling
from peagle_jax.targets.config import TargetConfig
from peagle_jax.types import InputError

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and how it is to be continued.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: limit of the answer.
      min_tokens: before so many tokens of the answer no stop token is written, and no stop string
        ends it; 0 for none. Stop tokens have probability 0 there.
      temperature: 0, and less than 1e-5, decodes greedily.
      top_k: sample among the k most probable tokens; 0, or vLLM's -1, for all.
      top_p: sample among the most probable tokens whose probability sums to this; 1 for all.
      min_p: sample among the tokens that have this share of the largest probability; 0 for all.
      repetition_penalty: divides positive logits of tokens that the prompt or the answer has, and
        multiplies negative ones; 1 for none.
      presence_penalty: is subtracted from the logits of tokens that the answer has; 0 for none.
      frequency_penalty: likewise, for every time that the answer has them; 0 for none.
      logit_bias: token ids and what is added to their logits.
      logprobs: whether the answer gets the log-probabilities of its tokens, as the target has them
        before penalties, temperature and filters.
      seed: of sampling. The answer depends on it, and not on other requests. None: the number that
        the engine gives the request, so that equal requests get different answers.
      stop_ids: the answer ends with the first of these tokens. None takes the target's
        end-of-sequence tokens, () takes none.
      stop: the answer ends where its text has one of these strings; the engine needs a tokenizer.
        One string may be given as it is, and None for no string, as in vLLM.
      stream: report tokens as they are written, and not the whole answer at its end.
      name: what error messages call it; None for "request" and its number.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: bool = False
    seed: int | None = None
    stop_ids: Sequence[int] | None = None
    stop: Sequence[str] | None = ()
    stream: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        if self.stop is None or isinstance(self.stop, str):  # a string is a sequence of strings
            object.__setattr__(self, "stop", () if self.stop is None else (self.stop,))

    @property
    def stop_strings(self) -> Sequence[str]:
        """The strings that end the answer."""
        return self.stop or ()

    @property
    def is_penalized(self) -> bool:
        """Whether a penalty, a bias or a least number of tokens changes the target's logits."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one prompt. Counters are vLLM's.

    The last step is counted whole, with drafts that were accepted past the answer's end. Where a
    stop string ends the answer and K is chosen while decoding, so are the few steps behind it.

    Attributes:
      prompt_token_ids: the prompt, as it was given.
      output_token_ids: the answer, its stop token included; at most `max_new_tokens`.
      finish_reason: "stop" after a stop token or string, "length" at the limit, "cancelled" after
        `Engine.cancel`, "error" where the target computed NaN or infinity, where the memory did
        not suffice, or where the tokenizer cannot decode the answer; `error` says which.
      is_draft: which output tokens are accepted drafts; as long as `output_token_ids`.
      num_drafts: speculative steps; 0 with plain decoding.
      num_draft_tokens: tokens drafted, K per step.
      num_accepted_per_pos: [K], in how many steps the draft at each position was accepted; [] with
        plain decoding.
      logprobs: of every output token, by the target alone; None where nobody asked for them.
      text: the answer as text, without the stop token or string that ended it; None where the
        engine has no tokenizer.
      error: one line that says what failed; None without a failure.
      stop_reason: the stop string that ended the answer, or the token of the request's `stop_ids`;
        None after the target's end-of-sequence token, and where nothing of this ended it.
    """

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    finish_reason: str
    is_draft: list[bool]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_per_pos: list[int]
    logprobs: list[float] | None = None
    text: str | None = None
    error: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.output_token_ids)

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted drafts, over all steps and positions."""
        return sum(self.num_accepted_per_pos)

    @property
    def acceptance_length(self) -> float | None:
        """Of this answer alone; see the function `acceptance_length`."""
        return acceptance_length([self])


def acceptance_length(answers: Sequence[Generation]) -> float | None:
    """Tokens written per target forward: 1 + accepted / drafts, pooled over answers as in vLLM.

    Args:
      answers: from `generate`, of one call or of several.

    Returns:
      1 to K + 1; None where nothing was drafted.
    """
    num_drafts = sum(answer.num_drafts for answer in answers)
    if num_drafts == 0:
        return None
    return 1 + sum(answer.num_accepted_tokens for answer in answers) / num_drafts


def check_answered(answers: Sequence[Generation], where: str) -> None:
    """Checks that no answer failed, for measurements that would count it as an empty one.

    Raises:
      InputError: one did; the message says why.
    """
    for answer in answers:
        if answer.error is not None:
            next_step = "look for NaN in the weights of the target and the head, or ask for less"
            raise InputError(where, "every prompt must be answered", answer.error, next_step)


def seed_of(seed: int, place: int) -> int:
    """The seed of a prompt, by its place among those that have one seed together.

    One that is out of range stays so, for `check_request` to refuse.
    """
    return (seed + place) % 2**32 if 0 <= seed < 2**32 else seed


def failed_answer(request: Request, error: str | None, reason: str = "error") -> Generation:
    """The answer to a request that was not decoded; its prompt is [] where that is no token ids."""
    try:
        prompt = [operator.index(token) for token in request.prompt]
    except TypeError:
        prompt = []
    return Generation(prompt, [], reason, [], 0, 0, [], error=error)


@dataclasses.dataclass(frozen=True)
class Output:
    """News of one request.

    Attributes:
      request_id: the number that `Engine.add` gave it.
      new_token_ids: tokens of the answer that no earlier output had; [] until the end for a request
        that does not stream.
      answer: the whole answer, in the last output of a request; None before.
      time: when the host had the tokens, in seconds of `time.perf_counter`. `Engine.step` returns
        those of a prompt only after the decoding step that follows.
      new_text: text of the answer that no earlier output had, as far as later tokens cannot change
        it; "" where the engine has no tokenizer, and until the end for a request that does not
        stream. All of an answer's are its text, unless the answer failed.
    """

    request_id: int
    new_token_ids: list[int]
    answer: Generation | None
    time: float
    new_text: str = ""

    @property
    def num_new_tokens(self) -> int:
        """Tokens that no earlier output had."""
        return len(self.new_token_ids)


def check_request(
    where: str, request: Request, config: TargetConfig, k: int, cache_size: int | None
) -> None:
    """Checks that a target can serve a request. Arguments as of `check_prompts`.

    Raises:
      InputError: the prompt is empty, has an unknown token, or does not fit the context or the
        cache together with its answer; a stop token is unknown, a stop string empty, or a sampling
        option out of range.
    """
    _check_types(where, request)
    if request.max_new_tokens < 1:
        raise InputError("max_new_tokens", "must be 1 or more", request.max_new_tokens, "use 128")
    if not 0 <= request.min_tokens <= request.max_new_tokens:
        rule, got = f"must lie in 0..max_new_tokens, {request.max_new_tokens}", request.min_tokens
        raise InputError("min_tokens", rule, got, "use 0 for no such limit")
    options = request.temperature, request.top_k, request.top_p
    check_sampling(*options, request.seed or 0, request.min_p)
    _check_penalties(request, config.vocab)
    _check_prompt(where, request.prompt, config, request.max_new_tokens, k, cache_size)
    for token in () if request.stop_ids is None else request.stop_ids:
        if not 0 <= token < config.vocab:
            rule = f"token ids must lie in 0..{config.vocab - 1}"
            raise InputError("stop_ids", rule, token, "use the target's own tokenizer")
    for string in request.stop or ():
        if not isinstance(string, str):
            next_step = "give stop the text that ends an answer; stop_ids takes tokens"
            raise InputError("stop", "must be strings", repr(string), next_step)
    if any(not string for string in request.stop or ()):
        next_step = "give stop the text that ends an answer, or no string"
        raise InputError("stop", "must have at least one character", "''", next_step)


def _check_types(where: str, request: Request) -> None:
    """Raises InputError for what is no number, or no whole one, where such are needed.

    Arrays and programs would refuse it later, in a step that other requests share.
    """
    encode = "encode it with the target's tokenizer"
    if request.stop is not None and not _is_list(request.stop):
        got, next_step = type(request.stop).__name__, 'write it as ["\\n\\n"]'
        raise InputError(where, "stop is a list of strings", got, next_step)
    if not isinstance(request.logprobs, bool):
        rule = "logprobs is True or False: there are those of the chosen tokens alone"
        raise InputError(where, rule, repr(request.logprobs), "write logprobs=True")
    if request.stop_ids is not None and not _is_list(request.stop_ids):
        got = type(request.stop_ids).__name__
        raise InputError(where, "stop_ids is a list of token ids", got, "write it as [2, 7]")
    if request.logit_bias is not None and not isinstance(request.logit_bias, Mapping):
        got = type(request.logit_bias).__name__
        raise InputError(where, "logit_bias maps token ids to numbers", got, "write {11: -100.0}")
    stop_ids = () if request.stop_ids is None else request.stop_ids  # an array has no truth value
    whole = [("a stop token", value, encode) for value in stop_ids]
    for name in ("max_new_tokens", "min_tokens", "top_k", "seed"):
        if name != "seed" or request.seed is not None:
            whole.append((name, getattr(request, name), f"write {name} without a point"))
    for name, value, next_step in whole:
        if not _is_whole(value):
            raise InputError(where, f"{name} must be a whole number", repr(value), next_step)
    for name in ("temperature", "top_p", "min_p", *PENALTIES):
        value = getattr(request, name)
        if not _is_real(value):
            next_step = f"write {name} as a number, or leave it out"
            raise InputError(where, f"{name} must be a number", repr(value), next_step)


def _is_list(value: object) -> bool:
    """Whether it has items in order: a list, a tuple, or an array of any library."""
    is_array = hasattr(value, "__array__") and hasattr(value, "__len__")
    return is_array or (isinstance(value, Sequence) and not isinstance(value, str | bytes))


def _is_real(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    if not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_whole(value: object) -> bool:
    try:
        operator.index(cast(Any, value))
    except TypeError:
        return False
    return True


def _check_penalties(request: Request, vocab: int) -> None:
    """Raises InputError for the first penalty or bias that is out of range, as vLLM does."""
    # what the device has of it
    if not 0 < as_float32(request.repetition_penalty) < float("inf"):
        rule, got = "must be above 0, and finite", request.repetition_penalty
        raise InputError("repetition_penalty", rule, got, "use 1 for no penalty, or 1.1")
    for name in PENALTIES[1:]:
        value = getattr(request, name)
        if not -2 <= value <= 2:
            raise InputError(name, "must lie in -2..2", value, "use 0 for no penalty, or 0.5")
    for token, value in (request.logit_bias or {}).items():
        if not isinstance(token, numbers.Integral):
            rule, next_step = "token ids must be whole numbers", "write 5 and not '5' or 5.0"
            raise InputError("logit_bias", rule, repr(token), next_step)
        if not 0 <= token < vocab:
            rule, next_step = f"token ids must lie in 0..{vocab - 1}", "use the target's tokenizer"
            raise InputError("logit_bias", rule, token, next_step)
        if not isinstance(value, numbers.Real):
            rule, got = "must be a number", repr(value)
            raise InputError(f"logit_bias of token {token}", rule, got, "write -100.0")
        if not -100 <= value <= 100:
            rule, next_step = "must lie in -100..100", f"use -100 to forbid token {token}"
            raise InputError(f"logit_bias of token {token}", rule, value, next_step)


def check_prompts(
    prompts: Sequence[Any],
    config: TargetConfig,
    max_new_tokens: Any,
    k: int,
    cache_size: int | None,
    names: Sequence[str] | None = None,
) -> None:
    """Checks that a target can serve requests.

    Args:
      config: the target's.
      k: draft tokens per step; 0 for plain decoding.
      cache_size: positions of the cache; None where `generate` chooses it.
      names: where each prompt comes from, for errors; None: "prompt 0" and so on.

    Raises:
      InputError: there is no prompt; a prompt is empty, has a token that the target does not know,
        or does not fit the context or the cache together with its answer.
    """
    if not len(prompts):
        raise InputError("prompts", "at least one prompt is needed", "none", "give a prompt")
    if not _is_whole(max_new_tokens) or max_new_tokens < 1:
        raise InputError("max_new_tokens", "must be 1 or more", max_new_tokens, "use 128")
    for i, prompt in enumerate(prompts):
        where = names[i] if names else f"prompt {i}"
        _check_prompt(where, prompt, config, max_new_tokens, k, cache_size)


def _check_prompt(
    where: str,
    prompt: Any,
    config: TargetConfig,
    max_new_tokens: int,
    k: int,
    cache_size: int | None,
) -> None:
    """Raises InputError where one prompt cannot be served."""
    encode = "encode it with the target's tokenizer"
    if not _is_list(prompt):
        raise InputError(where, "a prompt is token ids", type(prompt).__name__, encode)
    if odd := [token for token in prompt if not _is_whole(token)]:
        rule = "a token of the prompt must be a whole number"
        raise InputError(where, rule, repr(odd[0]), encode)
    if not len(prompt):
        next_step = "give it text, or a start token"
        raise InputError(where, "must have at least one token", "an empty one", next_step)
    unknown = [token for token in prompt if not 0 <= token < config.vocab]
    if unknown:
        rule = f"token ids must lie in 0..{config.vocab - 1}"
        raise InputError(where, rule, unknown[0], "use the target's own tokenizer")
    if len(prompt) + max_new_tokens > config.context:
        rule = f"prompt + new tokens must fit the target's context of {config.context} tokens"
        got = f"{len(prompt)} + {max_new_tokens}"
        raise InputError(where, rule, got, "shorten the prompt, or ask for fewer new tokens")
    needed = len(prompt) + max_new_tokens + k
    if cache_size is not None and needed > cache_size:
        rule = f"prompt + new tokens + K must fit the cache of {cache_size} slots"
        got = f"{len(prompt)} + {max_new_tokens} + {k}"
        next_step = f"raise cache_size to {needed}, or ask for fewer new tokens"
        raise InputError(where, rule, got, next_step)
