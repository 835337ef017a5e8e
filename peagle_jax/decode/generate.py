"""`generate`: token ids of prompts in, answers and acceptance counters out."""

import numbers
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from peagle_jax.checkpoints.pair import check_fit
from peagle_jax.decode.drafters import METHODS, Drafter
from peagle_jax.decode.engine import PREFILL_CHUNK
from peagle_jax.decode.engine_checks import check_at_least_1
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.decode.requests import Generation, Request, check_prompts, seed_of
from peagle_jax.decode.sampling import LEAST_TEMPERATURE
from peagle_jax.types import InputError, Model

# K where none is given and the head was trained for more: the best K of AWS's published heads.
MAX_DEFAULT_K = 7
# The largest K among which `k="auto"` chooses.
MAX_ADAPTIVE_K = 15
# Compilation takes 5 s for K = 128, and a minute for K = 256.
MAX_K = 128


def generate(
    target: Model,
    drafter: Model | Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    k: int | Literal["auto"] | None = None,
    method: str | None = None,
    num_tree_nodes: int | None = None,
    n: int = 1,
    max_new_tokens: int = 128,
    min_tokens: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: bool = False,
    seed: int | Sequence[int] | None = 0,
    sample_drafts: bool = True,
    stop_ids: Sequence[int] | None = None,
    stop: Sequence[str] | None = None,
    tokenizer: Any = None,
    cache_size: int | None = None,
    draft_params: Any = None,
    prefill_chunk: int | None = PREFILL_CHUNK,
    sliding_cache: bool = False,
    num_threads: int | None = None,
    max_batch: int | None = None,
) -> list[Generation]:
    """Continues every prompt. Drafting does not change the target's output.

    Greedy output equals plain greedy output token for token. Sampled output has the target's
    distribution (arXiv:2211.17192).

    Args:
      target: from `load_target`, with the draft head's aux hidden state layers. On a mesh with an
        axis "data" the prompts are divided among the groups of devices along it.
      drafter: a draft head from `load_drafter`; or a `Drafter`, with its `draft_params`; or None
        for plain decoding.
      prompts: token ids, at least one per prompt.
      k: tokens drafted per step. None takes the K that the head was trained for, but at most 7,
        which is the best K of the published heads. "auto" chooses while decoding, by what pays.
      method: how the head drafts, "peagle", "eagle3" or "eagle". None takes what it was made for.
      num_tree_nodes: verify a tree of so many drafts per step, and not a chain of K (P-EAGLE).
      n: answers to every prompt, each with a seed of its own; above 1 for sampling.
      max_new_tokens: limit of every answer.
      min_tokens: of every answer, before which no stop token or string ends it.
      temperature: 0 decodes greedily.
      top_k: sample among the k most probable tokens; 0, or vLLM's -1, for all.
      top_p: sample among the most probable tokens whose probability sums to this; 1 for all.
      min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, logprobs: of every
        answer, as `Request` explains them.
      seed: one per prompt, of which its answer j takes the seed + j; or a single one, from which
        answer i of all takes seed + i. None: the number of the answer, from 0 on.
      sample_drafts: at a temperature above 0, sample the drafts (True) or draft argmaxes, of a tree
        the likeliest paths (False).
        The target's distribution is kept either way.
      stop_ids: an answer ends with the first of these. None takes the target's end-of-sequence
        tokens, () takes none.
      stop: an answer ends where its text has one of these strings; needs the tokenizer.
      tokenizer: the target's; with it answers have their `text`.
      cache_size: positions that the target's KV cache may grow to. None: as many as needed.
      draft_params: parameters of a `Drafter`; unused with a draft head, which has its own.
      prefill_chunk: the most tokens of each prompt in one forward. None takes whole prompts, or 512
        tokens with `sliding_cache`. On a CPU that takes longer: no key is left out that some query
        sees.
      sliding_cache: give layers with a sliding window a ring cache of window + chunk positions.
        The answers are the same, from less memory.
      num_threads: threads that decode at the same time, each a part of the prompts. None: one for
        each core of a CPU, up to four, where the weights are small enough for that to pay. A target
        on several devices takes no more than one.
      max_batch: prompts that are decoded together; the others wait for places. None: all of them.

    Returns:
      The answers in the order of the prompts, n for each.

    Raises:
      InputError: a prompt is empty, has an unknown token, or does not fit the target's context,
        the cache or the memory; a sampling option, `k`, `prefill_chunk`, `max_batch` or
        `num_threads` is out of range; the head was made for another target or cannot draft by
        `method`.
    """
    for name, model in (("target", target), ("drafter", drafter)):
        if isinstance(model, str | Path):
            next_step = "load both: target, head = peagle_jax.load_pair(TARGET, HEAD)"
            raise InputError(name, "is a loaded model", model, next_step)
    prompts = _as_list(prompts)
    if isinstance(drafter, Model):
        check_fit(target, drafter)
        draft_params = drafter.params
        drafter = make_drafter(drafter, k, method)
    elif drafter is not None and (method is not None or k not in (None, "auto", drafter.k)):
        rule, got = "a Drafter has its own K and method", f"k={k}, method={method}"
        raise InputError("k", rule, got, "leave out k and method, or give a draft head")
    if drafter is None and (k is not None or method is not None):
        rule, got = "tokens are drafted by a head", f"no drafter, k={k}, method={method}"
        raise InputError("k", rule, got, "give a draft head, or leave out k and method")
    num_drafts = drafter.k if drafter else 0
    check_prompts(prompts, target.config, max_new_tokens, num_drafts, cache_size)
    prompts = [np.asarray(prompt).tolist() for prompt in prompts]  # arrays, too
    check_num_answers("n", n, temperature)
    seeds = _seeds(seed, len(prompts), n)
    prompts = [prompt for prompt in prompts for _ in range(n)]
    requests = [
        Request(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            logprobs=logprobs,
            seed=row_seed,
            stop_ids=stop_ids,
            stop=stop,
        )
        for prompt, row_seed in zip(prompts, seeds, strict=True)
    ]
    check_at_least_1("max_batch", max_batch, 8)
    max_batch = min(len(prompts), max_batch or len(prompts))
    engine = make_engine(
        target,
        drafter,
        draft_params,
        num_tree_nodes=num_tree_nodes,
        adaptive_k=k == "auto",
        max_batch=max_batch,
        num_threads=num_threads,
        cache_size=cache_size,
        prefill_chunk=prefill_chunk,
        sliding_cache=sliding_cache,
        sample_drafts=sample_drafts,
        tokenizer=tokenizer,
    )
    longest = sorted(requests, key=lambda request: len(request.prompt))[-max_batch:]
    engine.check_memory(longest)
    for request in requests:
        engine.add(request)
    answers = {}
    while engine.has_work:
        for output in engine.step():
            if output.answer is not None:
                answers[output.request_id] = output.answer
    return [answers[i] for i in range(len(prompts))]


def _as_list(prompts: Any) -> list:
    """The prompts, of which there may be an iterator.

    Raises:
      InputError: they are what a tokenizer takes or gives, and no lists of token ids.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        next_step = 'give tokenizer(texts)["input_ids"]'
        rule, got = "must be lists of token ids, one for each prompt", type(prompts).__name__
        raise InputError("prompts", rule, got, next_step)
    return list(prompts)


def check_num_answers(option: str, n: Any, temperature: Any) -> None:
    """Raises InputError where a prompt cannot have `n` answers.

    Args:
      option: what the caller calls n.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise InputError(option, "must be a whole number of 1 or more", repr(n), "use 1")
    is_greedy = isinstance(temperature, numbers.Real) and float(temperature) < LEAST_TEMPERATURE
    if n > 1 and is_greedy:
        rule, got = "answers of one prompt differ by sampling", f"{n}, at temperature {temperature}"
        raise InputError(option, rule, got, f"use {option} 1, or a temperature such as 0.7")


def _seeds(seed: Any, num_prompts: int, n: int) -> list[int | None]:
    """The seeds of all answers; None for an answer's own number. InputError as of `generate`."""
    if seed is None:
        return [None] * (num_prompts * n)
    if isinstance(seed, numbers.Integral):
        return [seed_of(int(seed), place) for place in range(num_prompts * n)]
    if isinstance(seed, numbers.Real):
        raise InputError("seed", "must be a whole number", seed, "write it without a point")
    if len(seed) != num_prompts:
        rule, got = f"one seed for each of {num_prompts} prompts", f"{len(seed)} seeds"
        raise InputError("seed", rule, got, "give as many, or one number for all")
    if n == 1:
        return list(seed)
    if odd := [x for x in seed if not isinstance(x, numbers.Integral)]:
        raise InputError("seed", "must be whole numbers", repr(odd[0]), "write 5 and not 5.0")
    return [seed_of(int(x), answer) for x in seed for answer in range(n)]


def default_k(head: Model) -> int:
    """K where none is given."""
    trained_for = head.config.num_depths or MAX_DEFAULT_K
    return min(trained_for, MAX_DEFAULT_K)


def check_k(k: Any, example: int = MAX_DEFAULT_K) -> None:
    """Raises InputError where K is no whole number, below 1, or above MAX_K."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise InputError("K", 'must be a whole number, or "auto"', repr(k), f"use {example}")
    if k < 1:
        next_step = "use -k 1 or more, or --method none for plain decoding"
        raise InputError("K", "at least one token must be drafted per step", k, next_step)
    if k > MAX_K:
        rule = f"at most {MAX_K} drafts per step, as compilation takes minutes beyond"
        raise InputError("K", rule, k, f"use -k {example}")


def make_drafter(
    head: Model, k: int | Literal["auto"] | None, method: str | None = None
) -> Drafter:
    """A drafter that runs a draft head.

    Args:
      k: tokens drafted per step. None takes the K that the head was trained for, but at most 7;
        "auto" likewise, but at most 15: the largest K for an engine that chooses (`adaptive_k`).
      method: "peagle", "eagle3" or "eagle". None takes "peagle" for a head that can draft in
        parallel. Such a head drafts by "eagle3" too.

    Raises:
      InputError: the head cannot draft by that method, or K is below 1 or above MAX_K.

    Warns:
      UserWarning: K is more than twice what the head was trained for.
    """
    if k == "auto":
        num_drafts = min(head.config.num_depths or MAX_DEFAULT_K, MAX_ADAPTIVE_K)
    else:
        num_drafts = default_k(head) if k is None else k
    check_k(num_drafts, default_k(head))
    trained_for = head.config.num_depths
    if trained_for and num_drafts > 2 * trained_for:
        message = (
            f"K = {num_drafts} is far above {trained_for}, for which the head was trained: later "
            f"drafts are seldom accepted; compare with -k {default_k(head)}"
        )
        warnings.warn(message, UserWarning, stacklevel=2)
    if method is None:
        method = head.config.method
    if method not in METHODS:
        rule = f"must be one of {', '.join(METHODS)} or none"
        raise InputError("method", rule, method, "use peagle for a head with a mask token")
    if method == "peagle" and not head.config.parallel:
        rule = "parallel drafting needs a mask token and mask_hidden"
        got = f"{method}, and a head without them"
        raise InputError("method", rule, got, f"use {head.config.method}")
    if (method == "eagle") != head.config.predicts_features:
        rule = "eagle is for heads that read the target's final hidden state, and for no others"
        got = f"{method}, and a head of another kind"
        raise InputError("method", rule, got, f"use {head.config.method}")
    return METHODS[method](head.graph, head.config, num_drafts)
